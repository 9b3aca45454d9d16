"""Medusa-2: the two stages, gradients into the target's adapter, and exact decoding with the adapted target."""

import json

import pytest
import torch
from safetensors.torch import load_file

from decode.engine import Engine
from decode.errors import UserError
from decode.settings import Settings
from decode.tree import Chain, Dynamic
from headtrain import checkpoint, trainer
from headtrain.evaluate import open_head
from headtrain.heads.medusa2 import Medusa2, Medusa2Config, remove_adapter
from headtrain.recipe import Recipe
from headtrain.target import Target
from tests.folders import losses, recipe_dict, start_ranks, start_training, write_recipe
from tests.headtrain.heads.rows import VOCABULARY, make_batch, make_head, make_target

peft = pytest.importorskip("peft")
MASK = [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0], [1] * 12]
PROMPTS = [[5, 6, 7, 8], [9]]


def make(target, vocabulary=None, **config):
    return make_head("medusa2", target, vocabulary, **{"heads": 3, "rank": 4, "dropout": 0.0, **config})


def reply(target, draft=None, plan=None, **settings):
    options = Settings(max_new_tokens=24, ignore_eos=True, **settings)
    return [output.tokens for output in Engine(target.model, draft, plan).generate(PROMPTS, options)]


def hidden_states(target, ids, deltas):
    """The target's states with `deltas` [out, in] added to the weights of its linear layers."""
    weights = {f"{name}.base_layer.weight": delta for name, delta in deltas.items()}
    own = dict(target.model.named_parameters())
    changed = {name: own[name] + delta for name, delta in weights.items()}
    return torch.func.functional_call(target.model, changed, (ids,), {"output_hidden_states": True}).hidden_states[-1]


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["whole", "reduced"])
@pytest.mark.parametrize("base", ["kl", "token"])
def test_joint_loss_and_gradients(base, vocabulary):
    """Against weights W + alpha / rank B A written out, and losses token by token, in float64."""
    target = make_target()
    head = make(target, vocabulary, base=base, decay=0.5, head_weight=0.3, alpha=8.0, modules=["q_proj", "down_proj"])
    target.model.double()
    head.double()
    batch = make_batch(head, target, length=12, mask=MASK)
    out = head.loss(batch, target)
    columns = torch.arange(101) if vocabulary is None else vocabulary
    parts = [
        (name, *(getattr(lora, part)["default"].weight for part in ("lora_A", "lora_B"))) for name, lora in head.lora
    ]
    deltas = {name: 8.0 / 4 * b @ a for name, a, b in parts}
    assert len(deltas) == 6
    with head.frozen():
        original = hidden_states(target, batch.input_ids, {})
        hidden = hidden_states(target, batch.input_ids, deltas)
    rows, expected = target.lm_head_weight, 0.0
    for b, t in batch.loss_mask.nonzero().tolist():
        if t >= 1:
            log_p = torch.log_softmax(rows @ hidden[b, t - 1], -1)
            p = torch.softmax(rows @ original[b, t - 1], -1)
            expected = expected - (log_p[batch.input_ids[b, t]] if base == "token" else (p * log_p).sum())
        for i in range(3):
            if t - 2 - i >= 0:
                log_q = torch.log_softmax(rows[columns] @ head.states(i, hidden[b, t - 2 - i]), -1)
                p = torch.softmax(rows[columns] @ hidden[b, t - 1].detach(), -1)
                expected = expected - 0.3 * 0.5 ** (i + 1) * (p * log_q).sum()
    torch.testing.assert_close(out.total.double(), expected, rtol=1e-5, atol=1e-4)
    names, parameters = zip(*head.named_parameters(), strict=True)
    assert sum("adapter" in name for name in names) == 12
    grads = [torch.autograd.grad(x, parameters) for x in (out.total, expected)]
    for name, ours, theirs in zip(names, *grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_heads_first_and_then_all():
    target = make_target()
    head = make(target, heads_first=0.5).train()
    batch = make_batch(head, target)
    plain = make_head("medusa", make_target(), heads=3)
    plain.load_state_dict({k: v for k, v in head.state_dict().items() if "adapter" not in k})
    for progress, joint in ((0.25, False), (0.5, False), (0.75, True)):
        head.progress = progress
        head.zero_grad()
        out = head.loss(batch, target)
        out.total.backward()
        assert any(bool(p.grad.any()) for p in head.adapter.values()) == joint
        assert all(p.grad is not None for p in head.parameters())
        assert torch.equal(out.total, plain.loss(batch, target).total) != joint
    frozen = [p for name, p in target.model.named_parameters() if "lora" not in name]
    assert not any(p.requires_grad or p.grad is not None for p in frozen)


def test_a_fresh_adapter_changes_nothing_and_dropout_is_of_training_only():
    target = make_target()
    plain = reply(target)
    head = Medusa2.build(Medusa2Config(heads=2, dropout=0.5), target).eval()
    assert reply(target) == plain
    for p in head.adapter.values():
        p.data.normal_(std=0.1)
    assert reply(target) != plain
    ids = torch.arange(3, 15)[None]
    still = [head.adapted(ids) for _ in range(2)]
    head.train()
    assert torch.equal(*still) and not torch.equal(head.adapted(ids), still[0])
    assert torch.equal(head.run_target(ids), still[0])
    with head.frozen():
        assert not torch.equal(head.run_target(ids), still[0])
    remove_adapter(target.model)
    assert reply(target) == plain and not any("lora" in name for name, _ in target.model.named_modules())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decodes_what_the_adapted_target_says(temperature):
    target = make_target()
    before = reply(target, temperature=temperature)
    head = make(target, VOCABULARY)
    plain = reply(target, temperature=temperature)
    assert plain != before  # negative control: the adapter matters
    for plan in (Chain(3), Dynamic(3, 3, 9)):
        assert reply(target, head, plan, temperature=temperature) == plain


def test_saved_loaded_and_read_by_peft(tmp_path):
    target = make_target()
    head = make(target, VOCABULARY, modules=["q_proj", "v_proj", "down_proj"])
    plain = reply(target)
    checkpoint.save_head(tmp_path / "head", head, "medusa2", target)
    other = make_target()
    assert reply(other) != plain
    loaded = checkpoint.load_head(tmp_path / "head", other)
    assert reply(other) == reply(other, loaded, Chain(3)) == plain
    again = checkpoint.load_head(tmp_path / "head", other)  # replaces the adapter, does not add another
    assert reply(other, again, Chain(3)) == plain
    adapter = load_file(tmp_path / "head" / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 3 * 3 and all(name.startswith("base_model.model.model.layers.") for name in adapter)
    read = peft.PeftModel.from_pretrained(make_target().model, tmp_path / "head" / "adapter")
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(read(ids).logits, target.model(ids).logits, rtol=1e-4, atol=1e-4)


def test_modules_that_are_not_there():
    for wanted in ("q_pro", "lm_head", "embed_tokens"):
        with pytest.raises(UserError, match=f"head.modules: '{wanted}' is no linear layer .* the target has down_proj"):
            Medusa2.build(Medusa2Config(modules=["q_proj", wanted]), make_target())
    with pytest.raises(UserError, match="soft-caps its logits"):
        Medusa2.build(Medusa2Config(), make_target("gemma2"))


def test_trains_resumes_and_merges(target_folder, chats, tmp_path, fresh_accelerator):
    """A run through both stages, the same cut in the middle, and the merged target beside the adapted one."""
    settings = {"family": "medusa2", "heads": 2, "rank": 2, "heads_first": 0.5, "dropout": 0.1}
    whole = {**recipe_dict(target_folder, chats, tmp_path / "whole", keep=9), "head": settings}
    recipe = Recipe.from_dict(whole)
    folder = trainer.train(recipe)
    expected = losses(tmp_path / "whole")
    cut = Recipe.from_dict({**whole, "output": str(tmp_path / "cut")})
    trainer.train(cut)
    for step in (6, 8):  # go on from step 4, which is the last of the heads alone
        for path in (tmp_path / "cut" / "checkpoints").glob(f"step-*{step}"):
            path.rename(tmp_path / f"gone-{step}")
    (tmp_path / "cut" / "log.jsonl").unlink()
    trainer.train(cut)
    resumed = losses(tmp_path / "cut")
    assert sorted(resumed) == [5, 6, 7, 8]
    assert all(abs(resumed[step] - expected[step]) < 1e-5 for step in resumed)
    assert json.loads((folder / "config.json").read_text())["family"] == "medusa2" and (folder / "adapter").is_dir()
    head, target = open_head(folder, None, "float32")
    assert any(bool(p.any()) for name, p in head.adapter.items() if name.endswith("lora_B"))
    plain = reply(target)
    assert reply(target, head, Chain(2)) == plain
    head.merge(tmp_path / "merged")
    merged = Target.load(str(tmp_path / "merged" / "target"), "float32")
    assert reply(merged) == plain and not any("lora" in name for name, _ in merged.model.named_modules())
    loaded, merged = open_head(tmp_path / "merged" / "head", None, "float32")
    assert type(loaded).__name__ == "Medusa" and reply(merged, loaded, Chain(2)) == plain
    with pytest.raises(UserError, match="nothing to merge"):
        loaded.merge(tmp_path / "again")


def test_two_processes_train_one_adapter(target_folder, chats, tmp_path):
    """Each rank adapts a target of its own; the gradients are those of all rows, and all parameters are used."""
    head = "head={family: medusa2, heads: 2, rank: 2, heads_first: 0.5, dropout: 0.1}"
    recipe = write_recipe(tmp_path / "recipe.yaml", target_folder, chats, tmp_path / "unused", steps=4)
    alone = [f"output={tmp_path / 'one'}", "train.accumulation=2", head]
    together = [f"output={tmp_path / 'two'}", "train.accumulation=1", head]
    errors = tmp_path / "errors"
    processes = [start_training(recipe, alone, errors=errors), *start_ranks(recipe, 2, together, errors)]
    for process in processes:
        process.join(200)
    shown = "".join(path.read_text() for path in tmp_path.glob("errors*"))
    assert [process.exitcode for process in processes] == [0, 0, 0], shown
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, two = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-3)


def test_a_target_in_parts_cannot_be_adapted(target_folder, chats, tmp_path, fresh_accelerator, monkeypatch):
    raw = {**recipe_dict(target_folder, chats, tmp_path / "run"), "head": {"family": "medusa2", "heads": 2}}
    monkeypatch.setattr(trainer, "is_sharded", lambda accelerator: True)
    with pytest.raises(UserError, match="adapts the target, which must be whole"):
        trainer.train(Recipe.from_dict(raw))
