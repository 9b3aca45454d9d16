"""DFlash: what a block sees, its weights, and drafting equal to the training forward."""

import pytest
import torch

from decode.engine import Engine
from decode.errors import UserError
from decode.settings import Settings
from decode.tree import Chain, Dynamic
from headtrain import checkpoint
from headtrain.heads.dflash import DFlash, DFlashConfig, default_layers
from tests.headtrain.heads.rows import VOCABULARY, make_batch, make_head, make_target

BLOCK = 4
MASK = [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], [1] * 12]


@pytest.fixture(scope="module")
def target():
    return make_target()


def make(target, vocabulary=None, **config):
    return make_head("dflash", target, vocabulary, **{"block": BLOCK, "decoder_layers": 2, **config})


def rms(x, norm):
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def turn(x, position, head):
    """Rotate x [.., d] to a position."""
    cos, sin = (part[0, 0].to(x.dtype) for part in head.rotary(x, torch.tensor([[position]])))
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def block_logits(head, batch, b, a, sees=lambda s, a: s < a):
    """Logits [S - 1, Vd] of the block at anchor a, one query at a time; `sees`: which features."""
    g, dtype = head.g, head.fc.weight.dtype
    context = [rms(x, head.hidden_norm) for x in batch.features[b].to(dtype) @ head.fc.weight.T]
    tokens = torch.tensor([int(batch.input_ids[b, a])] + [head.mask_token] * (head.config.block - 1))
    u = head.target.embedding(tokens).to(dtype)
    for layer in head.layers:
        attention = layer.self_attn

        def key_value(x, position, attention=attention):
            k, v = (y.view(g.num_kv_heads, g.head_dim) for y in (attention.k_proj(x), attention.v_proj(x)))
            k = turn(rms(k, attention.k_norm), position, head)
            return [y.repeat_interleave(g.num_heads // g.num_kv_heads, 0) for y in (k, v)]

        x = rms(u, layer.input_layernorm)
        pairs = [key_value(context[s], s) for s in range(len(context)) if sees(s, a)]
        pairs += [key_value(x[i], a + i) for i in range(len(x))]
        keys, values = (torch.stack(y) for y in zip(*pairs, strict=True))  # [n, heads, d]
        attended = []
        for i in range(len(x)):
            q = turn(rms(attention.q_proj(x[i]).view(g.num_heads, g.head_dim), attention.q_norm), a + i, head)
            p = torch.softmax((keys * q).sum(-1) * g.head_dim**-0.5, 0)
            attended.append((p[..., None] * values).sum(0).flatten())
        u = u + attention.o_proj(torch.stack(attended))
        u = u + layer.mlp(rms(u, layer.post_attention_layernorm))
    return rms(u, head.norm)[1:] @ head.target_rows().to(dtype).T


def slow_weights(config, c, trained):
    """[K] weights of a block from the probabilities c and the trained offsets, lists."""
    size = len(c)
    if config.weighting == "exponential":
        return [float(torch.exp(torch.tensor(-k / config.gamma))) for k in range(size)]
    if config.weighting == "none":
        return [1.0] * size
    weights = []
    for j in range(size):
        total = 0.0
        for m in range(j, size):
            product = 1.0
            for i in range(m + 1):
                product *= (1 - config.alpha) * c[i] + config.alpha if trained[i] else 1.0
            total += product * trained[m]
        weights.append(total)
    return weights


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["whole", "reduced"])
@pytest.mark.parametrize("teacher", ["distribution", "token"])
@pytest.mark.parametrize("weighting", ["dpace", "exponential"])
def test_loss_is_that_of_each_block_by_itself(target, weighting, teacher, vocabulary):
    head = make(target, vocabulary, weighting=weighting, teacher=teacher, alpha=0.3, gamma=2.0, anchors=3).double()
    batch = make_batch(head, target, length=12, mask=MASK)
    out = head.loss(batch, target)
    columns = list(range(101)) if vocabulary is None else vocabulary.tolist()
    anchors, valid = head.sample(batch.loss_mask)
    assert valid.tolist() == [[True] * 3] * 2 and head.tokens(batch.loss_mask) == 6
    expected, counts = torch.zeros((), dtype=torch.float64), [0] * (BLOCK - 1)
    for b, i in valid.nonzero().tolist():
        a = int(anchors[b, i])
        assert batch.loss_mask[b, a] and batch.loss_mask[b, a + 1] and a
        log_q = torch.log_softmax(block_logits(head, batch, b, a), -1)
        inside = [a + k < 12 and bool(batch.loss_mask[b, a + k]) for k in range(1, BLOCK)]
        label = [int(batch.input_ids[b, min(a + k, 11)]) for k in range(1, BLOCK)]
        c = [float(log_q[k, columns.index(x)].detach().exp()) if x in columns else 0.0 for k, x in enumerate(label)]
        for k, w in enumerate(slow_weights(head.config, c, inside)):
            if inside[k] and teacher == "token" and label[k] in columns:
                expected, counts[k] = expected - w * log_q[k, columns.index(label[k])], counts[k] + 1
            elif inside[k] and teacher == "distribution":
                p = torch.softmax(target.logits(batch.hidden[b, a + k])[columns].double(), -1)
                expected, counts[k] = expected - w * (p * log_q[k]).sum(), counts[k] + 1
    torch.testing.assert_close(out.total.double(), expected, rtol=1e-5, atol=1e-4)
    assert out.counts.tolist() == counts
    names, parameters = zip(*head.named_parameters(), strict=True)
    grads = [torch.autograd.grad(x, parameters) for x in (out.total, expected)]
    for name, ours, theirs in zip(names, *grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)
    assert target.lm_head_weight.grad is None


@torch.no_grad()
def test_a_block_sees_what_lies_strictly_before_it(target):
    head = make(target).double()
    batch = make_batch(head, target, rows=1, length=12)
    states = head.run_blocks(batch, torch.tensor([[6, 3]]))
    ours = states[0, 0, 1:] @ target.lm_head_weight.double().T
    torch.testing.assert_close(ours, block_logits(head, batch, 0, 6), rtol=1e-5, atol=1e-5)
    for wrong in (lambda s, a: s <= a, lambda s, a: s < a - 1, lambda s, a: True):
        assert (block_logits(head, batch, 0, 6, wrong) - ours).abs().max() > 0.01
    alone = head.run_blocks(batch, torch.tensor([[6]]))  # blocks do not see each other
    torch.testing.assert_close(alone[0, 0], states[0, 0])


def test_dpace_by_hand(target, monkeypatch):
    """alpha 1/2, c = 1, 0, 1: products 1, 1/2, 1/2; without the middle offset 1, -, 1."""
    head = make(target)
    monkeypatch.setattr("headtrain.heads.dflash.probabilities", lambda states, rows, labels: (labels > 0).float())
    labels, states = torch.tensor([[[5, 0, 5]]]), torch.zeros(1, 1, 3, 32)
    everywhere = torch.ones(1, 1, 3, dtype=torch.bool)
    assert head.weigh(states, labels, everywhere)[0, 0].tolist() == [2.0, 1.0, 0.5]
    assert head.weigh(states, labels, torch.tensor([[[True, False, True]]]))[0, 0].tolist() == [2.0, 1.0, 1.0]
    flat = make(target, alpha=1.0)
    assert flat.weigh(states, labels, everywhere)[0, 0].tolist() == [3.0, 2.0, 1.0]


@torch.no_grad()
def test_drafting_is_the_training_forward(target):
    head = make(target, VOCABULARY)
    batch = make_batch(head, target, rows=3, length=18)
    ids, lengths, counts = batch.input_ids, torch.tensor([9, 5, 7]), torch.tensor([1, 4, 2])
    rows = torch.arange(3)
    state, logits = head.begin(batch.features[:, :9], ids[:, :10], lengths, 40)

    def check(logits, anchors):
        expected = head.run_blocks(batch, anchors.new_zeros(3, 1).index_copy(0, rows, anchors[:, None]))
        expected = expected[rows, 0, 1:] @ head.target_rows().T
        for k in range(BLOCK - 1):
            if k:
                logits = head.extend(state, torch.zeros(3, 1, dtype=torch.int64), torch.full((3, 1), k - 1))
            torch.testing.assert_close(logits[:, 0], expected[:, k], rtol=1e-3, atol=1e-4)

    check(logits, lengths)
    rows = torch.tensor([2, 0, 1])
    head.select(state, rows)
    lengths, counts = lengths[rows], counts[rows]
    for _ in range(2):
        at = (lengths[:, None] + torch.arange(4)).clamp(max=16)
        logits = head.commit(state, batch.features[rows[:, None], at], ids[rows[:, None], at + 1], counts)
        lengths = lengths + counts
        check(logits, lengths)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", [Chain(BLOCK - 1), Dynamic(3, 3, 9)], ids=["chain", "dynamic"])
def test_decodes_what_the_target_says(target, plan, temperature):
    settings = Settings(max_new_tokens=24, temperature=temperature, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9]]
    plain = Engine(target.model).generate(prompts, settings)
    fast = Engine(target.model, make(target, VOCABULARY), plan).generate(prompts, settings)
    assert [output.tokens for output in fast] == [output.tokens for output in plain]


