import pytest
import torch

from decode.engine import Engine
from decode.errors import UserError
from decode.settings import Settings
from decode.tree import Dynamic
from headtrain import checkpoint
from headtrain.heads import eagle3
from headtrain.heads.eagle3 import default_layers
from headtrain.recipe import Recipe
from tests.headtrain.heads.rows import VOCABULARY, make_batch, make_head, make_target
from tests.headtrain.test_recurrent import drafted

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


def rms(x, norm):
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def by_hand(head, target, batch):
    """The documented choices, slot by slot in float64: total, counts of each step, and the divisor."""
    c, g, layer = head.config, head.g, head.midlayer
    ids, mask, length = batch.input_ids, batch.loss_mask, batch.input_ids.shape[1]
    columns = torch.arange(101) if head.vocabulary is None else head.vocabulary
    parts = batch.features.double().split(g.hidden, -1)
    if c.fusion_norm == "each":
        parts = [rms(part, norm) for part, norm in zip(parts, head.fc_norm, strict=True)]
    fused = torch.cat(list(parts), -1)
    if c.fusion_norm == "joint":
        fused = rms(fused, head.input_norm)
    fused = fused @ head.fc.weight.T
    total, counts = torch.zeros((), dtype=torch.float64), [0] * c.steps
    back = {"predicted": 0, "consumed": 1, "unshifted": 2}[c.mask]
    for b in range(len(ids)):
        last = int(mask[b].nonzero().max())
        rotated = [head.rotary(fused, torch.tensor([[i]])) for i in range(length + c.steps)]
        first = []
        for t in range(length - 1):
            own, u = [], fused[b, t]
            for k in range(c.steps):
                if t + 1 + k > length - 1:
                    break
                embedding = head.embedding(ids[b, t + 1 + k]).double()
                x = torch.cat([rms(embedding, layer.input_layernorm), rms(u, layer.hidden_norm)])[None, None]
                q, key, value = (x[0, :, 0] for x in layer.self_attn.project(x, rotated[t + k]))
                spread = [x.repeat_interleave(g.num_heads // g.num_kv_heads, 0) for x in (key, value)]
                own.append(spread)
                if k == 0:
                    first.append(spread)
                keys, values = (torch.stack(x) for x in zip(*first, *own[1:], strict=True))
                p = torch.softmax((keys * q).sum(-1) * g.head_dim**-0.5, 0)
                residual = rms(u, layer.hidden_norm) if c.normed_residual else u
                state = layer.finish(residual[None, None], (p[..., None] * values).sum(0)[None, :, None])[0, 0]
                normed = rms(state, head.norm)
                u = normed if c.feedback == "normed" else state
                at = t + 2 + k - back  # the token whose mask counts
                if not (0 <= at < length) or not mask[b, at] or t + 1 + k > last:
                    continue
                z = target.logits(batch.hidden[b, t + 1 + k])
                if c.outside == "drop" and int(z.argmax()) not in columns:
                    continue
                log_q = torch.log_softmax(head.lm_head.weight @ normed, -1)
                total = total - c.decay**k * (torch.softmax(z[columns].double(), -1) * log_q).sum()
                counts[k] += 1
    teachers = (
        mask[:, 2:]
        if back == 0
        else mask[:, 1:]
        if back == 1
        else mask[:, :-1] * mask[:, 1:].flip(1).cummax(1)[0].flip(1)
    )
    return total, counts, ids.numel() if c.normaliser == "all" else int(teachers.sum())


REPLY = [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
CHOICES = {
    "eagle": {"preset": "eagle", "steps": 3},
    "speculators": {"preset": "speculators"},
    "modelopt": {"preset": "modelopt"},
    "eagle3.1": {"preset": "eagle3.1", "steps": 3},
}


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["whole", "reduced"])
@pytest.mark.parametrize("name", CHOICES)
def test_presets_are_what_they_are_documented_to_be(target, name, vocabulary):
    head = make_head("eagle3", target, vocabulary, **CHOICES[name]).double()
    batch = make_batch(head, target, length=12, mask=REPLY)
    out = head.loss(batch, target)
    total, counts, tokens = by_hand(head, target, batch)
    torch.testing.assert_close(out.total.double(), total, rtol=1e-5, atol=1e-4)
    assert out.counts.tolist() == counts and int(head.tokens(batch.loss_mask)) == tokens
    trained = {n: p for n, p in head.named_parameters() if p.requires_grad}
    grads = [torch.autograd.grad(x, list(trained.values())) for x in (out.total, total)]
    for parameter, ours, expected in zip(trained, *grads, strict=True):
        torch.testing.assert_close(ours, expected.to(ours.dtype), rtol=1e-3, atol=1e-4, msg=parameter)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64], ids=str)
