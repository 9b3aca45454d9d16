import pytest
import torch

from headtrain import checkpoint
from headtrain.heads.medusa import Medusa, MedusaConfig
from tests.headtrain.heads.rows import VOCABULARY, make_batch, make_head, make_target

HEADS = 3


@pytest.fixture(scope="module")
def target():
    return make_target()


def by_hand(head, target, features):
    """Logits [.., heads, Vd] with matrices only."""
    rows = target.lm_head_weight if head.vocabulary is None else target.lm_head_weight[head.vocabulary]
    state, out = head.state_dict(), []
    for h in range(head.config.heads):
        v = features
        for i in range(head.config.layers):
            x = v @ state[f"{h}.{i}.linear.weight"].T + state[f"{h}.{i}.linear.bias"]
            v = v + x * torch.sigmoid(x)
        out.append(v @ rows.T)
    return torch.stack(out, -2)


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_starts_as_the_target_itself(family, vocabulary):
    target = make_target(family)
    head = Medusa.build(MedusaConfig(heads=HEADS, layers=2), target, vocabulary)
    batch = make_batch(head, target)
    expected = target.model(input_ids=batch.input_ids).logits[:, 8]
    expected = expected if vocabulary is None else expected[:, vocabulary]
    state, logits = head.begin(batch.features[:, :9], batch.input_ids[:, :10], torch.tensor([9, 9]), 64)
    for _ in range(HEADS - 1):
        torch.testing.assert_close(logits[:, 0], expected, rtol=1e-4, atol=1e-4)
        logits = head.extend(state, batch.input_ids[:, :1], torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
@torch.no_grad()
def test_drafting_level_by_level(target, layers, vocabulary):
    head = make_head("medusa", target, vocabulary, heads=HEADS, layers=layers)
    batch = make_batch(head, target, rows=3)
    logits_at = by_hand(head, target, batch.features)  # [B, T, K, Vd]
    lengths, counts = torch.tensor([9, 4, 6]), torch.tensor([1, 4, 2])
    state, logits = head.begin(batch.features[:, :9], batch.input_ids[:, :10], lengths, 64)

    def check(logits, rows, positions):
        for level in range(HEADS):
            torch.testing.assert_close(logits[:, 0], logits_at[rows, positions, level], rtol=1e-4, atol=1e-4)
            assert logits.dtype == torch.float32
            wrong = logits_at[rows, positions, (level + 1) % HEADS]
            assert (logits[:, 0] - wrong).abs().max() > 1e-2
            if level < HEADS - 1:
                guesses = torch.zeros(len(rows), 2, dtype=torch.int64)
                logits = head.extend(state, guesses, guesses)

    check(logits, torch.arange(3), lengths - 1)
    with pytest.raises(AssertionError, match="one for each head"):
        head.extend(state, batch.input_ids[:, :1], torch.zeros(3, 1, dtype=torch.int64))
    rows = torch.tensor([1, 2])
    head.select(state, rows)
    at = (lengths[rows, None] + torch.arange(4)).clamp(max=13)
    logits = head.commit(state, batch.features[rows[:, None], at], batch.input_ids[rows[:, None], at], counts[rows])
    check(logits, rows, lengths[rows] + counts[rows] - 1)


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_loss_is_the_sum_over_heads(target, vocabulary):
    """Every head and position, one at a time, on full logits."""
    mask = [[0, 0, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0, 1]]
    head = make_head("medusa", target, vocabulary, heads=HEADS, decay=0.7)
    batch = make_batch(head, target, length=7, mask=mask)
    q = by_hand(head, target, batch.features).log_softmax(-1)
    teacher = target.model(input_ids=batch.input_ids).logits
    p = (teacher if vocabulary is None else teacher[..., vocabulary]).softmax(-1)
    total, acceptance, counts = 0, torch.zeros(HEADS), [0] * HEADS
    for b in range(2):
        for i in range(HEADS):
            for t in range(7 - 2 - i):
                if mask[b][t + 2 + i]:
                    total = total - 0.7**i * (p[b, t + 1 + i] * q[b, t, i]).sum()
                    acceptance[i] += torch.minimum(p[b, t + 1 + i], q[b, t, i].exp()).sum()
                    counts[i] += 1
    found = head.loss(batch, target)
    torch.testing.assert_close(found.total, total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.acceptance, acceptance, rtol=1e-4, atol=1e-4)
    assert found.counts.tolist() == counts
    shifted = make_batch(head, target, length=7, mask=[row[1:] + [0] for row in mask])
    assert abs(head.loss(shifted, target).total - total) > 0.1


def test_every_head_learns(target):
    head = Medusa.build(MedusaConfig(heads=HEADS), target)
    batch = make_batch(head, target, rows=4)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = head.loss(batch, target).total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.abs().max() > 0 for p in head.parameters())
    assert target.lm_head_weight.grad is None


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_only_the_blocks_are_saved(target, vocabulary, tmp_path):
    head = make_head("medusa", target, vocabulary, heads=2, layers=2)
    blocks = {f"{h}.{i}.linear.{x}" for h in range(2) for i in range(2) for x in ("weight", "bias")}
    assert set(head.state_dict()) == blocks | ({"token_map"} if vocabulary is not None else set())
    assert sum(p.numel() for p in head.parameters()) == 2 * 2 * (32 * 32 + 32)
    checkpoint.save_head(tmp_path / "head", head, "medusa", target)
    loaded = checkpoint.load_head(tmp_path / "head", target)
    assert loaded.target_layers == (3,) and loaded.max_depth == 2
    batch = make_batch(head, target)
    torch.testing.assert_close(loaded.loss(batch, target).total, head.loss(batch, target).total)
