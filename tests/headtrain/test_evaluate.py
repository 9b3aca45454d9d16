"""The report of a head on a tiny target: every figure follows from what was decoded."""

import json
from dataclasses import replace

import pytest
import torch

from decode.errors import UserError
from decode.settings import Settings
from decode.tree import Chain, Dynamic
from headtrain import evaluate as module
from headtrain.data import build_dataset
from headtrain.evaluate import choice_gap, evaluate, fit_plan, held_out_loss, load_plan, open_head, write_report
from headtrain.features import OnlineFeatures
from headtrain.heads.base import load_family
from headtrain.recipe import DataConfig
from headtrain.trainer import train
from tests.folders import make_recipe

REPORT_KEYS = {
    "head", "target", "device", "dtype", "versions", "date", "settings", "definitions", "sets", "mean",
}  # fmt: skip
SET_KEYS = {
    "name", "prompts", "new_tokens", "acceptance_length", "acceptance_by_depth", "tokens_per_second", "baseline",
    "speedup", "step_ms", "parity",
}  # fmt: skip


@pytest.fixture(scope="module")
def head_folder(target_folder, chats, tmp_path_factory):
    return train(make_recipe(target_folder, chats, tmp_path_factory.mktemp("run") / "run", steps=6, save_every=6))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "asks.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("the tree", "rain falls", "old stones")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_report(head_folder, prompts, temperature, tmp_path):
    head, target = open_head(head_folder, None, "float32")
    settings = Settings(max_new_tokens=20, temperature=temperature)
    report = evaluate(head_folder, head, target, [str(prompts)], 2, settings, Dynamic(2, 2, 5))
    assert report.keys() == REPORT_KEYS
    (row,) = report["sets"]
    assert row.keys() == SET_KEYS
    assert (row["name"], row["prompts"], row["new_tokens"]) == ("asks", 2, 40)
    assert row["parity"] == {"compared": 2, "identical": 2, "near_ties": 0, "mismatches": 0, "widest_gap": 0.0}
    assert row["speedup"]["engine"] == pytest.approx(row["tokens_per_second"] / row["baseline"]["engine"])
    assert 1 <= row["acceptance_length"] <= 3
    assert report["mean"]["acceptance_length"] == row["acceptance_length"]
    assert report["settings"]["rule"] == ("greedy" if temperature == 0 else "gumbel")
    assert json.loads(write_report(report, tmp_path / "out").read_text()) == report
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.json"]


def test_a_wrong_reply_is_a_mismatch(head_folder, prompts, monkeypatch):
    """Negative control: the engine with the head keeps tokens that the target never chose."""
    head, target = open_head(head_folder, None, "float32")
    right = module.Engine._take

    def wrong(self, run, b, tokens):
        return right(self, run, b, tokens if self.draft is None else [5] * len(tokens))

    monkeypatch.setattr(module.Engine, "_take", wrong)
    report = evaluate(head_folder, head, target, [str(prompts)], 1, Settings(max_new_tokens=12), Chain(2))
    assert report["sets"][0]["parity"]["mismatches"] == 1


def test_batches_give_the_same_replies(head_folder, prompts):
    head, target = open_head(head_folder, None, "float32")
    settings = Settings(max_new_tokens=16, temperature=1.0)
    one, three = (
        evaluate(head_folder, head, target, [str(prompts)], None, settings, Dynamic(2, 2, 5), batch_size=size)
        for size in (1, 3)
    )
    assert one["sets"][0]["acceptance_length"] == three["sets"][0]["acceptance_length"]
    assert three["sets"][0]["parity"]["identical"] == 3 and three["settings"]["batch_size"] == 3


def test_choice_gap(head_folder):
    _, target = open_head(head_folder, None, "float32")
    ids = target.prompt_ids([{"role": "user", "content": "rain"}])
    logits = target.model(torch.tensor([ids])).logits[0, -1]
    logits[target.model.generation_config.eos_token_id] = -torch.inf
    expected = float(logits.max() - logits[7])
    best = pytest.approx(float(logits.max()), abs=1e-5)
    assert choice_gap(target, ids, [9, 9], Settings(), 0, 7) == (pytest.approx(expected, abs=1e-5), best)
    assert choice_gap(target, ids, [9, 9], Settings(), 0, int(logits.argmax())) == (0, best)
    gap, without_noise = choice_gap(target, ids, [9, 9], Settings(temperature=1.0), 0, 7)
    assert gap != pytest.approx(expected) and without_noise == best


def test_held_out_loss_is_the_mean_over_all_tokens(head_folder, chats):
    head, target = open_head(head_folder, None, "float32")
    dataset = build_dataset(DataConfig(train=(str(chats),)), target.tokenizer, progress=False)
    numbers = held_out_loss(head, target, dataset, batch_tokens=64)
    batch = OnlineFeatures(dataset, target, head.target_layers).batch(range(len(dataset)))
    out = head.loss(batch, target)
    assert numbers["eval_loss"] == pytest.approx(float(out.total.detach() / head.tokens(batch.loss_mask)), rel=1e-4)
    assert numbers["eval_acceptance"] == pytest.approx((out.acceptance / out.counts).tolist(), rel=1e-4)


def test_plans(head_folder, tmp_path):
    head, _ = open_head(head_folder, None, "float32")
    greedy, sampled = Settings(), Settings(temperature=0.5)
    assert load_plan(tmp_path, head, greedy) == (module.default_plan(head), greedy)
    assert load_plan(tmp_path, head, sampled)[0] == replace(module.default_plan(head), noise_weight=1.0)
    noisy = {"plan": Dynamic(3, 2, 6, noise_weight=1.0).to_dict(), "draft_ratio": 1.0}
    (tmp_path / "tree.json").write_text(json.dumps({"sampled": noisy}))
    assert load_plan(tmp_path, head, greedy)[0] == Dynamic(3, 2, 6)
    assert load_plan(tmp_path, head, replace(sampled, rule="deterministic"))[0] == Dynamic(3, 2, 6)
    assert load_plan(tmp_path, head, replace(sampled, rule="rejection"))[0] == Chain(3)
    chain = {"plan": {"kind": "chain", "depth": 3}, "draft_ratio": 1.4}
    (tmp_path / "tree.json").write_text(json.dumps({"sampled": chain}))
    assert load_plan(tmp_path, head, greedy) == (Chain(3), greedy)
    assert load_plan(tmp_path, head, sampled) == (Chain(3), Settings(temperature=0.5, draft_temperature=0.7))
    own = Settings(temperature=0.5, draft_temperature=2.0)
    assert load_plan(tmp_path, head, own) == (Chain(3), own)
    assert fit_plan(Dynamic(3, 2, 6), replace(sampled, rule="rejection")) == Chain(3)
    assert fit_plan(Dynamic(3, 2, 6), greedy) == Dynamic(3, 2, 6)
    (tmp_path / "tree.json").write_text("{")
    with pytest.raises(UserError, match="is not a saved tree"):
        load_plan(tmp_path, head, greedy)


def test_an_unwritable_report_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_report({}, tmp_path / "file" / "out")


def test_template_variables_travel_with_the_head(target_folder, chats, tmp_path):
    recipe = make_recipe(target_folder, chats, tmp_path / "run", steps=1, save_every=1)
    raw = recipe.to_dict()
    raw["data"]["template_kwargs"] = {"enable_thinking": False}
    folder = train(type(recipe).from_dict(raw))
    _, target = open_head(folder, None, "float32")
    assert target.template_kwargs == {"enable_thinking": False}


def test_families_load_by_name():
    assert load_family("eagle3").__name__ == "Eagle3"
