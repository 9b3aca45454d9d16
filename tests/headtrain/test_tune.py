"""Choosing a tree: sizes of recorded paths, and a choice that follows the costs."""

import json

import pytest
import torch

from decode.engine import Engine
from decode.settings import Settings
from decode.tree import Dynamic, from_dict
from headtrain import tune as module
from headtrain.evaluate import load_plan, open_head
from headtrain.trainer import train
from headtrain.tune import Costs, Recorder, accepted_length, save_plan, tune
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


def test_one_wide_run_tells_what_a_smaller_tree_accepts(head_folder):
    """On the same contexts a smaller tree keeps the best nodes of the wider one, so the prediction is exact."""
    head, target = open_head(head_folder, None, "float32")
    ids = target.prompt_ids([{"role": "user", "content": "the tree grows"}])
    wide = Recorder(target.model, head, Dynamic(3, 3, 20), target.tokenizer)
    reply = wide.generate([ids], Settings(max_new_tokens=24, ignore_eos=True))[0]
    prefixes, at = [], 1
    for count in reply.accepted:
        prefixes.append(ids + reply.tokens[:at])
        at += count + 1
    for size in (2, 4, 7):
        for prefix, path in zip(prefixes, wide.steps, strict=True):
            small = Engine(target.model, head, Dynamic(3, 3, size), target.tokenizer)
            # the small tree's first step behind this prefix; its root is the token that the target adds
            took = small.generate([prefix[:-1]], Settings(max_new_tokens=8, ignore_eos=True))[0].accepted[0]
            assert took == sum(need <= size for need, _ in path)


def test_costs_decide(head_folder, monkeypatch):
    head, target = open_head(head_folder, None, "float32")

    def costs(slope):
        return lambda *_: Costs(
            {n: 1 + slope * n for n in (1, *module.SIZES)}, 0.01, dict.fromkeys(module.WIDTHS, 0.01)
        )

    monkeypatch.setattr(module, "measure_costs", costs(0.0))
    free = tune(head, target, prompts=("the tree",))
    monkeypatch.setattr(module, "measure_costs", costs(10.0))
    dear = tune(head, target, prompts=("the tree",))
    assert dear["plan"]["size"] == 2 and free["plan"]["size"] >= dear["plan"]["size"]
    assert free["predicted"]["acceptance_length"] >= dear["predicted"]["acceptance_length"]


def test_tune_measures_and_saves(head_folder, tmp_path):
    head, target = open_head(head_folder, None, "float32")
    torch.manual_seed(0)
    result = tune(head, target, prompts=("rain falls",))
    assert json.loads(save_plan(tmp_path, result).read_text()) == result
    assert load_plan(tmp_path, head) == from_dict(result["plan"])
    assert all(time > 0 for time in result["step_ms"]["verify"].values())
    assert result["step_ms"]["commit"] > 0
