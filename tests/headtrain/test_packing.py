"""Conversations packed into one row give the loss and the gradients of each by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headtrain.recurrent as recurrent
from decode.errors import UserError
from headtrain.data import batches, fill_bins
from headtrain.features import CachedFeatures, OnlineFeatures, write_cache
from headtrain.heads.base import Batch, families, load_family
from headtrain.heads.eagle3 import default_layers
from headtrain.packing import packed_states, positions_of, spans, starts_of
from headtrain.recipe import Recipe
from headtrain.recurrent import predicting_slots
from headtrain.target import Target
from headtrain.trainer import train
from tests.folders import load_parts, losses, recipe_dict
from tests.headtrain.heads.rows import make_head, make_target
from tests.headtrain.test_trainer import make_trainer, take_steps
from tests.tiny import tiny_target

LENGTHS = (9, 2, 5, 1, 14)  # rows too short to teach anything among them
SETTINGS = {
    "eagle1": [{"passes": 3, "top_weight": 0.5}],
    "eagle3": [{"steps": 4}, {"steps": 3, "preset": "eagle3.1"}],
    "hydra": [{"heads": 3, "prefix": True}, {"heads": 2, "prefix": False}],
    "medusa": [{"heads": 3}],
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums in another order


@pytest.fixture(scope="module")
def target():
    return make_target()


def conversations(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids [1, T] and loss masks [1, T]."""
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(3, 90, (1, length), generator=g), torch.rand(1, length, generator=g) < 0.7) for length in LENGTHS
    ]


def apart(head, target) -> list[Batch]:
    """A row each. One token alone has no slot and teaches nothing."""
    rows = [(ids, mask) for ids, mask in conversations() if ids.shape[1] > 1]
    return [Batch(ids, mask, *target.features(ids, head.target_layers)) for ids, mask in rows]


def packed(head, target) -> Batch:
    ids, mask = (torch.cat(part, 1) for part in zip(*conversations(), strict=True))
    return Batch(ids, mask, *target.features(ids, head.target_layers, LENGTHS), documents=LENGTHS)


def loss_and_gradients(head, target, parts: list[Batch]) -> dict[str, torch.Tensor]:
    head.zero_grad()
    found = [head.loss(batch, target) for batch in parts]
    total = torch.stack([out.total for out in found]).sum()
    total.backward()
    sums = {name: torch.stack([getattr(out, name) for out in found]).sum(0) for name in ("acceptance", "counts")}
    return {"total": total.detach(), **sums} | {
        name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


CASES = [
    pytest.param(family, config, id=f"{family}-{i}") for family in SETTINGS for i, config in enumerate(SETTINGS[family])
]


@pytest.mark.parametrize("family, config", CASES)
def test_packed_is_each_by_itself(target, family, config):
    head = make_head(family, target, **config)
    expected = loss_and_gradients(head, target, apart(head, target))
    assert expected["total"] > 1 and expected["counts"][0] > 10
    assert_same(loss_and_gradients(head, target, [packed(head, target)]), expected)


def forget(module, name, function, monkeypatch):
    """Let `function` of a module run without being told of the documents."""
    monkeypatch.setattr(module, name, lambda *args, **kwargs: function(*args[: len(args) - (args[-1] == LENGTHS)]))


@pytest.mark.parametrize("forgotten", ["ttt_attention", "predicting_slots", "features"])
def test_forgetting_the_borders_is_seen(target, monkeypatch, forgotten):
    """Negative control: without the document mask in one place the comparison fails."""
    head = make_head("eagle3", target, steps=4)
    expected = loss_and_gradients(head, target, apart(head, target))
    batch = packed(head, target)
    if forgotten == "features":
        features, hidden = target.features(batch.input_ids, head.target_layers)
        batch = replace(batch, features=features, hidden=hidden)
    else:
        import headtrain.heads.eagle3 as family

        module = recurrent if forgotten == "ttt_attention" else family
        forget(module, forgotten, getattr(recurrent, forgotten), monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(loss_and_gradients(head, target, [batch]), expected)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt_neox", "olmo2"])
def test_target_keeps_conversations_apart(name):
    """With sliding windows, soft caps and sinks too; conversations longer than the windows."""
    model = tiny_target(name)
    lengths = (31, 1, 20)
    ids = torch.randint(3, 90, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    found = packed_states(model, ids, lengths)
    expected = [model.base_model(input_ids=ids[:, span], use_cache=False)[0] for span in spans(lengths)]
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-4, atol=1e-4)
    together = model.base_model(input_ids=ids, use_cache=False)[0]
    assert (together - found).abs().max() > 0.01, "negative control"


def test_places_by_hand():
    assert positions_of((3, 1, 2)).tolist() == [[0, 1, 2, 0, 0, 1]]
    assert starts_of((3, 1, 2)).tolist() == [[0, 0, 0, 3, 4, 4]]
    assert [(s.start, s.stop) for s in spans((3, 1, 2), 5)] == [(0, 3), (3, 4), (4, 5)]


def test_predicting_slots_by_hand():
    """Conversations at 0-2 and 3-6, all trained: the tokens 2, 5 and 6 are predicted."""
    b, j, slots, known = predicting_slots(torch.ones(1, 7, dtype=torch.bool), 2, (3, 4))
    assert b.tolist() == [0, 0, 0] and j.tolist() == [1, 4, 5]
    assert slots[known].tolist() == [0, 3, 4, 3]
    assert known.tolist() == [[True, True, True], [False, False, True]]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 50))