def test_the_divisor_of_a_long_row(target, dtype):
    mask = torch.ones(1, 300, dtype=dtype)
    assert int(make_head("eagle3", target, **CHOICES["eagle"]).tokens(mask)) == 300
    assert int(make_head("eagle3", target, normaliser="trained").tokens(mask)) == 298


@pytest.mark.parametrize("change", [{"mask": "predicted"}, {"outside": "keep"}, {"decay": 0.5}], ids=str)
def test_another_choice_is_seen(target, change):
    """Negative control of the test above: each choice matters here."""
    settings = {**CHOICES["eagle"], "mask": "unshifted", "outside": "drop"}
    head, other = (make_head("eagle3", target, VOCABULARY, **{**settings, **c}) for c in ({}, change))
    batch = make_batch(head, target, length=12, mask=REPLY)
    assert abs(head.loss(batch, target).total - other.loss(batch, target).total) > 0.1


def test_keys_beside_a_preset_win_and_are_kept():
    config = eagle3.Eagle3Config(preset="speculators", steps=5, feedback="raw")
    assert (config.steps, config.feedback, config.fusion_norm, config.decay) == (5, "raw", "joint", 1.0)
    assert eagle3.Eagle3Config(**config.model_dump()) == config
    assert eagle3.Eagle3Config(preset="eagle").normaliser == "all" and eagle3.Eagle3Config().normaliser == "trained"
    assert eagle3.Eagle3Config(preset="modelopt").lm_head == "frozen"
    assert eagle3.Eagle3Config(preset="modelopt", vocabulary=50).lm_head == "copied"


def test_a_preset_that_is_not_there(tmp_path):
    (tmp_path / "chats.jsonl").write_text("{}")
    raw = {"target": {"model": str(tmp_path)}, "data": {"train": str(tmp_path / "chats.jsonl")}, "output": "run"}
    with pytest.raises(UserError, match="head.preset"):
        Recipe.from_dict({**raw, "head": {"family": "eagle3", "preset": "speculator"}})


def test_lm_head_is_frozen_copied_or_random(target):
    heads = {
        how: eagle3.Eagle3.build(eagle3.Eagle3Config(lm_head=how), target) for how in ("frozen", "copied", "random")
    }
    same = {how: torch.equal(head.lm_head.weight, target.lm_head_weight) for how, head in heads.items()}
    assert same == {"frozen": True, "copied": True, "random": False}
    assert [head.lm_head.weight.requires_grad for head in heads.values()] == [False, True, True]
    before = heads["frozen"]
    batch = make_batch(before, target)
    before.loss(batch, target).total.backward()
    assert before.lm_head.weight.grad is None and before.fc.weight.grad is not None


@pytest.mark.parametrize("name", ["speculators", "eagle3.1"])
@torch.no_grad()
def test_presets_draft_as_they_train(target, name, tmp_path):
    head = make_head("eagle3", target, VOCABULARY, preset=name)
    checkpoint.save_head(tmp_path / "head", head, "eagle3", target)
    head = checkpoint.load_head(tmp_path / "head", target)
    batch = make_batch(head, target, rows=2, length=18)
    trained = head.logits(torch.stack(head.unroll(batch, STEPS)))
    for step, b, slot, logits in drafted(head, batch, [9, 5], [1, 4]):
        torch.testing.assert_close(logits, trained[step, b, slot], rtol=1e-3, atol=1e-4)
    settings = Settings(max_new_tokens=16, temperature=0.7, ignore_eos=True)
    plain = Engine(target.model).generate([[5, 6, 7], [9]], settings)
    fast = Engine(target.model, head, Dynamic(3, 2, 6)).generate([[5, 6, 7], [9]], settings)
    assert [x.tokens for x in fast] == [x.tokens for x in plain]


def test_only_the_aligned_mask_packs(target):
    assert make_head("eagle3", target, steps=2).packs() and not make_head("eagle3", target, preset="modelopt").packs()
