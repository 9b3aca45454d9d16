import importlib
import json
import sys

import pytest
import torch

import headtrain.heads
from decode.engine import Engine
from decode.errors import UserError
from decode.settings import Settings
from decode.tree import Chain, Dynamic, Static
from headtrain import checkpoint, trainer
from headtrain.heads.base import families, load_family
from headtrain.recipe import Recipe
from tests.headtrain.heads.rows import VOCABULARY, make_batch, make_head, make_target
from tests.tiny import VOCAB_SIZE

DEPTHS = {"eagle3": "steps", "medusa": "heads"}

TWIN = '''
"""One linear map of the hidden state of a middle layer; guesses the same distribution at both depths."""

import torch
from torch import nn

from headtrain.heads.base import Head, HeadConfig, HeadLoss
from headtrain.losses import distill, teacher_logits


class Config(HeadConfig):
    layer: int = 1


class Twin(Head):
    Config = Config
    max_depth = 2

    def __init__(self, config, target):
        super().__init__()
        self.config, self.target_layers = config, (config.layer,)
        self.map = nn.Linear(target.hidden_size, target.vocab_size, bias=False)

    @classmethod
    def build(cls, config, target, vocabulary=None):
        return cls(config, target)

    @classmethod
    def restore(cls, config, layers, target, shapes):
        return cls(config, target)

    def loss(self, batch, target):
        b, j = batch.loss_mask[:, 2:].nonzero(as_tuple=True)
        teacher = teacher_logits(target, batch.hidden[b, j + 1], None)
        weights = torch.ones(1, len(b))
        total, acceptance = distill(batch.features[b, j][None], self.map.weight, teacher, weights)
        return HeadLoss(total, acceptance, weights.sum(1))

    def begin(self, features, tokens, lengths, capacity):
        state = {}
        return state, self.commit(state, features, tokens, lengths)

    def extend(self, state, tokens, parents):
        return state["logits"]

    def commit(self, state, features, tokens, counts):
        last = features[torch.arange(len(counts)), counts - 1]
        state["logits"] = self.map(last)[:, None].float()
        return state["logits"]

    def select(self, state, rows):
        state["logits"] = state["logits"][rows]
'''


