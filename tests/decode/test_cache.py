"""The cache: a committed path equals a prefill of the same tokens; rows of several lengths; growth; refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from decode.cache import TreeCache
from decode.errors import UserError
from decode.forward import Forward
from tests.tiny import VOCAB_SIZE, tiny_target

LAYERS, HEADS, DIM = 3, 2, 4
LLAMA = tiny_target("llama")


def numbered(tokens, layer, value):
    """K or V rows [B, Hkv, n, d] that name their token and layer."""
    rows = tokens[:, None, :, None].expand(-1, HEADS, -1, DIM).float()
    return rows + 1000 * layer + (0.5 if value else 0)


def write(cache, tokens, written=0):
    cache.open(tokens.shape[1], written)
    for layer in range(LAYERS):
        keys, values = cache.layers[layer].update(numbered(tokens, layer, False), numbered(tokens, layer, True))
        assert keys.shape == values.shape == (len(tokens), HEADS, cache.end, DIM)


def contents(cache):
    """Tokens in the committed slots of each row, after checking that all layers and heads agree."""
    rows = []
    for b, length in enumerate(cache.host_lengths):
        store = cache.store[:, :, b, :, :length]  # [layers, 2, Hkv, length, d]
        tokens = store[0, 0, 0, :, 0]
        expected = torch.stack([torch.stack([tokens + 1000 * i, tokens + 1000 * i + 0.5]) for i in range(LAYERS)])
        assert torch.equal(store, expected[:, :, None, :, None].expand_as(store))
        rows.append([int(x) for x in tokens])
    return rows


def filled(lengths, capacity=64):
    cache = TreeCache(LAYERS, len(lengths), capacity)
    prompt = torch.stack([torch.arange(max(lengths)) + 100 * b for b in range(len(lengths))])
    write(cache, prompt)
    cache.commit(prompt, list(lengths), moved=False)
    return cache


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.integers(1, 9),
    st.booleans(),
    st.randoms(),
)
def test_commit_keeps_the_path_in_order(lengths, n, same, random):
    """Sources and targets overlap whenever a path skips a node and goes on."""
    if same:
        lengths = [lengths[0]] * len(lengths)
    cache = filled(lengths)
    nodes = torch.stack([torch.arange(n) + 500 + 50 * b for b in range(len(lengths))])
    write(cache, nodes)
    paths = [[0, *sorted(random.sample(range(1, n), random.randint(0, n - 1)))] for _ in lengths]
    width = max(map(len, paths))
    padded = torch.tensor([path + [-1] * (width - len(path)) for path in paths])
    cache.commit(padded, [len(path) for path in paths])
    expected = [
        [100 * b + i for i in range(length)] + [500 + 50 * b + node for node in paths[b]]
        for b, length in enumerate(lengths)
    ]
    assert contents(cache) == expected
    assert cache.lengths.tolist() == cache.host_lengths == [len(row) for row in expected]


def test_ascending_moves_without_a_copy_would_be_wrong():
    """Negative control: descending in-place moves overwrite rows before they are read."""
    cache = filled([2])
    write(cache, torch.arange(6)[None] + 500)
    store = cache.store.clone()
    for target, source in reversed(list(enumerate([0, 2, 3, 5]))):
        store[..., 2 + target, :] = store[..., 2 + source, :]
    cache.commit(torch.tensor([[0, 2, 3, 5]]), [4])
    assert contents(cache) == [[0, 1, 500, 502, 503, 505]]
    assert not torch.equal(store[..., :6, :], cache.store[..., :6, :])


@pytest.mark.parametrize("lengths", [[5], [5, 5], [5, 9, 2]], ids=["one", "equal", "ragged"])
def test_levels_of_one_step_land_behind_each_other(lengths):
    cache = filled(lengths)
    batch = len(lengths)
    write(cache, torch.tensor([[700, 701]]).expand(batch, 2))
    write(cache, torch.tensor([[702, 703, 704]]).expand(batch, 3), written=2)
    cache.commit(torch.tensor([[0, 3]]).expand(batch, 2), [2] * batch)
    for b, row in enumerate(contents(cache)):
        assert row == [100 * b + i for i in range(lengths[b])] + [700, 703]


def test_select_keeps_rows_and_their_lengths():
    cache = filled([5, 9, 2])
    cache.select(torch.tensor([2, 0]))
    assert cache.host_lengths == [2, 5]
    assert contents(cache) == [[200, 201], [0, 1, 2, 3, 4]]
    write(cache, torch.tensor([[800], [801]]))
    cache.commit(torch.tensor([[0], [0]]), [1, 1])
    assert contents(cache) == [[200, 201, 800], [0, 1, 2, 3, 4, 801]]


def test_capacity_grows_and_keeps_what_it_holds():
    cache = filled([60])
    assert cache.capacity == 64
    write(cache, torch.arange(10)[None] + 500)
    assert cache.capacity == 128
    cache.commit(torch.arange(10)[None], [10], moved=False)
    write(cache, torch.arange(100)[None] + 600)
    cache.commit(torch.arange(100)[None], [100], moved=False)
    assert cache.capacity == 256
    assert contents(cache) == [[*range(60), *range(500, 510), *range(600, 700)]]


def test_committed_tree_equals_a_prefill_of_its_path():
    """The model's own K and V, one row and several: root, two branches, the second kept."""
    for lengths in ([13], [13, 13], [13, 4, 1]):
        forward = Forward(LLAMA)
        batch = len(lengths)
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(3, VOCAB_SIZE, (batch, max(lengths)), generator=generator)
        cache = forward.new_cache(batch, 40)
        with torch.no_grad():
            forward.prompt(cache, prompt, lengths)
            tokens = torch.randint(3, VOCAB_SIZE, (batch, 5), generator=generator)  # 0 -> 1, 0 -> 2 -> 3 -> 4
            depths = torch.tensor([0, 1, 1, 2, 3]).expand(batch, 5)
            ancestors = torch.eye(5, dtype=torch.bool)
            ancestors[:, 0] = ancestors[3:, 2] = ancestors[4:, 3] = True
            forward(cache, tokens, depths, ancestors.expand(batch, 5, 5))
            path = torch.tensor([[0, 2, 3, 4]] * batch)
            counts = [4, 2, 3][:batch]
            cache.commit(path, counts)
            for b, length in enumerate(lengths):
                row = torch.cat([prompt[b, :length], tokens[b, path[b, : counts[b]]]])[None]
                other = forward.new_cache(1, 40)
                forward.prompt(other, row, [row.shape[1]])
                kept = cache.store[:, :, b : b + 1, :, : row.shape[1]]
                assert torch.allclose(kept, other.store[..., : row.shape[1], :], atol=1e-5), f"row {b} of {lengths}"
                wrong = cache.store[:, :, b : b + 1, :, : row.shape[1] - 1]
                assert not torch.allclose(wrong, other.store[..., 1 : row.shape[1], :], atol=1e-3)


@pytest.mark.parametrize(("family", "kind"), [("mamba", "linear_attention"), ("lfm2", "conv")])
def test_recurrent_and_hybrid_targets_are_refused_by_name(family, kind):
    common = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50, "intermediate_size": 32}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    extra = {"state_size": 4} if family == "mamba" else attention
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **common, **extra))
    with pytest.raises(UserError, match=f"{family} has layers of type {kind}, which cannot be rolled back"):
        Forward(model)


def test_layers_of_other_shapes_are_refused():
    cache = TreeCache(2, 1, 64)
    cache.open(1)
    cache.write(0, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    with pytest.raises(UserError, match="layer 1 caches keys"):
        cache.write(1, torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4))
