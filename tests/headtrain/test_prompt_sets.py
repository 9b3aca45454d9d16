"""Prompt sets by name: from files, from a stand-in for the Hub, and what a user may get wrong."""

import json

import datasets
import pytest

from decode.errors import UserError
from headtrain.prompt_sets import COUNT, SETS, load_sets


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_every_shape(tmp_path):
    shapes = {
        "mt_bench": {"prompt": ["first", "second"]},
        "humaneval": {"prompt": "def f(x):"},
        "gsm8k": {"question": "2 + 2?", "answer": "4"},
        "alpaca": {"instruction": "Translate", "input": "pomme", "output": "apple"},
        "cnn_dm": {"article": "News {with braces}.", "highlights": "x"},
        "nq": {"question": "who?", "answer": ["he"]},
        "spec_rag": {"turns": ["long"], "category": "rag"},
        "spec_qa": {"messages": [{"role": "user", "content": "why?"}]},
    }
    sources = [f"{name}={write(tmp_path / f'{name}.jsonl', [row])}" for name, row in shapes.items()]
    texts = {name: rows[0][0]["content"] for name, rows in load_sets(sources).items()}
    assert texts == {
        "mt_bench": "first",
        "humaneval": "Complete this Python function.\n\ndef f(x):",
        "gsm8k": "2 + 2?",
        "alpaca": "Translate\n\npomme",
        "cnn_dm": "Summarize: News {with braces}.",
        "nq": "who?",
        "spec_rag": "long",
        "spec_qa": "why?",
    }


def test_spec_bench_is_six_sets_of_one_file(tmp_path):
    names = ("writing", "translation", "summarization", "qa", "math_reasoning", "rag")
    rows = [{"category": name, "turns": [f"{name} {i}"]} for i in range(100) for name in names]
    found = load_sets([f"spec_bench={write(tmp_path / 'question.jsonl', rows)}"])
    assert list(found) == [name for name in SETS if name.startswith("spec_")] and len(found) == 6
    assert {len(prompts) for prompts in found.values()} == {COUNT}
    assert found["spec_math"][1][0]["content"] == "math_reasoning 1"


def test_the_hub_is_asked_for_the_right_rows(monkeypatch):
    asked = []

    def load(name, config, **options):
        asked.append((name, config, options))
        return [{"question": f"{i}?"} for i in range(200)]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(load_sets(["gsm8k"], 3)["gsm8k"]) == 3 and len(load_sets(["spec_math"])["spec_math"]) == COUNT
    assert asked == [
        ("openai/gsm8k", "main", {"split": "test", "streaming": True}),
        (
            "RedHatAI/speculator_benchmarks",
            None,
            {"split": "train", "streaming": True, "data_files": "math_reasoning.jsonl"},
        ),
    ]

    def fail(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"cannot load openai/gsm8k .*give gsm8k=FILE$") as error:
        load_sets(["gsm8k"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("mt_bnch", "did you mean mt_bench"),
        ("humanevla", "did you mean humaneval"),
        ("gms8k=rows.jsonl", "did you mean gsm8k"),
        ("zzzz", "no set of that name; sets: mt_bench"),
        ("gsm8k=gone.jsonl", "gsm8k=gone.jsonl: no such file"),
        ("gsm8k=empty.jsonl", "empty"),
        ("spec_rag=qa.jsonl", "spec_rag=qa.jsonl has no rows of category rag"),
        ("gsm8k=odd.jsonl", r"odd.jsonl:1: none of prompt, .* it has x"),
        ("qa.jsonl", "unknown row"),
    ],
)
def test_mistakes_are_one_line(source, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    write(tmp_path / "qa.jsonl", [{"category": "qa", "turns": ["a"]}])
    write(tmp_path / "odd.jsonl", [{"x": 1}])
    with pytest.raises(UserError, match=words) as error:
        load_sets([source])
    assert "\n" not in str(error.value)


def test_names_and_limits(tmp_path):
    one, two = tmp_path / "a", tmp_path / "b"
    row = [{"messages": [{"role": "user", "content": "x"}]}]
    for folder in (one, two):
        folder.mkdir()
        write(folder / "asks.jsonl", row * 3)
    assert len(load_sets([str(one / "asks.jsonl")], 2)["asks"]) == 2
    with pytest.raises(UserError, match="two sets are called asks"):
        load_sets([str(one / "asks.jsonl"), str(two / "asks.jsonl")])
    with pytest.raises(UserError, match="--limit: 0"):
        load_sets([str(one / "asks.jsonl")], 0)