def test_bins(lengths, capacity):
    bins = fill_bins(range(len(lengths)), np.array(lengths, dtype=np.int64), capacity)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(len(rows) == 1 or sum(lengths[row] for row in rows) <= capacity for rows in bins)
    half_empty = [rows for rows in bins if 2 * sum(lengths[row] for row in rows) <= capacity]
    assert len(half_empty) <= 1, "two of them would fit into one"


@pytest.mark.parametrize("world, accumulation", [(1, 1), (2, 3)])
def test_every_row_is_packed_once(target_folder, chats, world, accumulation):
    _, dataset = load_parts(target_folder, chats)
    plans = [batches(dataset, 300, 0, 1, rank, world, accumulation, pack=True) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1 and len(plans[0]) % accumulation == 0
    rows = [row for plan in plans for micro_batch in plan for row in micro_batch]
    assert sorted(rows) == list(range(len(dataset)))
    assert all(sum(dataset.lengths[row] for row in rows) <= 300 for plan in plans for rows in plan if len(rows) > 1)


def test_cached_states_are_packed_as_those_of_the_target(tmp_path, target_folder, chats):
    target, dataset = load_parts(target_folder, chats)
    layers = (1, 3)
    list(write_cache(dataset, target, layers, tmp_path, 200))
    rows = [4, 0, 7]
    found = CachedFeatures(dataset, target, layers, tmp_path, pack=True).batch(rows)
    expected = OnlineFeatures(dataset, target, layers, pack=True).batch(rows)
    assert found.documents == expected.documents == tuple(dataset.lengths[rows].tolist())
    for name in ("input_ids", "loss_mask", "features", "hidden"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)


def test_packed_steps_are_padded_steps(tmp_path, target_folder, chats, fresh_accelerator):
    steps = [[[0, 1, 2, 3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    settings = {"clip_norm": None, "learning_rate": 1e-3}
    padded, weights = take_steps(make_trainer(target_folder, chats, tmp_path / "padded", **settings), steps)
    trainer = make_trainer(target_folder, chats, tmp_path / "packed", **settings)
    trainer.features.pack = True
    found, others = take_steps(trainer, steps)
    assert found == pytest.approx(padded, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=1e-4)


def packing_recipe(target_folder, chats, run, **head) -> Recipe:
    raw = recipe_dict(target_folder, chats, run, steps=6)
    raw["data"]["pack"] = True
    raw["head"] |= head
    return Recipe.from_dict(raw)


def test_training_packs(tmp_path, target_folder, chats, fresh_accelerator):
    train(packing_recipe(target_folder, chats, tmp_path))
    values = losses(tmp_path)
    assert len(values) == 6 and values[6] < 0.98 * values[1]


def test_what_cannot_pack_says_so(tmp_path, target_folder, chats, fresh_accelerator):
    with pytest.raises(UserError, match=r"data\.pack: eagle3 with these settings .*data\.pack=false") as error:
        train(packing_recipe(target_folder, chats, tmp_path, mask="consumed"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", families())
def test_every_family_packs_or_refuses(family, target):
    """A family that says that it packs is one that the comparison above has seen."""
    if family not in SETTINGS:
        assert load_family(family).packs(None) is False  # type: ignore[arg-type]


def test_target_gives_layers_and_hidden(target_folder):
    target = Target.load(str(target_folder), "float32")
    ids = torch.randint(3, 90, (1, sum(LENGTHS)))
    features, hidden = target.features(ids, default_layers(target.num_layers), LENGTHS)
    parts = [target.features(ids[:, span], default_layers(target.num_layers)) for span in spans(LENGTHS)]
    torch.testing.assert_close(features, torch.cat([part for part, _ in parts], 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden, torch.cat([part for _, part in parts], 1), rtol=1e-4, atol=1e-4)
