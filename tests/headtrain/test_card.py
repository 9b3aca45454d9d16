"""The card says what the report says, and nothing of this machine."""

import json
import re

import pytest
import yaml

from decode.errors import UserError
from headtrain.card import hub_name, public_name, serving_formats, training_recipe, write_card
from tests.headtrain.report import make_report

CONFIG = {
    "family": "eagle3",
    "layers": [1, 2],
    "target": {"name": "org/target", "model_type": "llama", "num_layers": 3, "hidden_size": 32, "vocab_size": 101},
}
RECIPE = {
    "target": {"model": "/home/someone/models/target", "revision": None, "dtype": "bfloat16"},
    "head": {"family": "eagle3", "layers": [1, 2]},
    "data": {"train": ["../private/chats.jsonl", "org/chats:train"], "cache": "/scratch/features", "limit": None},
    "train": {"epochs": 3, "betas": [0.9, 0.95], "save_every": 100},
    "eval": {"prompts": "/home/someone/prompts.jsonl"},
    "output": "/home/someone/run",
}


@pytest.fixture
def card(tmp_path):
    """Makes the card of a report."""

    def make(report=None, recipe=RECIPE, config=CONFIG, **options) -> str:
        (tmp_path / "report.json").write_text(json.dumps(report or make_report()))
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return write_card(
            "org/name", config, training_recipe(tmp_path / "recipe.yaml"), tmp_path / "report.json", **options
        )

    return make


def numbers(value) -> list[float]:
    """All numbers of a report, those inside its texts included."""
    if isinstance(value, dict | list):
        return [n for item in (value.values() if isinstance(value, dict) else value) for n in numbers(item)]
    if isinstance(value, str):
        return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", value)]
    return [] if value is None else [float(value)]


def unfounded(card: str, report: dict) -> list[str]:
    """Numbers in the tables of the section Measured that are no rounded number of the report.

    The plan is told in words and the depths are the columns' names, so both are left out.
    """
    section = card.split("## Measured")[1].split("\n## ")[0]
    rows = [
        line
        for line in section.splitlines()
        if line.startswith("|") and not re.match(r"\| (prompts \| 1|guesses)", line)
    ]
    assert len(rows) > 8
    known = numbers(report)

    def found(text: str) -> bool:
        digits = len(text.partition(".")[2])
        return any(f"{number:.{digits}f}" == text for number in known)

    return [text for row in rows for text in re.findall(r"\d+(?:\.\d+)?", row) if not found(text)]


def test_every_number_is_in_the_report(card):
    text, report = card(), make_report()
    assert unfounded(text, report) == []
    report["sets"][1]["acceptance_length"] = 2.5  # the control: a card of another report
    assert unfounded(text, report) == ["2.26"]


def test_tables_are_markdown(card):
    report = make_report()
    report["sets"][1]["acceptance_by_depth"] = [0.5]
    text = card(report)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    for rows in tables:
        columns = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        assert len(columns) == 1 and re.fullmatch(r"(\|-+:?)+\|", rows[1].replace("--:", "---:")), rows
    assert "| two\\|halves | 0.50 | - |" in text
    assert "\n\n\n" not in text and "{{" not in text and "{%" not in text


def test_metadata(card):
    metadata = yaml.safe_load(card(license="apache-2.0").split("---\n")[1])
    assert metadata == {
        "base_model": "org/target",
        "datasets": ["org/chats"],
        "library_name": "headtrain",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-head", "eagle3"],
    }
    assert "license" not in card().split("---\n")[1]


def test_no_path_of_this_machine(card):
    folder = {**CONFIG, "target": {**CONFIG["target"], "name": "/home/someone/models/target"}}
    text = card(config=folder)
    for private in ("/home", "someone", "private", "scratch", "/run", "/tmp"):
        assert private not in text, private
    assert "Trained on `chats.jsonl`, `org/chats:train` with" in text and "with `target`" in text
    assert "base_model" not in text and "--target FOLDER" in text
    named = card(config=folder, target="org/target")
    assert "base_model: org/target" in named and "org/name --target org/target" in named
    assert "--target" not in card()


def test_sections(card):
    text = card(servers={"vllm": "speculators"})
    assert "--format speculators" in text and "## Use it in vLLM" in text and "SGLang" not in text
    assert "final norm" not in text
    assert "behind the target's final norm" in card(
        config={**CONFIG, "layers": [1, 3]}, servers={"vllm": "speculators"}
    )
    text = card(servers={"sglang": "sglang"})
    assert "## Use it in SGLang" in text and "--speculative-algorithm EAGLE3" in text and "vLLM" not in text
    assert "answers stay the target's own" in text and "lossy" not in text
    assert "lossy" in card(make_report(rule="typical", temperature=0.7))
    assert "came without its recipe" in card(recipe={})
    assert "4 prompts at a time" in card(make_report(batch_size=4))
    plan = {"kind": "dynamic", "depth": 3, "width": 4, "size": 12, "noise_weight": 0.0, "sharpness": 1.0}
    assert "the best 12 nodes, 3 deep and 4 wide" in card(make_report(plan=plan))


def test_serving_formats():
    head = {"family": "eagle3", "head": {}, "layers": [1, 2], "target": {"num_layers": 3}}
    assert serving_formats(head) == {"vllm": "speculators", "sglang": "sglang"}
    assert serving_formats({**head, "layers": [1, 3]}) == {"vllm": "speculators"}, "SGLang has no state behind the norm"
    assert serving_formats({**head, "family": "hydra"}) == {}


def test_damaged_reports_are_named(card):
    for key in ("device", "settings", "sets", "mean"):
        report = make_report()
        del report[key]
        with pytest.raises(UserError, match=f"report.json: is no report, {key}: .*; measure the head again"):
            card(report)
    with pytest.raises(UserError, match="sets"):
        card({**make_report(), "sets": []})
    report = make_report()
    report["sets"][0]["acceptance_by_depth"][1] = float("nan")
    with pytest.raises(UserError, match="sets.0.acceptance_by_depth.1"):
        card(report)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("org/chats", "org/chats"),
        ("org/chats/config:train", "org/chats/config:train"),
        ("models/target", "target"),
        ("data/chats.jsonl", "chats.jsonl"),
        ("/tmp/features/", "features"),
        ("~/chats", "chats"),
        ("C:\\Users\\someone\\chats.jsonl", "chats.jsonl"),
        ("cosine", "cosine"),
    ],
)
def test_public_names(source, name):
    assert public_name(source) == name
    assert hub_name(source) == (source if name == source and "/" in source else None)
