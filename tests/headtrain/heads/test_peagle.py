"""P-EAGLE: the elements of a step, what each sees, and drafting equal to the training forward."""

import pytest
import torch

from decode.engine import Engine
from decode.errors import UserError
from decode.settings import Settings
from decode.tree import Chain, Dynamic
from headtrain import checkpoint
from headtrain.heads.peagle import PEagle, PEagleConfig
from tests.headtrain.heads.rows import VOCABULARY, make_batch, make_head, make_target

DEPTHS = 4
MASK = [[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1], [1] * 12]


@pytest.fixture(scope="module")
def target():
    return make_target()


def make(target, vocabulary=None, **config):
    return make_head("peagle", target, vocabulary, **{"depths": DEPTHS, "decoder_layers": 2, **config})


def element_logits(head, batch, b, a, d):
    """Logits of element (a, d) alone: the slots up to its anchor and its own depths as one causal row, dense attention."""
    g, dtype = head.g, head.fc.weight.dtype
    tokens = [*batch.input_ids[b, 1 : a + 2].tolist(), *[head.mask_token] * d]
    features = torch.cat([batch.features[b, : a + 1].to(dtype), head.mask_hidden[0].expand(d, -1)])
    u = features @ head.fc.weight.T
    cos, sin = head.rotary(u[None], torch.arange(a + 1 + d)[None])
    u = u[None]

    def attend(q, k, v):
        k, v = (x.repeat_interleave(g.num_heads // g.num_kv_heads, 1) for x in (k, v))
        scores = q @ k.mT * g.head_dim**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return torch.softmax(scores.masked_fill(future, -torch.inf), -1) @ v

    embedding = head.embedding(torch.tensor([tokens])).to(dtype)
    u = head.layers[0].finish(u, attend(*head.layers[0].project(embedding, u, (cos, sin))))
    for layer in head.layers[1:]:
        u = layer.finish(u, attend(*layer.project(u, (cos, sin))))
    return head.lm_head(head.norm(u[0, -1]))


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["whole", "reduced"])
def test_loss_is_that_of_each_element_by_itself(target, vocabulary):
    head = make(target, vocabulary, decay=0.5).double()
    batch = make_batch(head, target, length=12, mask=MASK)
    out = head.loss(batch, target)
    columns = torch.arange(101) if vocabulary is None else vocabulary
    anchors, depths, valid = head.sample(batch.loss_mask)
    expected, counts = torch.zeros((), dtype=torch.float64), [0] * DEPTHS
    for b, i in valid.nonzero().tolist():
        a, d = int(anchors[b, i]), int(depths[b, i])
        if a + d + 2 < 12 and batch.loss_mask[b, a + d + 2]:
            log_q = torch.log_softmax(element_logits(head, batch, b, a, d), -1)
            p = torch.softmax(target.logits(batch.hidden[b, a + d + 1])[columns].double(), -1)
            expected = expected - 0.5**d * (p * log_q).sum()
            counts[d] += 1
    torch.testing.assert_close(out.total.double(), expected, rtol=1e-5, atol=1e-4)
    assert out.counts.tolist() == counts and min(counts) > 0
    names, parameters = zip(*head.named_parameters(), strict=True)
    grads = [torch.autograd.grad(x, parameters) for x in (out.total, expected)]
    for name, ours, theirs in zip(names, *grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


@torch.no_grad()
def test_an_element_sees_no_other_anchor(target):
    """Negative control: with the features behind its anchor changed an element stays, with its own changed it does not."""
    head = make(target, keep=1.0)
    batch = make_batch(head, target, rows=1, length=12)
    anchors, depths, valid = head.sample(batch.loss_mask)
    before = head.run_elements(batch, anchors, depths, valid)
    batch.features[:, 5:] += 1
    batch.input_ids[:, 6:] = 3
    moved = (head.run_elements(batch, anchors, depths, valid) - before).abs().amax(-1)
    assert moved[anchors < 5].max() < 1e-4 and moved[anchors >= 5].min() > 1e-3


def test_sampled_elements(target):
    head = make(target, depths=5, keep=0.8, keep_least=0.2).train()
    mask = torch.zeros(1, 103, dtype=torch.int64)
    mask[:, 22:82] = 1  # slots 20..79
    anchors, depths, valid = head.sample(mask)
    assert valid.all() and anchors[depths == 0].tolist() == list(range(102))
    for d in range(1, 5):
        found = anchors[depths == d]
        assert len(found) == int((60 - d) * 0.8**d)
        assert set(found.tolist()) <= set(anchors[depths == d - 1].tolist())
        assert ((found + d >= 20) & (found + d < 80)).all()
    assert not torch.equal(head.sample(mask)[0], anchors)
    head.eval()
    assert torch.equal(head.sample(mask)[0], head.sample(mask)[0])
    short = torch.ones(1, 3, dtype=torch.int64)
    assert head.sample(short)[0].shape == (1, 2)


@pytest.mark.parametrize("depths", [1, DEPTHS])
@torch.no_grad()
def test_drafting_is_the_training_forward(target, depths):
    head = make(target, VOCABULARY, depths=depths)
    batch = make_batch(head, target, rows=3, length=18)
    ids, lengths, counts = batch.input_ids, torch.tensor([9, 5, 7]), torch.tensor([1, 4, 2])
    rows = torch.arange(3)
    state, logits = head.begin(batch.features[:, :9], ids[:, :10], lengths, 40)

    def check(logits, last):
        for d in range(depths):
            if d:
                logits = head.extend(state, torch.zeros(3, 1, dtype=torch.int64), torch.full((3, 1), d - 1))
            for place, (b, a) in enumerate(zip(rows.tolist(), last.tolist(), strict=True)):
                expected = element_logits(head, batch, b, a, d)
                torch.testing.assert_close(logits[place, 0], expected, rtol=1e-3, atol=1e-4)
                assert (logits[place, 0] - element_logits(head, batch, b, a - 1, d)).abs().max() > 0.01

    check(logits, lengths - 1)
    rows = torch.tensor([2, 0, 1])
    head.select(state, rows)
    lengths, counts = lengths[rows], counts[rows]
    for _ in range(2):
        at = (lengths[:, None] + torch.arange(4)).clamp(max=16)
        logits = head.commit(state, batch.features[rows[:, None], at], ids[rows[:, None], at + 1], counts)
        lengths = lengths + counts
        check(logits, lengths - 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", [Chain(DEPTHS), Dynamic(3, 3, 9)], ids=["chain", "dynamic"])
def test_decodes_what_the_target_says(target, plan, temperature):
    settings = Settings(max_new_tokens=24, temperature=temperature, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9]]
    plain = Engine(target.model).generate(prompts, settings)
    fast = Engine(target.model, make(target, VOCABULARY), plan).generate(prompts, settings)
    assert [output.tokens for output in fast] == [output.tokens for output in plain]


def test_learns(target):
    head = make(target).train()
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


def test_nothing_to_train(target):
    head = make(target)
    batch = make_batch(head, target, mask=[[1, 1] + [0] * 12] * 2)
    out = head.loss(batch, target)
    out.total.backward()
    assert out.total == 0 and not out.counts.any()


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_saved_and_loaded(target, vocabulary, tmp_path):
    head = make(target, vocabulary)
    names = {name.split(".")[0] for name in head.state_dict()}
    assert names == {"fc", "layers", "mask_hidden", "norm", "lm_head", "d2t", "t2d"}
    assert "layers.0.hidden_norm.weight" in head.state_dict() and "layers.1.hidden_norm.weight" not in head.state_dict()
    checkpoint.save_head(tmp_path / "head", head, "peagle", target)
    loaded = checkpoint.load_head(tmp_path / "head", target)
    batch = make_batch(head, target)
    torch.testing.assert_close(loaded.loss(batch, target).total, head.loss(batch, target).total)


def test_mask_token(target):
    assert PEagle.build(PEagleConfig(vocabulary=None), target).config.mask_token == 0
    with pytest.raises(UserError, match="head.mask_token: 101 is no token of the target's 101"):
        PEagle.build(PEagleConfig(vocabulary=None, mask_token=101), target)
