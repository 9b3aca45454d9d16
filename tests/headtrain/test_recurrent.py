"""What all families share that feed their own output back: drafting repeats the training-time test."""

import pytest
import torch

from headtrain.recurrent import predicting_slots
from tests.headtrain.heads.rows import VOCABULARY, make_batch, make_head, make_target

FAMILIES = ("eagle1", "eagle3")
STEPS = 4


@pytest.fixture(scope="module")
def target():
    return make_target()


def drafted(head, batch, lengths, counts, keep=None):
    """Logits along the true tokens: [(step, row of the batch, slot, logits [Vd])] of begin, extend, commit, extend."""
    found, rows = [], torch.arange(len(lengths))
    ids, lengths, counts = batch.input_ids, torch.tensor(lengths), torch.tensor(counts)
    longest = int(lengths.max())
    state, logits = head.begin(batch.features[:, :longest], ids[:, : longest + 1], lengths, 64)

    def record(logits, slots, step):
        found.extend((step, int(b), int(t), x) for b, t, x in zip(rows, slots, logits[:, 0], strict=True))

    def chain(logits, slots):
        record(logits, slots, 0)
        for step in range(1, STEPS):
            guesses = ids[rows, slots + 1 + step][:, None]
            record(head.extend(state, guesses, torch.full_like(guesses, step - 1)), slots, step)

    chain(logits, lengths - 1)
    if keep is not None:
        rows = torch.tensor(keep)
        head.select(state, rows)
        lengths, counts = lengths[rows], counts[rows]
    steps = torch.arange(int(counts.max()))
    at = (lengths[:, None] + steps).clamp(max=ids.shape[1] - 2)
    logits = head.commit(state, batch.features[rows[:, None], at], ids[rows[:, None], at + 1], counts)
    chain(logits, lengths + counts - 1)
    return found


@pytest.mark.parametrize(
    "lengths, counts, keep",
    [([5, 5], [2, 2], None), ([9, 5], [1, 4], None), ([5, 9, 7], [3, 1, 2], [2, 0]), ([1], [1], None)],
)
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_drafting_is_the_training_time_test(target, family, lengths, counts, keep, vocabulary):
    head = make_head(family, target, vocabulary)
    batch = make_batch(head, target, rows=len(lengths), length=18)
    trained = head.logits(torch.stack(head.unroll(batch, STEPS)))  # [K, B, S, Vd]
    found = drafted(head, batch, lengths, counts, keep)
    assert len(found) == STEPS * (len(lengths) + len(keep or lengths))
    for step, b, slot, logits in found:
        torch.testing.assert_close(logits, trained[step, b, slot], rtol=1e-3, atol=1e-4)
    wrong = max(float((x - trained[step, b, slot - 1]).abs().max()) for step, b, slot, x in found if slot)
    assert wrong > 0.1 or max(lengths) == 1


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_branches_do_not_see_each_other(target, family):
    """Two guesses in one call give what each gives alone."""
    head = make_head(family, target)
    batch = make_batch(head, target, rows=1)
    start = batch.features[:, :6], batch.input_ids[:, :7], torch.tensor([6]), 64
    tokens = torch.tensor([[3, 8], [5, 5]])  # a level a row; the two chains 3 - 5 and 8 - 5
    state, _ = head.begin(*start)
    head.extend(state, tokens[:1], torch.zeros(1, 2, dtype=torch.int64))
    both = head.extend(state, tokens[1:], torch.tensor([[1, 2]]))
    for i in range(2):
        state, _ = head.begin(*start)
        head.extend(state, tokens[:1, i : i + 1], torch.zeros(1, 1, dtype=torch.int64))
        alone = head.extend(state, tokens[1:, i : i + 1], torch.ones(1, 1, dtype=torch.int64))
        torch.testing.assert_close(both[:, i : i + 1], alone, rtol=1e-4, atol=1e-5)
    assert (both[:, 0] - both[:, 1]).abs().max() > 0.01


def test_predicting_slots_by_hand():
    """Six tokens, the last three trained: the target at 2, 3, 4 teaches 3, 4, 5; step k reads slot j - 1 - k."""
    b, j, slots, known = predicting_slots(torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0]]), 3)
    assert b.tolist() == [0, 0, 0, 1] and j.tolist() == [2, 3, 4, 1]
    assert slots.tolist() == [[1, 2, 3, 0], [0, 1, 2, 0], [0, 0, 1, 0]]
    assert known.tolist() == [[True] * 4, [True, True, True, False], [False, True, True, False]]
