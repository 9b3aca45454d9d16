"""`headtrain evaluate` and `headtrain predict` as a user types them, on a tiny head."""

import json

import pytest

from headtrain.trainer import train
from tests.folders import make_recipe
from tests.headtrain.test_cli import run


@pytest.fixture(scope="module")
def head_folder(target_folder, chats, tmp_path_factory):
    return train(make_recipe(target_folder, chats, tmp_path_factory.mktemp("run") / "run", steps=4, save_every=4))


@pytest.fixture
def prompts(tmp_path):
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("the tree", "rain falls")]
    path = tmp_path / "asks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def options(prompts, out):
    return ["--prompts", prompts, "--out", str(out), "--max-new-tokens", "8", "--dtype", "float32"]


def test_one_run_writes_report_plots_and_page(capsys, monkeypatch, tmp_path, head_folder, prompts):
    monkeypatch.setattr("headtrain.tune.REPEATS", 1)
    out = tmp_path / "out"
    code, shown, err = run(capsys, monkeypatch, "evaluate", str(head_folder), *options(prompts, out), "--tokens", "2")
    assert code == 0, err
    assert "predicted" in shown and "mean" in shown and str(out / "report.html") in shown
    assert {"report.json", "report.html", "speedup_by_set.png", "step_time.png"} <= {
        path.name for path in out.iterdir()
    }
    page = (out / "report.html").read_text()
    assert page.count('<section class="reply"') == 2 and "Predicted and measured" in page
    assert "predicted" not in json.loads((out / "report.json").read_text())["sets"][0]


def test_a_sweep_over_everything(capsys, monkeypatch, tmp_path, head_folder, target_folder, prompts):
    out = tmp_path / "out"
    words = [str(head_folder), "ngram", "--target", str(target_folder), *options(prompts, out), "--limit", "1"]
    words += ["--sweep", "batch=1,2", "temperature=0,1", "context=64", "tree=1,3"]
    code, shown, err = run(capsys, monkeypatch, "evaluate", *words)
    assert code == 0, err
    points = sorted((out / "points").iterdir())
    assert len(points) == 16 and "point 16 of 16" in err
    saved = [json.loads(path.read_text()) for path in points]
    for entry in saved:
        assert entry["report"]["sets"][0]["parity"]["identical"] == 1
        plan = entry["report"]["settings"]["plan"]
        assert (plan == {"kind": "plain"}) == (entry["point"]["tree"] == 1)
        if plan["kind"] == "plain":
            assert entry["report"]["mean"]["acceptance_length"] == 1
    assert {"speedup_by_batch.png", "tokens_per_second_by_tree.png", "speedup_by_head.png"} <= {
        p.name for p in out.iterdir()
    }
    assert (out / "report.html").read_text().count("<tr><td>") == 16
    points[3].unlink()
    code, _, err = run(capsys, monkeypatch, "evaluate", *words)
    assert code == 0 and err.count("measured before") == 15


