import pytest
import torch

from headtrain import checkpoint
from headtrain.heads import eagle3
from headtrain.heads.eagle3 import default_layers
from tests.headtrain.heads.rows import VOCABULARY, make_batch, make_head, make_target

STEPS = 4


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture
def head(target):
    return make_head("eagle3", target, steps=STEPS)


def slow_unroll(head, batch, sees=lambda t, k: (t + 1, range(1, k + 1))):
    """The loop of the paper, one slot at a time. `sees`: how many step-0 keys, and which own keys, slot t sees at step k."""
    g, layer = head.g, head.midlayer
    num_slots = batch.input_ids.shape[1] - 1
    states = torch.zeros(head.config.steps, len(batch.input_ids), num_slots, g.hidden, dtype=torch.float64)
    for b in range(len(batch.input_ids)):
        embeddings = head.embedding(batch.input_ids[b]).double()
        fused = head.fc(batch.features[b].double())

        def project(t, k, u, embeddings=embeddings):
            q, key, value = layer.project(
                embeddings[t + 1 + k][None, None], u[None, None], head.rotary(u[None, None], torch.tensor([[t + k]]))
            )
            spread = [x.repeat_interleave(g.num_heads // g.num_kv_heads, 1)[0, :, 0] for x in (key, value)]
            return q[0, :, 0], *spread  # each [heads, d]

        first = [project(t, 0, fused[t]) for t in range(num_slots)]
        for t in range(num_slots):
            own, u = [], fused[t]
            for k in range(head.config.steps):
                if t + 1 + k >= batch.input_ids.shape[1]:
                    break  # no token to consume
                q, key, value = project(t, k, u)
                own.append((key, value))
                shared, mine = sees(t, k)
                pairs = [x[1:] for x in first[:shared]] + [own[i] for i in mine]
                keys, values = (torch.stack(x) for x in zip(*pairs, strict=True))  # [n, heads, d]
                p = torch.softmax((keys * q).sum(-1) * g.head_dim**-0.5, 0)  # [n, heads]
                u = layer.finish(u[None, None], (p[..., None] * values).sum(0)[None, :, None])[0, 0]
                states[k, b, t] = u
    return states


def difference(head, batch, slow) -> float:
    fast = torch.stack(head.unroll(batch, head.config.steps))
    length = batch.input_ids.shape[1]
    return max(float((fast[k] - slow[k])[:, : length - 1 - k].abs().max()) for k in range(head.config.steps))


@torch.no_grad()
def test_training_time_test_is_the_loop_of_the_paper(target, head):
    batch, head = make_batch(head, target), head.double()
    assert difference(head, batch, slow_unroll(head, batch)) < 1e-5  # the rotary table is float32


@pytest.mark.parametrize(
    "sees",
    [
        lambda t, k: (t + 1 + k, [k] * (k > 0)),
        lambda t, k: (t + 1, [k] * (k > 0)),
        lambda t, k: (t or 1, range(1, k + 1)),
    ],
)
@torch.no_grad()
def test_other_visibilities_are_seen(target, head, sees):
    batch, head = make_batch(head, target, rows=1), head.double()
    wrong = slow_unroll(head, batch, lambda t, k: (min(sees(t, k)[0], batch.input_ids.shape[1] - 1), sees(t, k)[1]))
    assert difference(head, batch, wrong) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_lm_head_starts_from_the_rows_of_the_target(target, vocabulary):
    head = eagle3.Eagle3.build(eagle3.Eagle3Config(vocabulary=None), target, vocabulary)
    rows = target.lm_head_weight if vocabulary is None else target.lm_head_weight[vocabulary]
    assert torch.equal(head.lm_head.weight, rows) and head.lm_head.weight.data_ptr() != target.lm_head_weight.data_ptr()
    assert (head.vocabulary is None) if vocabulary is None else torch.equal(head.vocabulary, vocabulary)
    assert head.t2d.sum() == len(rows) and torch.equal(head.d2t + torch.arange(len(rows)), head.t2d.nonzero()[:, 0])


def test_parameters(target, head):
    h, kv, inner = 32, 2 * 16, 48
    layer = 2 * h * (4 * 16 + 2 * kv) + 4 * 16 * h + 3 * h * inner + 3 * h
    assert sum(p.numel() for p in head.parameters()) == 3 * h * h + layer + h + 101 * h
    names = {name.split(".")[0] for name in head.state_dict()}
    assert names == {"fc", "midlayer", "norm", "lm_head", "d2t", "t2d"}


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_saved_and_loaded(target, vocabulary, tmp_path):
    head = make_head("eagle3", target, vocabulary, steps=STEPS)
    checkpoint.save_head(tmp_path / "head", head, "eagle3", target)
    loaded = checkpoint.load_head(tmp_path / "head", target)
    assert loaded.config == head.config and loaded.target_layers == head.target_layers
    batch = make_batch(head, target)
    torch.testing.assert_close(loaded.loss(batch, target).total, head.loss(batch, target).total)


def test_feature_noise_is_of_training_only(target):
    head = make_head("eagle3", target, steps=2, feature_noise=0.2)
    batch = make_batch(head, target)
    still = [head.loss(batch, target).total for _ in range(2)]
    head.train()
    assert still[0] == still[1] != head.loss(batch, target).total


def test_default_layers():
    assert default_layers(32) == [2, 16, 29]
    assert default_layers(7) == [2, 3, 4]
    assert default_layers(6) == [2, 4, 6] and default_layers(1) == [1]
