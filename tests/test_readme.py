"""The README's tour, run command by command with a tiny target and few steps."""

import json
import re
import shlex
from pathlib import Path

import pytest

import train
from headtrain import cli
from tests.folders import ROOT, write_chats, write_recipe

README = (ROOT / "README.md").read_text()
TOUR = re.search(r"<!-- tests/test_readme.py.*?```\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    assert TOUR is not None
    return [shlex.split(line, comments=True) for line in TOUR[1].splitlines()]


@pytest.fixture(scope="module")
def place(target_folder, tmp_path_factory) -> Path:
    """A folder with the recipe and the files that the tour names."""
    folder = tmp_path_factory.mktemp("tour")
    (folder / "recipes").mkdir()
    recipe = folder / "recipes" / "smollm2-135m-eagle3.yaml"
    write_recipe(recipe, target_folder, write_chats(folder / "chats.jsonl"), folder / "runs" / "default", steps=2)
    raw = json.loads(recipe.read_text())
    raw["head"]["layers"] = [0, 1, 2]  # servers take no state behind the final norm
    raw["synthesize"] = {"max_new_tokens": 8, "max_prompt_tokens": 64}
    recipe.write_text(json.dumps(raw))
    asks = [{"messages": [{"role": "user", "content": "old stones"}]}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(ask) + "\n" for ask in asks))
    (folder / "models").mkdir()
    (folder / "models" / "SmolLM2-135M-Instruct").symlink_to(target_folder)
    return folder


def test_the_tour_runs(place, monkeypatch, fresh_accelerator, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr("headtrain.tune.NEW_TOKENS", 8)
    monkeypatch.setattr("headtrain.tune.REPEATS", 1)
    few = {"evaluate": ["--max-new-tokens", "8"], "generate": ["--max-new-tokens", "8"]}
    for program, *arguments in commands():
        if program == "accelerate":
            assert arguments[:2] == ["launch", "train.py"]
            code = train.main(arguments[2:])
        else:
            assert program == "headtrain"
            arguments = ["synthesize.number=2" if word == "synthesize.number=2000" else word for word in arguments]
            monkeypatch.setattr("sys.argv", ["headtrain", *arguments, *few.get(arguments[0], [])])
            with pytest.raises(SystemExit) as end:
                cli.main()
            code = end.value.code
        assert not code, f"{program} {' '.join(arguments)}: {capsys.readouterr().err}"
    assert (place / "runs" / "report" / "report.html").is_file()


def test_the_readme_is_short_and_names_what_exists():
    assert len(README.splitlines()) <= 150
    tree = README.split("## Files")[1].split("```")[1]
    for word in re.findall(r"[a-z_/]+\.(?:py|sh)", tree):
        name = word.rpartition("/")[2]
        assert any(ROOT.glob(f"{name}")) or any((ROOT / d).rglob(name) for d in ("headtrain", "decode", "scripts")), (
            word
        )