def test_a_sweep_says_what_a_context_leaves_out(capsys, monkeypatch, tmp_path, head_folder, prompts):
    with open(prompts, "a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "rain falls " * 40}]}) + "\n")
    words = [str(head_folder), *options(prompts, tmp_path / "out"), "--sweep", "context=48"]
    code, _, err = run(capsys, monkeypatch, "evaluate", *words)
    assert code == 0 and "context 48: 1 longer prompts are left out" in err


def test_rules_side_by_side(capsys, monkeypatch, tmp_path, head_folder, prompts):
    words = [str(head_folder), *options(prompts, tmp_path / "out"), "--limit", "1", "--temperature", "1"]
    code, shown, err = run(capsys, monkeypatch, "evaluate", *words, "--sweep", "rule=gumbel,rejection,block,typical")
    assert code == 0, err
    assert all(rule in shown for rule in ("gumbel", "rejection", "block", "typical"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rule", "foo"], "rule 'foo' is unknown"),
        (["--rule", "gumbel"], "temperature is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--batch-size", "0"], "--batch-size: 0"),
        (["--dtype", "float12"], "--dtype: float12 is unknown"),
        (["--limit", "0"], "--limit: 0"),
        (["--tokens", "-1"], "--tokens: -1"),
        (["--prompts", "mtbench"], "did you mean mt_bench"),
        (["--out", "asks.jsonl"], "--out: asks.jsonl is or lies below a file"),
        (["--temperature", "abc"], "invalid value for '--temperature'"),
        (["--tokns", "1"], "no such option: --tokns"),
        (["--sweep", "bach=1"], "did you mean batch"),
        (["--sweep", "rule=foo"], "rule 'foo' is unknown"),
        (["nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_found_before_a_model_is_loaded(
    capsys, monkeypatch, tmp_path, head_folder, prompts, arguments, words
):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("headtrain.target.Target.load", load)
    monkeypatch.chdir(tmp_path)
    usual = {"--prompts": prompts, "--out": str(tmp_path / "out")}
    given = dict(zip(arguments[::2], arguments[1::2], strict=False)) if arguments[0].startswith("-") else {}
    heads = [str(head_folder)] if given else arguments
    flat = [word for pair in {**usual, **given}.items() for word in pair]
    code, _, err = run(capsys, monkeypatch, "evaluate", *heads, *flat)
    assert code == 2 and err.count("\n") == 1 and err.startswith("headtrain: ") and words in err, err
    assert not (tmp_path / "out").exists()


def test_predict_on_paper(capsys, monkeypatch):
    words = ["--acceptance", "0.8", "--device", "h100", "--parameters", "8B", "--draft-parameters", "0.8B"]
    code, shown, _ = run(capsys, monkeypatch, "predict", *words, "--dtype", "float16", "--batch", "1,1k")
    assert code == 0 and "4.78" in shown and "2.46" in shown  # ms a token; (1 - .8^6) / .2 / 1.5
    assert "warning: batch 1024, context 1024, temperature 0: speculation does not pay" in shown


def test_predict_from_a_head(capsys, monkeypatch, head_folder, prompts):
    monkeypatch.setattr("headtrain.tune.NEW_TOKENS", 8)
    monkeypatch.setattr("headtrain.tune.REPEATS", 1)
    (head_folder / "tree.json").unlink(missing_ok=True)
    words = ["predict", str(head_folder), "--prompts", prompts, "--chains", "1,2", "--trees", "4", "--dtype", "float32"]
    code, _, err = run(capsys, monkeypatch, *words)
    assert code == 2 and "no step times; run `headtrain tune" in err
    assert run(capsys, monkeypatch, "tune", str(head_folder), "--dtype", "float32")[0] == 0
    code, shown, err = run(capsys, monkeypatch, *words, "--temperature", "0,1")
    assert code == 0, err
    assert "chain 2" in shown and "tree 4" in shown and "context as tuned" in shown
    assert len(json.loads((head_folder / "profile.json").read_text())) == 2
    code, shown, _ = run(capsys, monkeypatch, *words, "--bandwidth", "100", "--tflops", "1", "--context", "64,128")
    assert code == 0 and "128" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a device"),
        (["--device", "h1000"], "h1000 is unknown; use a100"),
        (["--device", "h100"], "give --parameters"),
        (["--device", "h100", "--parameters", "8X"], "'8X' is no positive number"),
        (["--device", "h100", "--parameters", "8B"], "give --draft-parameters"),
        (["--device", "h100", "--parameters", "8B", "--draft-parameters", "1B"], "give --acceptance"),
        (["--bandwidth", "-3", "--tflops", "9", "--parameters", "8B"], "--bandwidth: -3"),
        (["--bandwidth", "100", "--parameters", "8B"], "--tflops: is missing"),
        (["--chains", "x"], "--chains: 'x' is no number"),
        (["--device", "h100", "--parameters", "8B", "--draft-parameters", "1B", "--acceptance", "0.8,x"], "no list of shares"),
        (["--device", "h100", "--parameters", "8B", "--draft-parameters", "1B", "--acceptance", "0.8,0.7"], "known to depth 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_predict_mistakes_are_one_line(capsys, monkeypatch, arguments, words):
    code, _, err = run(capsys, monkeypatch, "predict", *arguments)
    assert code == 2 and err.count("\n") == 1 and words in err, err
