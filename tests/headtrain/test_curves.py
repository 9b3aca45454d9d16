import json

from headtrain.curves import collect, draw_curves

LINES = [
    {"step": 1, "loss": 3.0, "acceptance": [0.5, 0.25]},
    {"step": 2, "loss": 2.0, "acceptance": [0.75, 0.5]},
    {"step": 2, "eval_loss": 2.5, "acceptance_length": 1.5},
]


def test_points_come_from_the_lines():
    assert list(collect(LINES).values()) == [
        {"training": [(1, 3.0), (2, 2.0)], "held out": [(2, 2.5)]},
        {"depth 1": [(1, 0.5), (2, 0.75)], "depth 2": [(1, 0.25), (2, 0.5)]},
        {"decoded": [(2, 1.5)]},
    ]


def test_picture(tmp_path):
    assert draw_curves(tmp_path) is None
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert draw_curves(tmp_path).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "log.jsonl"]


def test_without_matplotlib(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert draw_curves(tmp_path) is None
