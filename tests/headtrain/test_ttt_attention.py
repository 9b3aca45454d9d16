import pytest
import torch

from headtrain.ttt_attention import ttt_attention, ttt_attention_reference

B, HEADS, DIM = 2, 3, 16


def case(num_slots: int, extra: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(B, HEADS, num_slots, DIM, generator=g) for _ in range(2 * extra + 4)]
    q, grad, *rest = tensors
    return q, rest[: extra + 1], rest[extra + 1 :], grad


def run(function, q, keys, values, grad, dtype=torch.float32):
    """Output and gradients of q, keys and values, in float64."""
    leaves = [x.to(dtype).requires_grad_() for x in (q, *keys, *values)]
    q, keys, values = leaves[0], leaves[1 : 1 + len(keys)], leaves[1 + len(keys) :]
    out = function(q, keys, values, DIM**-0.5)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype)))]


def error(found, expected) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("num_slots", [1, 7, 63])
@pytest.mark.parametrize("extra", range(6))
def test_equals_the_loop_of_the_paper(num_slots, extra):
    arguments = case(num_slots, extra)
    expected = run(ttt_attention_reference, *arguments, dtype=torch.float64)
    assert error(run(ttt_attention, *arguments), expected) < 2e-5
    rounded = run(ttt_attention_reference, *arguments, dtype=torch.bfloat16)
    # as exact as the reference is in the same precision, up to the rounding of the stored output
    assert error(run(ttt_attention, *arguments, dtype=torch.bfloat16), expected) < 2 * error(rounded, expected) + 0.05


@pytest.mark.parametrize("extra", [1, 4])
def test_large_logits_stay_finite(extra):
    q, keys, values, grad = case(7, extra)
    arguments = 40 * q, keys, values, grad
    expected = run(ttt_attention_reference, *arguments, dtype=torch.float64)
    assert error(run(ttt_attention, *arguments), expected) < 5e-3


def causal_over_all(q, keys, values, scale):
    """Wrong: every step's keys are seen by all later slots."""
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().repeat(1, len(keys))
    return torch.nn.functional.scaled_dot_product_attention(
        q, torch.cat(keys, 2), torch.cat(values, 2), mask, scale=scale
    )


def own_only_last(q, keys, values, scale):
    """Wrong: forgets the steps between the first and the last."""
    return ttt_attention_reference(q, [keys[0], keys[-1]], [values[0], values[-1]], scale) + 0 * sum(keys + values)


@pytest.mark.parametrize("wrong", [causal_over_all, own_only_last])
def test_wrong_attention_is_seen(wrong):
    arguments = case(7, 3)
    assert error(run(wrong, *arguments), run(ttt_attention_reference, *arguments)) > 0.1


def test_later_slots_are_not_seen():
    q, keys, values, _ = case(9, 2)
    out = ttt_attention(q, keys, values, DIM**-0.5)
    for x in (*keys, *values):
        x[:, :, 5:] += 1
    changed = ttt_attention(q, keys, values, DIM**-0.5)
    torch.testing.assert_close(changed[:, :, :5], out[:, :, :5])
    assert (changed[:, :, 5:] - out[:, :, 5:]).abs().max() > 0.1


def test_shapes_are_checked():
    q, keys, values, _ = case(4, 1)
    with pytest.raises(AssertionError, match="expected shape"):
        ttt_attention(q, [keys[0], keys[1][:, :, :2]], values, 1.0)
