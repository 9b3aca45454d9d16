import io
import json
import re

import pytest
from rich.console import Console

from decode.errors import UserError
from headtrain.inspect import inspect_recipe, load_tokenizer
from headtrain.recipe import (
    DataConfig,
    EvalConfig,
    HeadChoice,
    Recipe,
    SynthesizeConfig,
    TargetConfig,
    TrackingConfig,
    TrainConfig,
)
from tests.templates import byte_tokenizer


def exchange(user: str, reply: str | None) -> dict:
    messages = [{"role": "user", "content": user}]
    return {"messages": messages if reply is None else [*messages, {"role": "assistant", "content": reply}]}


def make_recipe(path, **sections) -> Recipe:
    data = sections.pop("data", {})
    return Recipe(
        target=TargetConfig(model="org/target"),
        head=HeadChoice(family="fake", config=TrackingConfig()),
        data=DataConfig(train=(str(path),), **data),
        train=TrainConfig(**({"epochs": 1} | sections)),
        eval=EvalConfig(),
        tracking=TrackingConfig(),
        synthesize=SynthesizeConfig(),
        output="runs/x",
    )


def shown(recipe, colour=False, name="chatml", **keys) -> str:
    file = io.StringIO()
    console = Console(file=file, width=160, force_terminal=colour, color_system="standard" if colour else None)
    inspect_recipe(recipe, console, byte_tokenizer(name), **keys)
    return file.getvalue()


@pytest.fixture
def path(tmp_path):
    rows = [exchange(f"question {index} [red]", "reply\n" + "word " * index) for index in range(20)]
    rows += [exchange("unanswered", None)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def cells(text: str) -> dict[str, list[str]]:
    lines = (line.strip("│┃ ").replace("┃", "│") for line in text.splitlines() if "│" in line)
    rows = ([cell.strip() for cell in line.split("│")] for line in lines)
    return {first: rest for first, *rest in rows}


def test_shows_the_account_and_the_plan(path):
    text = shown(make_recipe(path, batch_tokens=400, accumulation=2, epochs=3))
    table = cells(text)
    assert table["conversations read"][0] == "21" and table["= kept"][0] == "20"
    assert table["- dropped: no assistant turn"] == ["1", f"{path}:21"]
    assert table["of these cut at data.max_length"][0] == "0"
    assert table["tokens per epoch"] == [f"{table['all'][-1]}, {table['trained'][-1]} trained"]
    assert "of at most 400 tokens" in table["micro-batches per epoch"][0]
    micro, steps = (int(table[key][0].split()[0]) for key in ("micro-batches per epoch", "optimizer steps per epoch"))
    assert micro == 2 * steps
    assert table["optimizer steps in all"] == [f"{3 * steps} (3 epochs)"]
    assert cells(shown(make_recipe(path, epochs=None, steps=7)))["optimizer steps in all"][0].startswith("7 (")


def test_shows_tokens_under_the_mask(path):
    tokenizer = byte_tokenizer("chatml")
    text = shown(make_recipe(path), num_rows=2, num_tokens=10_000)
    assert f"row 0 of {path}:1:" in text and f"row 19 of {path}:20:" in text
    assert "[:" in text and "]:" in text  # no console markup is read in the contents
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    trained = [line for line in text.splitlines() if line.startswith("  trained")]
    assert len(trained) == 2 and f"<|im_end|>:{end}" in text and "⏎" in text
    assert "more ..." in shown(make_recipe(path), num_rows=1, num_tokens=10)


def test_colours_tell_trained_from_context(path):
    text = shown(make_recipe(path), colour=True, num_rows=1)
    green = "".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", text))
    assert green == "reply⏎<|im_end|>"
    assert "\x1b[" not in shown(make_recipe(path), num_rows=1)


def test_held_out_conversations_are_counted(path):
    text = shown(make_recipe(path, data={"eval": (str(path),)}))
    assert f"data.train: {path}" in text and f"data.eval: {path}" in text


def test_rewritten_history_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    messages = exchange("a", "b")["messages"] + exchange("c", "d")["messages"]
    file.write_text(json.dumps({"messages": messages}))
    table = cells(shown(make_recipe(file), name="thinking"))
    assert table["+ one row per reply (the template rewrites history)"][0] == "1" and table["= kept"][0] == "2"


def test_shows_what_it_can_before_the_error(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(exchange("unanswered", None)))
    out = io.StringIO()
    with pytest.raises(UserError, match="data.train: no token is trained"):
        inspect_recipe(make_recipe(file), Console(file=out, width=160), byte_tokenizer("chatml"))
    assert cells(out.getvalue())["- dropped: no assistant turn"][0] == "1"


def test_tokenizer_comes_from_the_target_folder(tmp_path):
    byte_tokenizer("chatml").save_pretrained(tmp_path / "model")
    assert len(load_tokenizer(TargetConfig(model=str(tmp_path / "model")))) == len(byte_tokenizer("chatml"))
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="target.model: no tokenizer in .*bare") as error:
        load_tokenizer(TargetConfig(model=str(tmp_path / "bare")))
    assert "\n" not in str(error.value)