def test_learns(target):
    head = make(target, weighting="none").train()
    batch = make_batch(head, target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        torch.manual_seed(0)
        out = head.loss(batch, target)
        out.total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(out.total.detach() / out.counts.sum()))
    assert losses[-1] < losses[0] - 0.5


def test_sampled_anchors(target):
    head = make(target, anchors=4).train()
    mask = torch.zeros(2, 40, dtype=torch.int64)
    mask[0, 10:30], mask[1, 5:8] = 1, 1
    anchors, valid = head.sample(mask)
    assert valid.sum(1).tolist() == [4, 2] and head.tokens(mask) == 6
    assert all(10 <= a < 29 for a in anchors[0].tolist()) and len(set(anchors[0].tolist())) == 4
    assert sorted(anchors[1][valid[1]].tolist()) == [5, 6]
    assert not torch.equal(head.sample(mask)[0], anchors)
    head.eval()
    assert torch.equal(head.sample(mask)[0], head.sample(mask)[0])


@pytest.mark.parametrize("teacher", ["distribution", "token"])
def test_nothing_to_train(target, teacher):
    head = make(target, teacher=teacher)
    batch = make_batch(head, target, mask=[[1, 0] + [0] * 11 + [1]] * 2)
    out = head.loss(batch, target)
    out.total.backward()
    assert out.total == 0 and not out.counts.any() and head.tokens(batch.loss_mask) == 0


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_saved_and_loaded(target, vocabulary, tmp_path):
    head = make(target, vocabulary)
    names = {name.split(".")[0] for name in head.state_dict()}
    assert names == {"fc", "hidden_norm", "layers", "norm"} | ({"token_map"} if vocabulary is not None else set())
    checkpoint.save_head(tmp_path / "head", head, "dflash", target)
    loaded = checkpoint.load_head(tmp_path / "head", target)
    assert loaded.max_depth == BLOCK - 1
    batch = make_batch(head, target)
    torch.testing.assert_close(loaded.loss(batch, target).total, head.loss(batch, target).total)


def test_default_layers():
    assert default_layers(36) == [2, 10, 18, 26, 34]
    assert default_layers(30) == [2, 8, 15, 22, 28]
    assert default_layers(3) == [1, 2] and default_layers(1) == [1]


def test_bad_input(target):
    assert DFlash.build(DFlashConfig(), target).config.mask_token == 0
    with pytest.raises(UserError, match="head.mask_token: -1 is no token of the target's 101"):
        DFlash.build(DFlashConfig(mask_token=-1), target)
    with pytest.raises(UserError, match="depth 4 is more than the draft's 3"):
        Engine(target.model, make(target), Chain(4))
