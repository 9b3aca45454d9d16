"""Axes as users write them, the points they span, trees of each size, contexts, and sweeps that go on."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.errors import UserError
from decode.settings import Settings
from decode.tree import Chain, Dynamic, Static
from headtrain.evaluate import fit_plan
from headtrain.plots import figure
from headtrain.predict import Profile
from headtrain.sweep import (
    Point,
    fill_context,
    make_points,
    parse_axes,
    parse_numbers,
    plan_of_size,
    run_sweep,
    summary,
    sweep_plots,
)
from headtrain.target import Target
from tests.headtrain.test_plots import make_set
from tests.templates import byte_tokenizer
from tests.tiny import tiny_target

USUAL = {"rule": None, "temperature": 0.0, "batch": 1}


def test_numbers():
    assert parse_numbers("1,2,4", "x") == [1, 2, 4]
    assert parse_numbers("256,1k,4k", "x") == [256, 1024, 4096]
    assert parse_numbers("1..64", "x") == [1, 2, 4, 8, 16, 32, 64]
    assert parse_numbers("3..20", "x") == [3, 6, 12, 20]
    assert parse_numbers("1..5+2,9", "x") == [1, 3, 5, 9]
    assert parse_numbers("1..6+2", "x") == [1, 3, 5]
    assert parse_numbers("0,0.7,0", "x") == [0, 0.7]


@given(st.text(alphabet="0123456789k.,+- ab", max_size=12))
def test_numbers_fail_in_one_line_or_not_at_all(text):
    try:
        assert all(number >= 0 for number in parse_numbers(text, "x"))
    except UserError as error:
        assert str(error).startswith("x: ") and "\n" not in str(error)


def test_points():
    axes = parse_axes(["batch=1,2,4,8", "temperature=0,0.7,1", "context=256,1k,4k", "tree=1..64"])
    points = make_points(["a", "b"], axes, USUAL)
    assert len(points) == len(set(points)) == 2 * 4 * 3 * 3 * 7 == len({point.file for point in points})
    assert points[0] == Point("a", None, 0.0, 1, 256, 1)
    rules = make_points(["a"], parse_axes(["rule=gumbel,rejection,greedy", "temperature=0,1"]), USUAL)
    assert [(point.rule, point.temperature) for point in rules] == [("greedy", 0), ("gumbel", 1), ("rejection", 1)]
    assert Point("x/head").file != Point("y/head").file


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bach=1"], "did you mean batch"),
        (["batch"], "batch is no axis"),
        (["batch=1", "batch=2"], "batch is given twice"),
        (["batch=1.5"], "1.5 must be a whole number"),
        (["batch=0"], "0 must be a whole number of at least 1"),
        (["batch="], "'' is no number"),
        (["tree=1..200"], "200 is more than 128"),
        (["tree=8..4"], "8..4 is no range"),
        (["temperature=-1"], "below 0"),
        (["temperature=nan"], "not finite"),
        (["rule=gumble"], "did you mean 'gumbel'"),
        (["rule=greedy", "temperature=1"], "greedy needs temperature 0"),
    ],
)
def test_mistakes_are_one_line(words, message):
    with pytest.raises(UserError, match=message) as error:
        make_points(["a"], parse_axes(words), USUAL)
    assert "\n" not in str(error.value)


class Four:
    """A draft of four levels at most."""

    max_depth = 4


@pytest.mark.parametrize("size", [1, 2, 3, 8, 33, 64])
@pytest.mark.parametrize("rule", [None, "gumbel", "rejection", "block"])
@pytest.mark.parametrize("tuned", [Chain(3), Dynamic(3, 2, 6)], ids=["chain", "dynamic"])
def test_trees_of_each_size(size, rule, tuned):
    plan = plan_of_size(size, Four(), rule, fit_plan(tuned, Settings(rule=rule, temperature=1.0)), None)
    if size == 1:
        assert plan is None
    elif rule == "block":
        assert plan == Chain(min(size - 1, 4))
    else:
        dynamic = isinstance(tuned, Dynamic) and rule != "rejection"
        assert plan.num_nodes == size and plan.depth <= 4 and isinstance(plan, Dynamic if dynamic else Static)


def test_static_trees_follow_the_profile():
    flat, deep = Profile(((0.3, 0.3, 0.3),) * 3), Profile(((0.9, 0.01, 0.01),) * 3)
    assert plan_of_size(4, Four(), None, Chain(3), flat).depth == 1
    assert plan_of_size(4, Four(), None, Chain(3), deep).depth == 3


def test_contexts():
    tokenizer = byte_tokenizer("chatml")
    target = Target(tiny_target("llama", vocab_size=len(tokenizer)), tokenizer)
    prompts = [
        [{"role": "user", "content": text}] for text in ("the tree grows", "rain falls on old stones", "a" * 300)
    ]
    found = fill_context(target, prompts, 120)
    lengths = [len(target.prompt_ids(messages)) for messages in found]
    assert len(found) == 2 and all(110 <= length <= 120 for length in lengths)
    assert found[0][0]["content"].endswith("\n\nthe tree grows")
    with pytest.raises(UserError, match="context 4: every prompt is longer"):
        fill_context(target, prompts, 4)


def report(point):
    row = {**make_set("asks"), "tokens_per_second": 20.0 * point.batch}
    mean = {key: row[key] for key in ("acceptance_length", "tokens_per_second", "speedup")}
    return {"settings": {"rule": point.rule or "greedy"}, "sets": [row], "mean": mean}


def test_a_stopped_sweep_goes_on(tmp_path):
    points = make_points(["head"], {"batch": [1, 2, 4]}, USUAL)
    measured = []

    def measure(point):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(point.batch)
        return report(point)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(points, tmp_path, {"seed": 0}, measure)
    assert measured == [1, 2] and len(json.loads((tmp_path / "sweep.json").read_text())["points"]) == 2
    damaged = tmp_path / "points" / points[1].file
    damaged.write_text(damaged.read_text()[:50])
    measured.clear()
    saved = run_sweep(points, tmp_path, {"seed": 0}, measure, note := [].append)
    assert measured == [2, 4] and [entry["point"]["batch"] for entry in saved] == [1, 2, 4] and note
    with pytest.raises(UserError, match="was measured with seed 0, not 1; choose another --out"):
        run_sweep(points, tmp_path, {"seed": 1}, measure)
    assert (
        sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file()) == [".json"] * 4
    )  # nothing half written


def test_plots_of_a_sweep():
    points = make_points(["head"], {"batch": [1, 2], "temperature": [0.0, 1.0]}, USUAL)
    saved = [{"point": vars(point), "run": {}, "report": report(point)} for point in points]
    plots = sweep_plots(summary(saved))
    assert list(plots) == [
        f"{what}_by_{axis}" for axis in ("temperature", "batch") for what in ("speedup", "tokens_per_second")
    ]
    assert all(figure(draw, height=height) for draw, height in plots.values())
    many = make_points(["head"], {"batch": [1, 2, 3], "context": [8, 9, 10], "tree": [1, 2, 3, 4]}, USUAL)
    plots = sweep_plots(summary([{"point": vars(p), "run": {}, "report": report(p)} for p in many]))
    assert len(plots) == 6 and all(figure(draw, height=height) for draw, height in plots.values())
