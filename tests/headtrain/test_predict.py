"""Predictions: published arithmetic, closed forms against sums, trees against simulation, a profile against decoding."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.engine import Engine
from decode.errors import UserError
from decode.metrics import acceptance_by_depth, acceptance_length
from decode.settings import Settings
from decode.tree import Chain, Static
from headtrain.evaluate import open_head
from headtrain.predict import (
    DEVICES,
    Measured,
    Profile,
    Roofline,
    beside,
    closed_form,
    closed_tokens,
    drafted_levels,
    expected_tokens,
    load_profiles,
    measure_profile,
    predict,
    save_profiles,
)
from headtrain.trainer import train
from tests.folders import make_recipe

H100 = DEVICES["h100"]
RANKS = Profile(((0.6, 0.15, 0.05), (0.5, 0.2, 0.1), (0.4, 0.1, 0.1)))
STEP_MS = {"verify": {"1": 10.0, "2": 10.0, "4": 11.0, "8": 12.0, "16": 16.0}, "commit": 1.0, "extend": {"2": 0.5, "4": 0.7}}  # fmt: skip


@pytest.mark.parametrize(("parameters", "published_ms"), [(70e9, 41.8), (8e9, 4.8)])
def test_a_token_costs_one_read_of_the_weights(parameters, published_ms):
    costs = Roofline(H100, parameters, draft_parameters=0, dtype="float16")
    assert 1e3 * costs.verify(1, 1, 0) == pytest.approx(published_ms, abs=0.05)


def test_closed_form_by_hand():
    assert closed_tokens(0.8, 5) == pytest.approx(3.68928)  # 1 + .8 + .64 + .512 + .4096 + .32768
    assert closed_form(0.8, 5, 0.0) == pytest.approx(3.68928)
    assert closed_form(0.8, 5, 0.1) == pytest.approx(3.68928 / 1.5)
    assert closed_form(1.0, 5, 0.2) == pytest.approx(6 / 2)
    assert closed_form(0.0, 5, 0.2) == pytest.approx(1 / 2)


@given(a=st.floats(0, 1), k=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_closed_form_is_the_sum_over_a_chain(a, k):
    assert closed_tokens(a, k) == pytest.approx(expected_tokens(Profile.constant(a, k), Chain(k)), rel=1e-6)


def test_a_draft_of_cost_c_gives_the_closed_form():
    """A memory-bound device, a draft of a tenth of the target's size: c = 0.1."""
    costs = Roofline(H100, 8e9, 0.8e9)
    rows, warnings = predict(Profile.constant(0.8, 5), costs, depths=[1, 2, 3, 4, 5])
    assert [row.speedup for row in rows] == pytest.approx([closed_form(0.8, k, 0.1) for k in range(1, 6)])
    assert [row.nodes for row in rows] == [2, 3, 4, 5, 6] and not warnings


def simulate(profile: Profile, paths, steps: int, seed: int) -> float:
    """Tokens per step of a tree, by walking down it."""
    draw, tree, total = random.Random(seed), set(paths), 0
    for _ in range(steps):
        path: tuple[int, ...] = ()
        while True:
            row = profile.ranks[len(path)] if len(path) < profile.depth else ()
            u, rank = draw.random(), 0
            while rank < len(row) and u >= row[rank]:
                u, rank = u - row[rank], rank + 1
            total += 1
            if rank == len(row) or (*path, rank) not in tree:
                break
            path = (*path, rank)
    return total / steps


@pytest.mark.parametrize("size", [2, 5, 9])
def test_tree_form_against_simulation(size):
    """40,000 steps: the standard error is below 0.005."""
    tree = RANKS.tree(size)
    assert expected_tokens(RANKS, tree) == pytest.approx(simulate(RANKS, tree.paths, 40_000, seed=size), abs=0.02)


def test_a_wrong_tree_form_is_seen():
    """Negative control: ranks shifted by one."""
    shifted = Profile(tuple((*row[1:], row[0]) for row in RANKS.ranks))
    tree = RANKS.tree(9)
    assert abs(expected_tokens(shifted, tree) - simulate(RANKS, tree.paths, 40_000, seed=9)) > 0.1


def test_best_paths_are_best_and_closed():
    """Against all closed sets of 4 paths, which greedy choice by share must beat."""
    from itertools import combinations, product

    every = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    every = [path for path in every if sum(path) < 4]
    best = max(
        expected_tokens(RANKS, Static(chosen))
        for chosen in combinations(every, 4)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )
    assert expected_tokens(RANKS, RANKS.tree(5)) == pytest.approx(best)
    assert RANKS.tree(9).num_nodes == 9 and RANKS.tree(9, depth=2).depth == 2


def test_large_batches_do_not_pay():
    costs = Roofline(H100, 8e9, 0.4e9, cache_bytes=131072)
    rows, warnings = predict(RANKS, costs, depths=[3], batches=[1, 512], contexts=[64])
    assert rows[0].speedup > 1.5 > 1 > rows[1].speedup
    (warning,) = warnings
    assert warning.startswith("batch 512, context 64, temperature 0: speculation does not pay: the best, chain 3")
    assert f"speedup {rows[1].speedup:.2f}" in warning and "at batch 1" in warning