@pytest.fixture
def twin(tmp_path, monkeypatch):
    """A family in a folder of its own; nothing else knows it."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "twin.py").write_text(TWIN)
    monkeypatch.setattr(headtrain.heads, "__path__", [*headtrain.heads.__path__, str(tmp_path / "families")])
    importlib.invalidate_caches()
    yield "twin"
    sys.modules.pop("headtrain.heads.twin", None)
    vars(headtrain.heads).pop("twin", None)


@pytest.fixture(scope="module")
def target():
    return make_target()


def replies(target, draft, plan, **settings):
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=g).tolist() for n in (3, 9, 6)]
    engine = Engine(target.model, draft, plan)
    return [out.tokens for out in engine.generate(prompts, Settings(max_new_tokens=20, **settings))]


def test_registry():
    assert families() == sorted(families()) and {"eagle3", "medusa"} <= set(families())
    for name in families():
        assert load_family(name).__module__ == f"headtrain.heads.{name}"
    with pytest.raises(UserError, match="head.family: unknown family 'medua'; did you mean 'medusa'"):
        load_family("medua")


def test_a_new_family_is_one_file(twin, target, tmp_path):
    assert twin in families()
    (tmp_path / "chats.jsonl").write_text("{}")
    raw = {"target": {"model": str(tmp_path)}, "head": {"family": twin, "layer": 2}, "output": str(tmp_path / "run")}
    recipe = Recipe.from_dict({**raw, "data": {"train": str(tmp_path / "chats.jsonl")}})
    head = trainer.build_head(recipe, target, None)
    assert head.target_layers == (2,)
    batch = make_batch(head, target)
    optimizer = torch.optim.AdamW(trainer._parameter_groups(head, recipe.train), lr=1e-2)
    before = head.loss(batch, target)
    before.total.backward()
    optimizer.step()
    assert head.loss(batch, target).total < before.total
    assert before.counts.tolist() == [head.tokens(batch.loss_mask)]
    checkpoint.save_head(tmp_path / "head", head, twin, target, recipe)
    assert json.loads((tmp_path / "head" / "config.json").read_text())["head"] == {"layer": 2}
    loaded = checkpoint.load_head(tmp_path / "head", target)
    for settings in ({}, {"temperature": 0.8, "seed": 3}):
        plain = replies(target, None, None, **settings)
        for plan in (Chain(2), Static(((0,), (1,), (0, 0))), Dynamic(2, 2, 4)):
            assert replies(target, loaded, plan, **settings) == plain
    with pytest.raises(UserError, match="depth 3 is more than the draft's 2"):
        Engine(target.model, loaded, Chain(3))


def test_a_family_that_is_not_there_is_unknown():
    assert "twin" not in families()
    with pytest.raises(UserError):
        load_family("twin")


@pytest.mark.parametrize("family", DEPTHS)
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_decodes_what_the_target_says(family, vocabulary, target):
    head = make_head(family, target, vocabulary, **{DEPTHS[family]: 3})
    for settings in ({}, {"temperature": 0.8, "seed": 3}):
        plain = replies(target, None, None, **settings)
        for plan in (Chain(3), Dynamic(3, 2, 5)):
            assert replies(target, head, plan, **settings) == plain


# The reply of a row of 7 tokens is x_3, x_4 and, after a turn of the user, x_6.
MASK = [[0, 0, 0, 1, 1, 0, 1]]
TEACHERS = [2, 3, 5]  # the position whose distribution is that of the predicted token
# Of each depth: the slot (or position of the query) that predicts x_3, x_4 and x_6; None: there is none.
SLOTS = [[1, 2, 4], [0, 1, 3], [None, 0, 2], [None, None, 1]]


@pytest.mark.parametrize("family", DEPTHS)
def test_which_tokens_are_trained(family, target, monkeypatch):
    head = make_head(family, target, decay=0.5, **{DEPTHS[family]: 4})
    batch = make_batch(head, target, rows=1, length=7, mask=MASK)
    seen = {}

    def spy(student, weight, teacher, weights, loss):
        seen.update(student=student, weights=weights, teacher=teacher(slice(None)))
        return student.sum() * 0, weights.new_zeros(4)

    monkeypatch.setattr(sys.modules[type(head).__module__], "distill", spy)
    out = head.loss(batch, target)
    assert out.counts.tolist() == [3, 3, 2, 1] and head.tokens(batch.loss_mask) == 3
    expected = [[0.5**k * (slot is not None) for slot in slots] for k, slots in enumerate(SLOTS)]
    torch.testing.assert_close(seen["weights"], torch.tensor(expected))
    torch.testing.assert_close(seen["teacher"], target.logits(batch.hidden[0, TEACHERS]))
    for k, slots in enumerate(SLOTS):
        if family == "medusa":
            states = head.states(k, batch.features[0])
        else:
            states = head.norm(head.unroll(batch, head.config.steps)[k][0])
        for n, slot in enumerate(slots):
            if slot is not None:
                torch.testing.assert_close(seen["student"][k, n], states[slot])


@pytest.mark.parametrize("family", DEPTHS)
def test_padding_and_context_leave_the_loss_as_it_is(family, target):
    head = make_head(family, target, **{DEPTHS[family]: 3})
    rows = [make_batch(head, target, rows=1, length=n, mask=[[0] * 2 + [1] * (n - 2)], seed=n) for n in (6, 11)]
    apart = [head.loss(row, target) for row in rows]
    ids, mask = torch.zeros(2, 11, dtype=torch.int64), torch.zeros(2, 11, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, : row.input_ids.shape[1]], mask[b, : row.input_ids.shape[1]] = row.input_ids[0], row.loss_mask[0]
    together = make_batch(head, target, rows=2, length=11, mask=mask.tolist())
    together.input_ids, (together.features, together.hidden) = ids, target.features(ids, head.target_layers)
    out = head.loss(together, target)
    torch.testing.assert_close(out.total, apart[0].total + apart[1].total, rtol=1e-4, atol=1e-4)
    assert torch.equal(out.counts, apart[0].counts + apart[1].counts)


@pytest.mark.parametrize("family", DEPTHS)
def test_nothing_to_train(family, target):
    head = make_head(family, target, **{DEPTHS[family]: 3})
    batch = make_batch(head, target, mask=[[1, 1] + [0] * 12] * 2)  # no slot predicts the first two tokens
    out = head.loss(batch, target)
    out.total.backward()
    assert out.total == 0 and not out.counts.any() and head.tokens(batch.loss_mask) == 0
