"""Hydra and Hydra++: which tokens a head sees, and drafting equal to the training forward."""

import pytest
import torch

from decode.engine import Engine
from decode.settings import Settings
from decode.tree import Chain, Dynamic
from headtrain import checkpoint
from tests.headtrain.heads.rows import VOCABULARY, make_batch, make_head, make_target

HEADS = 3


@pytest.fixture(scope="module")
def target():
    return make_target()


def by_hand(head, target, batch, b, t, i):
    """Logits of head i at position t: u_t and the embeddings of the i + 1 tokens behind it."""
    u = head._prompt(batch.features)[b, t]
    x = torch.cat([u, target.embedding(batch.input_ids[b, t + 1 : t + 2 + i]).flatten()])
    return head.target_rows() @ head.hydra_mlp[i](x)


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
@pytest.mark.parametrize("prefix", [False, True])
def test_loss_is_the_cross_entropy_of_each_head(target, prefix, vocabulary):
    head = make_head("hydra", target, vocabulary, heads=HEADS, layers=2, prefix=prefix, decay=0.5)
    mask = [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
    batch = make_batch(head, target, length=10, mask=mask)
    out = head.loss(batch, target)
    expected, count = 0.0, 0
    for b in range(2):
        for i in range(HEADS):
            for t in range(10 - 2 - i):
                if batch.loss_mask[b, t + 2 + i]:
                    p = torch.softmax(head.target_rows() @ batch.hidden[b, t + 1 + i], -1)
                    log_q = torch.log_softmax(by_hand(head, target, batch, b, t, i), -1)
                    expected = expected - 0.5**i * (p * log_q).sum()
                    count += 1
    torch.testing.assert_close(out.total, expected, rtol=1e-4, atol=1e-4)
    assert int(out.counts.sum()) == count


@pytest.mark.parametrize("prefix", [False, True])
@torch.no_grad()
def test_drafting_is_the_training_forward(target, prefix):
    head = make_head("hydra", target, VOCABULARY, heads=HEADS, layers=2, prefix=prefix)
    batch = make_batch(head, target, rows=3, length=18)
    ids, lengths, counts = batch.input_ids, torch.tensor([9, 5, 7]), torch.tensor([1, 4, 2])
    rows = torch.arange(3)
    state, logits = head.begin(batch.features[:, :9], ids[:, :10], lengths, 40)

    def check(logits, last):
        for i in range(HEADS):
            if i:
                guesses = ids[rows, last + 1 + i][:, None]
                logits = head.extend(state, guesses, torch.full_like(guesses, i - 1))
            for place, (b, t) in enumerate(zip(rows.tolist(), last.tolist(), strict=True)):
                torch.testing.assert_close(
                    logits[place, 0], by_hand(head, target, batch, b, t, i), rtol=1e-3, atol=1e-4
                )

    check(logits, lengths - 1)
    rows = torch.tensor([2, 0, 1])
    head.select(state, rows)
    lengths, counts = lengths[rows], counts[rows]
    at = (lengths[:, None] + torch.arange(4)).clamp(max=16)
    logits = head.commit(state, batch.features[rows[:, None], at], ids[rows[:, None], at + 1], counts)
    check(logits, lengths + counts - 1)


@torch.no_grad()
def test_siblings_differ_and_branches_are_their_own(target):
    head = make_head("hydra", target, heads=HEADS)
    batch = make_batch(head, target, rows=1)
    start = batch.features[:, :6], batch.input_ids[:, :7], torch.tensor([6]), 64
    state, _ = head.begin(*start)
    head.extend(state, torch.tensor([[3, 8]]), torch.zeros(1, 2, dtype=torch.int64))
    both = head.extend(state, torch.tensor([[5, 5]]), torch.tensor([[1, 2]]))
    for i, token in enumerate((3, 8)):
        state, _ = head.begin(*start)
        head.extend(state, torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.int64))
        alone = head.extend(state, torch.tensor([[5]]), torch.ones(1, 1, dtype=torch.int64))
        torch.testing.assert_close(both[:, i : i + 1], alone, rtol=1e-4, atol=1e-5)
    assert (both[:, 0] - both[:, 1]).abs().max() > 0.01


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", [Chain(3), Dynamic(3, 3, 9)], ids=["chain", "dynamic"])
def test_parity(target, plan, temperature):
    settings = Settings(max_new_tokens=24, temperature=temperature, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9]]
    plain = Engine(target.model).generate(prompts, settings)
    fast = Engine(target.model, make_head("hydra", target, heads=HEADS), plan).generate(prompts, settings)
    assert [output.tokens for output in fast] == [output.tokens for output in plain]


def test_heads_are_their_own_and_saved(target, tmp_path):
    head = make_head("hydra", target, heads=2, layers=3)
    blocks = [parameter.data_ptr() for name, parameter in head.named_parameters() if name.endswith("linear.weight")]
    assert len(set(blocks)) == len(blocks) == 6
    checkpoint.save_head(tmp_path / "head", head, "hydra", target)
    again = checkpoint.load_head(tmp_path / "head", target)
    assert head.state_dict().keys() == again.state_dict().keys()
