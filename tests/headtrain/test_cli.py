"""The commands as a user types them: what they print, what they write, how they fail."""

import json

import pytest

from headtrain import cli
from headtrain.trainer import train
from tests.folders import make_recipe, write_recipe


def run(capsys, monkeypatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["headtrain", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
        raise SystemExit(0)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.fixture(scope="module")
def head_folder(target_folder, chats, tmp_path_factory):
    return train(make_recipe(target_folder, chats, tmp_path_factory.mktemp("run") / "run", steps=4, save_every=4))


def test_inspect(capsys, monkeypatch, tmp_path, target_folder, chats, fresh_accelerator):
    recipe = write_recipe(tmp_path / "r.yaml", target_folder, chats, tmp_path / "out")
    code, out, _ = run(capsys, monkeypatch, "inspect", str(recipe))
    assert code == 0 and "kept" in out and "memory in all" in out and "time of all steps" in out
    code, out, _ = run(capsys, monkeypatch, "inspect", str(recipe), "--steps", "0")
    assert code == 0 and "kept" in out and "memory" not in out


def test_cache_then_train(capsys, monkeypatch, tmp_path, target_folder, chats):
    recipe = write_recipe(tmp_path / "r.yaml", target_folder, chats, tmp_path / "out")
    cache = tmp_path / "cache"
    code, out, err = run(capsys, monkeypatch, "cache", str(recipe), f"data.cache={cache}")
    assert code == 0 and out.strip() == str(cache) and "bytes a token" in err
    small = [f"data.cache={tmp_path / 'small'}", "data.cache_dtype=float8_e4m3fn"]
    code, _, err = run(capsys, monkeypatch, "cache", str(recipe), *small)
    assert code == 0 and "relative error of float8_e4m3fn: features " in " ".join(err.split())
    code, _, err = run(capsys, monkeypatch, "cache", str(recipe))
    assert code == 2 and err.strip() == "headtrain: data.cache: names no folder; add data.cache=FOLDER"


def test_generate_evaluate_and_tune(capsys, monkeypatch, tmp_path, head_folder):
    code, out, _ = run(capsys, monkeypatch, "generate", str(head_folder), "rain", "--max-new-tokens", "8")
    assert code == 0 and out.endswith("\n")
    prompts = tmp_path / "asks.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "old stones"}]}) + "\n")
    options = ["--prompts", str(prompts), "--out", str(tmp_path / "out"), "--max-new-tokens", "8", "--dtype", "float32"]
    code, out, _ = run(capsys, monkeypatch, "evaluate", str(head_folder), *options)
    assert code == 0 and "mean" in out and (tmp_path / "out" / "report.json").is_file()
    monkeypatch.setattr("headtrain.tune.NEW_TOKENS", 8)
    monkeypatch.setattr("headtrain.tune.REPEATS", 1)
    code, out, _ = run(capsys, monkeypatch, "tune", str(head_folder), "--dtype", "float32")
    assert code == 0 and "tokens/s, predicted speedup" in out and (head_folder / "tree.json").is_file()


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_drafts_without_training(capsys, monkeypatch, tmp_path, target_folder, draft):
    prompts = tmp_path / "asks.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "old stones old stones"}]}) + "\n")
    name = draft if draft == "ngram" else str(target_folder)
    options = [
        "--prompts",
        str(prompts),
        "--out",
        str(tmp_path / "out"),
        "--max-new-tokens",
        "12",
        "--dtype",
        "float32",
    ]
    code, _, _ = run(capsys, monkeypatch, "evaluate", name, "--target", str(target_folder), *options)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert code == 0 and report["sets"][0]["parity"]["identical"] == 1
    if draft == "model":  # the target drafts for itself: every guess is right
        assert report["sets"][0]["acceptance_length"] > 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate", "HEAD", "rain", "--max-new-tokens", "100000"], ["context", "shorten"]),
        (["generate", "HEAD", "rain", "--temperature", "-1"], ["temperature is -1.0"]),
        (["generate", "HEAD", "rain", "--temperature", "nan"], ["temperature is nan"]),
        (["generate", "HEAD", "rain", "--rule", "gumble", "--temperature", "1"], ["did you mean 'gumbel'"]),
        (["generate", "nowhere", "rain"], ["nowhere", "is not a head"]),
        (["evaluate", "HEAD", "--prompts", "gone.jsonl", "--out", "out"], ["gone.jsonl"]),
        (["inspect", "gone.yaml"], ["gone.yaml", "no such recipe"]),
        (["generate", "HEAD", "rain", "--target", "gone"], ["gone"]),
        (["generate", "ngram", "rain"], ["--target", "knows no target"]),
        (["tune", "org/name@v1"], ["org/name@v1", "hf download org/name --revision v1 --local-dir FOLDER"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line(capsys, monkeypatch, tmp_path, head_folder, arguments, parts):
    monkeypatch.chdir(tmp_path)
    arguments = [str(head_folder) if argument == "HEAD" else argument for argument in arguments]
    code, _, err = run(capsys, monkeypatch, *arguments)
    lines = [line for line in err.strip().splitlines() if "Loading weights" not in line]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("headtrain: "), err
    assert all(part in lines[0] for part in parts), lines[0]