def test_memory_and_temperature_warnings():
    costs = Roofline(H100, 34e9, 0.4e9, dtype="bfloat16", cache_bytes=196608)
    _, warnings = predict(RANKS, costs, depths=[3], batches=[8], contexts=[16384])
    need = (2 * 34.4e9 + 8 * (16384 + 4) * 196608) / 1e9
    assert warnings == [
        f"batch 8, context 16384, temperature 0: memory is too small: weights, head and cache need {need:.1f} GB of"
        " 80.0 GB; lower the batch or the context"
    ]
    cold, hot = Profile.constant(0.8, 3), Profile.constant(0.02, 3, temperature=1.5)
    _, warnings = predict([cold, hot], Roofline(H100, 8e9, 0.1e9), depths=[1, 3])
    (warning,) = warnings
    assert "temperature 1.5" in warning and "lower the temperature" in warning
    _, (warning,) = predict(Profile.constant(0.5, 4), Roofline(H100, 8e9, 4e9), depths=[4])
    assert "drafting alone costs 2.00 plain steps" in warning


def test_measured_costs():
    costs = Measured(STEP_MS)
    assert 1e3 * costs.verify(3, 1, 0) == pytest.approx(10.5)
    assert 1e3 * costs.verify(4, 2, 0) == pytest.approx(12.0)
    assert 1e3 * costs.verify(32, 1, 0) == pytest.approx(16 + 16 * 5 / 12)
    assert 1e3 * costs.draft([2, 2], 1) == pytest.approx(2.0)
    (row,), warnings = predict(RANKS, costs, sizes=[8])
    tree = RANKS.tree(8)
    tokens = expected_tokens(RANKS, tree)
    assert row.step_ms == pytest.approx(12 + costs.draft(drafted_levels(tree), 1) * 1e3)
    assert row.speedup == pytest.approx(tokens * 10 / row.step_ms) and not warnings
    assert row.tokens_per_second == pytest.approx(tokens / row.step_ms * 1e3)
    _, warnings = predict(RANKS, costs, sizes=[8], batches=[4])
    assert "no forward above 16 was measured" in warnings[0]


def test_beside():
    """Predicted from the report's acceptance and tune's costs; the error is that of the costs."""
    plan = {"kind": "dynamic", "depth": 3, "width": 4, "size": 8}
    report = {
        "settings": {"plan": plan, "batch_size": 1},
        "sets": [{"name": "a", "acceptance_length": 2.0, "speedup": {"engine": 1.4}}],
    }
    (row,) = beside(report, STEP_MS)
    assert row["predicted"] == pytest.approx(2 * 10 / (12 + 1 + 2 * 0.7))
    assert row["error"] == pytest.approx(row["predicted"] / 1.4 - 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "neither a depth nor a tree size"),
        ({"depths": [9]}, "depth 9: acceptance is known to depth 3 only"),
        ({"depths": [0]}, "depth: 0 is too small"),
        ({"depths": [2], "batches": [0]}, "batch: 0 is too small"),
        ({"sizes": [1]}, "size: 0 is too small"),
        ({"sizes": [100]}, "only 39 paths"),
        ({"sizes": [2000]}, "at most 128"),
        ({"depths": [2], "contexts": [64, 128]}, "measured step times know one context only"),
    ],
)
def test_mistakes_are_one_line(arguments, words):
    with pytest.raises(UserError, match=words) as error:
        predict(RANKS, Measured(STEP_MS), **arguments)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def opened(target_folder, chats, tmp_path_factory):
    folder = train(make_recipe(target_folder, chats, tmp_path_factory.mktemp("run") / "run", steps=6, save_every=6))
    return open_head(folder, None, "float32")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_profile_agrees_with_decoding(opened, temperature, tmp_path):
    """First choices are what a chain accepts; one rank of siblings is what a flat tree accepts."""
    head, target = opened
    prompts = [target.prompt_ids([{"role": "user", "content": text}]) for text in ("the tree", "rain falls")]
    profile = measure_profile(head, target, prompts, temperature, depth=3, width=4, max_new_tokens=40)
    decoding = Settings(max_new_tokens=40, temperature=temperature, ignore_eos=True)
    chain = Engine(target.model, head, Chain(3), target.tokenizer)
    outputs = [chain.generate([ids], decoding)[0] for ids in prompts]
    accepted = acceptance_by_depth(outputs)
    assert profile.chain[: len(accepted)] == pytest.approx(accepted)
    assert profile.steps == sum(len(output.accepted) for output in outputs)
    assert expected_tokens(profile, Chain(profile.depth)) == pytest.approx(acceptance_length(outputs))
    assert all(0 <= sum(row) <= 1 + 1e-9 for row in profile.ranks)
    save_profiles(tmp_path, [profile])
    assert load_profiles(tmp_path) == [profile]


def test_damaged_profiles(tmp_path):
    assert load_profiles(tmp_path) == []
    (tmp_path / "profile.json").write_text(json.dumps([{"ranks": [[0.5]]}]))
    with pytest.raises(UserError, match="is no saved profile"):
        load_profiles(tmp_path)
