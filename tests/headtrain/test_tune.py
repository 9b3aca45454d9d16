"""Choosing a tree: sizes of recorded paths, and a choice that follows the costs."""

import json
from dataclasses import replace

import pytest

from decode.engine import Engine
from decode.settings import Settings
from decode.tree import Dynamic, Static, from_dict
from headtrain import tune as module
from headtrain.evaluate import fit_plan, load_plan, open_head
from headtrain.trainer import train
from headtrain.tune import Candidate, Costs, Recorder, accepted_length, choose, promising, save_plan, tune
from tests.folders import make_recipe


@pytest.fixture(scope="module")
def head_folder(target_folder, chats, tmp_path_factory):
    return train(make_recipe(target_folder, chats, tmp_path_factory.mktemp("run") / "run", steps=6, save_every=6))


def test_accepted_length_by_hand():
    """Three steps: two nodes that need sizes 2 and 5, nothing, one node that needs size 9."""
    steps = [[(2, 1), (5, 2)], [], [(9, 1)]]
    assert accepted_length(steps, 4, 2) == pytest.approx((2 + 1 + 1) / 3)
    assert accepted_length(steps, 5, 2) == pytest.approx((3 + 1 + 1) / 3)
    assert accepted_length(steps, 5, 1) == pytest.approx((2 + 1 + 1) / 3)
    assert accepted_length(steps, 9, 2) == pytest.approx((3 + 1 + 2) / 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "gumbel"])
def test_one_wide_run_tells_what_a_smaller_tree_accepts(head_folder, temperature):
    """On the same contexts a smaller tree keeps the best nodes of the wider one, so the prediction is exact."""
    settings = Settings(max_new_tokens=24, temperature=temperature, ignore_eos=True)
    head, target = open_head(head_folder, None, "float32")
    ids = target.prompt_ids([{"role": "user", "content": "the tree grows"}])
    wide = Recorder(target.model, head, fit_plan(Dynamic(3, 3, 20), settings), target.tokenizer)
    reply = wide.generate([ids], settings)[0]
    prefixes, at = [], 1
    for count in reply.accepted:
        prefixes.append(ids + reply.tokens[:at])
        at += count + 1
    for size in (2, 4, 7):
        for prefix, path in zip(prefixes, wide.steps, strict=True):
            small = Engine(target.model, head, fit_plan(Dynamic(3, 3, size), settings), target.tokenizer)
            # the small tree's first step behind this prefix; its root is the token that the target adds
            took = small.generate([prefix[:-1]], replace(settings, max_new_tokens=8))[0].accepted[0]
            assert took == sum(need <= size for need, _ in path)


def test_step_costs_by_hand():
    costs = Costs({1: 1.0, 4: 2.0}, 0.5, {1: 0.1, 2: 0.2, 4: 0.4})
    assert costs.step(4, []) == pytest.approx(2.5)
    assert costs.step(4, [3, 1, 9]) == pytest.approx(2.5 + 0.4 + 0.1 + 0.4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_costs_decide(head_folder, monkeypatch, temperature):
    """Where nodes are free the promising trees are big, where they are dear small."""
    head, target = open_head(head_folder, None, "float32")
    seen = []

    def race(head, target, prompts, settings, candidates):
        seen.append([candidate.plan.num_nodes for candidate in candidates])
        return [{"acceptance_length": 1.0, "tokens_per_second": float(-i)} for i in range(len(candidates))]

    def costs(slope):
        return lambda *_: Costs(
            {n: 1 + slope * n for n in (1, *module.SIZES)}, 0.01, dict.fromkeys(module.WIDTHS, 0.01)
        )

    monkeypatch.setattr(module, "race", race)
    monkeypatch.setattr(module, "NEW_TOKENS", 16)
    for slope in (0.0, 10.0):
        monkeypatch.setattr(module, "measure_costs", costs(slope))
        tune(head, target, temperature, prompts=("the tree",))
    free, dear = seen
    assert max(dear) <= min(free) and min(dear) == 2


def test_tune_measures_and_saves(head_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "NEW_TOKENS", 16)
    head, target = open_head(head_folder, None, "float32")
    for temperature in (0.0, 1.0):
        result = tune(head, target, temperature, prompts=("rain falls",))
        saved = json.loads(save_plan(tmp_path, result).read_text())
        assert saved["greedy" if temperature == 0 else "sampled"] == result
        assert load_plan(tmp_path, head, Settings(temperature=temperature))[0] == from_dict(result["plan"])
        assert all(time > 0 for time in result["step_ms"]["verify"].values())
        assert result["measured"]["tokens_per_second"] > 0
    assert saved.keys() == {"greedy", "sampled"}


def test_predicted_ranks_hold_in_real_decoding(head_folder):
    """On the texts that were measured, a static tree accepts what its measured ranks say: exactly so for depth 1."""
    head, target = open_head(head_folder, None, "float32")
    ids = target.prompt_ids([{"role": "user", "content": "old stones"}])
    settings = Settings(max_new_tokens=40, ignore_eos=True)
    reply = Engine(target.model).generate([ids], settings)[0].tokens
    acceptance = module.measure_ranks(head, target, [(ids, ids + reply)], settings, 1, 1.0)
    hits = 0
    for at in range(1, len(reply)):
        engine = Engine(target.model, head, Static([(0,), (1,), (2,)]), target.tokenizer)
        hits += engine.generate([ids + reply[: at - 1]], Settings(max_new_tokens=3, ignore_eos=True))[0].accepted[0] > 0
    assert hits / (len(reply) - 1) == pytest.approx(sum(acceptance[0][:3]))


def test_equal_speeds_are_decided_by_acceptance():
    def candidate(seconds, length):
        return Candidate(Dynamic(1, 1, 2), 1.0, length, seconds)

    assert choose([100.0, 98.0, 90.0], [2.0, 2.1, 3.0]) == 1
    assert choose([100.0, 90.0], [2.0, 3.0]) == 0
    fastest, near, slow = candidate(1.0, 2.0), candidate(1.07, 2.1), candidate(2.0, 3.0)
    assert promising([slow, near, fastest]) == [fastest, near]
    assert promising([slow, fastest]) == [fastest]
