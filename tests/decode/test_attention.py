"""Tree attention against plain causal attention of every path, poisoned slots, windows by position, node order."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.attention import NAME, Visibility, attend, attend_guarded, forward, tree_attention
from decode.forward import Forward
from tests.tiny import FAMILIES, VOCAB_SIZE, tiny_target

TREE = [-1, 0, 0, 1, 1, 2, 3, 6]  # parents; depths 0 1 1 2 2 2 3 4
HQ, HKV, DIM = 4, 2, 8


def shape_of(parents):
    """depths [n] and ancestors [n, n] of a parent list."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for v in range(1, len(parents)):
        ancestors[v] |= ancestors[parents[v]]
    return ancestors.sum(-1) - 1, ancestors


def naive(query, key, value, length, depths, ancestors, window=None, softcap=None, sinks=None):
    """One row, node by node in float64. query [Hq, n, d], key and value [Hkv, S, d] -> [Hq, n, d]."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    for h in range(query.shape[0]):
        k, v = key[h // (HQ // HKV)].double(), value[h // (HQ // HKV)].double()
        for node in range(query.shape[1]):
            position = length + int(depths[node])
            slots = [s for s in range(length) if window is None or position - s < window]
            for u in range(len(depths)):
                if ancestors[node, u] and (window is None or position - length - int(depths[u]) < window):
                    slots.append(length + u)
            scores = query[h, node].double() @ k[slots].T / math.sqrt(DIM)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks[h : h + 1].double()])
            weights = torch.softmax(scores, 0)[: len(slots)]
            out[h, node] = weights @ v[slots]
    return out


def inputs(lengths, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    end = max(lengths) + n
    query = torch.randn(len(lengths), n, HQ, DIM, generator=generator).transpose(1, 2)
    key, value = (torch.randn(len(lengths), HKV, end + 3, DIM, generator=generator)[:, :, :end] for _ in range(2))
    return query, key, value


def visibility(lengths, depths, ancestors):
    start = lengths[0] if len(set(lengths)) == 1 else None
    end = max(lengths) + depths.shape[-1]
    return Visibility(torch.tensor(lengths), depths, ancestors, start, end)


def run(query, key, value, tree, **options):
    out, weights = forward(None, query, key, value, None, tree=tree, scaling=DIM**-0.5, **options)
    assert weights is None
    return out.transpose(1, 2)


@pytest.mark.parametrize("lengths", [[0], [1], [9], [9, 9], [9, 0, 4]], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 1}, {"sliding_window": 3}, {"sliding_window": 8}, {"softcap": 2.0}, {"s_aux": True}],
    ids=["full", "window1", "window3", "window8", "softcap", "sinks"],
)
def test_equals_the_naive_form(lengths, options):
    depths, ancestors = shape_of(TREE)
    query, key, value = inputs(lengths, len(TREE))
    options = dict(options)
    if "s_aux" in options:
        options["s_aux"] = torch.randn(HQ, generator=torch.Generator().manual_seed(3))
    tree = visibility(lengths, depths.expand(len(lengths), -1), ancestors.expand(len(lengths), -1, -1))
    out = run(query, key, value, tree, **options)
    for b, length in enumerate(lengths):
        other = {"window": options.get("sliding_window"), "softcap": options.get("softcap")}
        expected = naive(query[b], key[b], value[b], length, depths, ancestors, sinks=options.get("s_aux"), **other)
        assert torch.allclose(out[b].double(), expected, atol=1e-5)


def test_the_naive_form_sees_one_visible_node_too_many():
    """Negative control: a mask that shows a sibling fails."""
    depths, ancestors = shape_of(TREE)
    query, key, value = inputs([9], len(TREE))
    wrong = ancestors.clone()
    wrong[2, 1] = True
    out = run(query, key, value, visibility([9], depths[None], wrong[None]))
    expected = naive(query[0], key[0], value[0], 9, depths, ancestors)
    same = torch.isclose(out[0].double(), expected, atol=1e-5).all(-1).all(0)
    assert same.tolist() == [v != 2 for v in range(len(TREE))]


def test_windows_by_slot_would_be_wrong():
    """Negative control: in a tree, slots run ahead of positions."""
    depths, ancestors = shape_of(TREE)
    query, key, value = inputs([9], len(TREE))
    by_slot = visibility([9], torch.arange(len(TREE))[None], ancestors[None])
    expected = naive(query[0], key[0], value[0], 9, depths, ancestors, window=3)
    assert not torch.allclose(run(query, key, value, by_slot, sliding_window=3)[0].double(), expected, atol=1e-2)


@pytest.mark.parametrize("window", [None, 5])
def test_one_level_at_a_time(window):
    """The last m nodes as queries: what a draft model runs."""
    depths, ancestors = shape_of(TREE)
    query, key, value = inputs([9, 4], len(TREE))
    whole = run(query, key, value, visibility([9, 4], depths.expand(2, -1), ancestors.expand(2, -1, -1)))
    for first, last in ((0, 1), (1, 3), (3, 6), (6, 7), (7, 8)):
        tree = visibility([9, 4], depths[:last].expand(2, -1), ancestors[first:last, :last].expand(2, -1, -1))
        level = run(query[:, :, first:last], key[:, :, : tree.end], value[:, :, : tree.end], tree)
        assert torch.allclose(level, whole[:, :, first:last], atol=1e-5)


@pytest.mark.parametrize("n", [1, 7, 300])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"softcap": 2.0}], ids=["full", "window", "softcap"])
def test_prompts_are_causal(n, options):
    query, key, value = inputs([0, 0], n)
    out = run(query, key, value, visibility([0, 0], torch.arange(n).expand(2, -1), None), **options)
    depths, ancestors = torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril()
    chain = visibility([0, 0], depths.expand(2, -1), ancestors.expand(2, -1, -1))
    assert torch.allclose(out, run(query, key, value, chain, **options), atol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"softcap": 2.0}], ids=["full", "window", "softcap"])
def test_invisible_slots_may_hold_anything(poison, options):
    """Per node: every slot it may not see is poisoned, in K and V."""
    depths, ancestors = shape_of(TREE)
    lengths = [9, 4]
    query, key, value = inputs(lengths, len(TREE))
    tree = visibility(lengths, depths.expand(2, -1), ancestors.expand(2, -1, -1))
    clean = run(query, key, value, tree, **options)
    visible = tree.visible(options.get("sliding_window"))
    tree.guarded = True
    for node in range(len(TREE)):
        hidden = ~visible[:, node, None, :, None]
        out = run(query, key.masked_fill(hidden, poison), value.masked_fill(hidden, poison), tree, **options)
        assert torch.allclose(out[:, :, node], clean[:, :, node], atol=1e-5)


def test_a_visible_nan_still_shows():
    depths, ancestors = shape_of(TREE)
    query, key, value = inputs([9], len(TREE))
    tree = visibility([9], depths[None], ancestors[None])
    tree.guarded = True
    value = value.clone()
    value[:, :, 9 + 3] = math.nan
    bad = run(query, key, value, tree)[0].isnan().all(-1).all(0)
    assert bad.tolist() == ancestors[:, 3].tolist()
    query, key, value = inputs([9], 1)
    key = key.clone()
    key[:, :, 2] = math.nan
    assert attend_guarded(query, key, value, None, 1.0).isnan().all()
    assert attend(query, key, value, None, 1.0).isnan().all()


def test_a_poisoned_cache_changes_no_logits():
    """The whole forward: NaN in the stale slots of a shorter row, which the engine leaves behind after a rejection."""
    model = tiny_target("llama")
    target = Forward(model)
    prompt = torch.randint(3, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(0))
    logits = []
    for poison in (0.0, math.nan):
        cache = target.new_cache(2, 32)
        with torch.no_grad():
            target.prompt(cache, prompt, [12, 5])
            cache.store[:, :, 1, :, 5:] = poison
            depths, ancestors = shape_of([-1, 0, 0])
            step = prompt[:, :3], depths.expand(2, -1), ancestors.expand(2, -1, -1)
            logits.append(target(cache, *step)[0])
    assert torch.allclose(logits[0], logits[1], atol=1e-5) and not logits[1].isnan().any()


def path_logits(model, prompt, tokens, parents):
    """Logits of every node from a plain causal forward of its own path; model's own attention, no cache."""
    rows = []
    for v in range(len(parents)):
        path, u = [], v
        while u >= 0:
            path.append(int(tokens[u]))
            u = parents[u]
        rows.append(model(torch.tensor([prompt + path[::-1]])).logits[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_equals_a_plain_forward(family):
    """All families, rows of different lengths in one batch, longer than the sliding windows."""
    model = tiny_target(family)
    target = Forward(model)
    generator = torch.Generator().manual_seed(2)
    lengths = [31, 1, 14]
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    tokens = torch.randint(3, VOCAB_SIZE, (3, len(TREE)), generator=generator)
    depths, ancestors = shape_of(TREE)
    padded = torch.tensor([row + [0] * (31 - len(row)) for row in prompts])
    before = model.config._attn_implementation
    with torch.no_grad():
        cache = target.new_cache(3, 48)
        last, _ = target.prompt(cache, padded, lengths)
        logits, _ = target(cache, tokens, depths.expand(3, -1), ancestors.expand(3, -1, -1))
        for b, prompt in enumerate(prompts):
            assert torch.allclose(last[b, 0], model(torch.tensor([prompt])).logits[0, -1], atol=2e-4)
            expected = path_logits(model, prompt, tokens[b], TREE)
            assert torch.allclose(logits[b], expected, atol=2e-4), f"{family} row {b}"
    assert model.config._attn_implementation == before


@st.composite
def trees(draw):
    parents = [-1]
    for v in range(1, draw(st.integers(2, 10))):
        parents.append(draw(st.integers(0, v - 1)))
    return parents


@settings(max_examples=25, deadline=None)
@given(trees(), st.integers(1, 20), st.sampled_from(["llama", "mistral"]), st.randoms())
def test_node_order_does_not_matter(parents, length, family, random):
    """Any order of the nodes behind the root gives each the same logits; so does poison in all foreign slots."""
    model = MODELS[family]
    target = Forward(model)
    n = len(parents)
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(3, VOCAB_SIZE, (1, length), generator=generator)
    tokens = torch.randint(3, VOCAB_SIZE, (1, n), generator=generator)
    depths, ancestors = shape_of(parents)
    order = [0, *random.sample(range(1, n), n - 1)]
    with torch.no_grad():
        cache = target.new_cache(1, length + n)
        target.prompt(cache, prompt, [length])
        a, _ = target(cache, tokens, depths[None], ancestors[None])
        b, _ = target(cache, tokens[:, order], depths[None, order], ancestors[order][:, order][None])
    assert torch.allclose(a[:, order], b, atol=2e-4)


MODELS = {family: tiny_target(family) for family in ("llama", "mistral")}


def test_ordinary_forwards_keep_their_own_attention():
    """Outside of a step nothing changes, bit for bit; after an error inside neither."""
    model = tiny_target("llama")
    ids = torch.arange(3, 40)[None]
    before = model(ids).logits
    with pytest.raises(RuntimeError, match="inside"), tree_attention(model):
        assert model.config._attn_implementation == NAME
        raise RuntimeError("inside")
    assert model.config._attn_implementation == "sdpa"
    Forward(model).prompt(Forward(model).new_cache(1, 64), ids, [37])
    assert torch.equal(model(ids).logits, before)


def test_words_are_the_ancestor_bits():
    parents = [-1, *range(99)]
    depths, ancestors = shape_of(parents)
    words = visibility([3], depths[None], ancestors[None]).bits()[0]
    assert words.shape == (1, 100, 2)
    for v in (0, 1, 62, 63, 64, 99):
        bits = sum(1 << int(j) for j in ancestors[v].nonzero()[:, 0])
        low, high = (int(word) & (2**64 - 1) for word in words[0, v])
        assert low == bits & (2**64 - 1) and high == bits >> 64
