"""Captured boundaries are transformers' `hidden_states`."""

import pytest
import torch

from decode.capture import Capture, find_layers
from tests.tiny import FAMILIES, tiny_target


def ids_of(batch: int = 2, length: int = 25) -> torch.Tensor:
    return torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_boundary(family):
    model = tiny_target(family)
    depth = len(find_layers(model))
    assert depth == model.config.num_hidden_layers
    order = [depth, *range(depth)]  # the order asked for is the order given
    with torch.no_grad(), Capture(model, order) as capture:
        out = model(ids_of(), output_hidden_states=True)
        states = capture.take()
    assert torch.equal(states, torch.cat([out.hidden_states[b] for b in order], -1))
    # Negative control: neighbouring boundaries differ.
    width = model.config.hidden_size
    parts = states.split(width, -1)
    assert not any(torch.allclose(parts[i], parts[j]) for i in range(depth + 1) for j in range(i))


def test_the_last_boundary_is_behind_the_final_norm():
    model = tiny_target("llama")
    with torch.no_grad(), Capture(model, [2]) as capture:
        logits = model(ids_of()).logits
        torch.testing.assert_close(model.lm_head(capture.take()), logits)


def test_last_forward_counts_and_is_forgotten():
    model = tiny_target("llama")
    with torch.no_grad(), Capture(model, [1]) as capture:
        model(ids_of(1, 4))
        model(ids_of(1, 6))
        assert capture.take().shape == (1, 6, 32)
        with pytest.raises(KeyError):
            capture.take()


def test_leaves_no_hooks():
    model = tiny_target("llama")
    before = model(ids_of()).logits
    with pytest.raises(RuntimeError, match="stop"), Capture(model, [0, 2]) as capture:
        raise RuntimeError("stop")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not capture._states
    assert torch.equal(model(ids_of()).logits, before)


@pytest.mark.parametrize("boundary", [-1, 3])
def test_boundary_outside(boundary):
    model = tiny_target("llama")
    with pytest.raises(AssertionError, match=f"boundary {boundary} is outside"), Capture(model, [0, boundary]):
        pass
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_no_boundaries():
    model = tiny_target("llama")
    with Capture(model, []):
        model(ids_of())
