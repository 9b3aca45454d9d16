"""Equal integers in Python, torch and Triton; floats to float32's precision, small values included."""

import math

import pytest
import torch
from headtrain_kernels import noise as module
from headtrain_kernels import reference
from headtrain_kernels._triton import tl, triton
from headtrain_kernels.noise import counter_noise, exponential_of, launch_noise

SEQUENCES, POSITIONS = [0, 3, -1, 2**40], [0, 7, 123_456, 5]


@pytest.mark.parametrize("stream", [0, 3])
@pytest.mark.parametrize("seed", [0, 7, -5, 2**63 + 11])
def test_integers_agree(seed, stream, device):
    rows = torch.tensor(SEQUENCES, device=device), torch.tensor(POSITIONS, device=device)
    expected = [
        [reference.noise_bits(seed, s, p, token, stream) for token in range(70)]
        for s, p in zip(SEQUENCES, POSITIONS, strict=True)
    ]
    assert launch_noise(seed, *rows, 70, stream, "bits").tolist() == expected
    assert counter_noise(seed, *(r.cpu() for r in rows), 70, stream, "bits").tolist() == expected


@pytest.mark.parametrize("kind", ["gumbel", "exponential"])
def test_floats_agree(kind, device):
    sequence, position = torch.tensor([5], device=device), torch.tensor([11], device=device)
    expected = torch.tensor([[getattr(reference, kind)(3, 5, 11, token) for token in range(3000)]])
    for out in (
        launch_noise(3, sequence, position, 3000, 0, kind),
        counter_noise(3, sequence.cpu(), position.cpu(), 3000, kind=kind),
    ):
        assert out.dtype == torch.float32 and out.isfinite().all()
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)


@triton.jit
def _exponential_kernel(bits_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, exponential_of(tl.load(bits_ptr + at)))


def test_small_values_keep_relative_precision(device):
    """The whole range of v, from 2^-54 to the clamp at 1 - 2^-24."""
    top = [0, 1, 2, 1000, 2**29, 2**40, 2**50, 2**52 - 1, 2**52, 2**52 + 1, 3 * 2**51, 2**53 - 2**20, 2**53 - 1]
    top += [2**53 * i // 32 for i in range(1, 20)]
    bits = torch.tensor([(t << 11) - (1 << 64) * (t >> 52) for t in top], device=device)
    out = torch.empty(32, device=device)
    _exponential_kernel[(1,)](bits, out, BLOCK=32)
    for t, e in zip(top, out.tolist(), strict=True):
        v = float(torch.tensor(t, dtype=torch.int64).to(torch.float32))
        v = min((v + 0.5 if t < 2**24 else v) * 2.0**-53, 1 - 2.0**-24)
        assert e == pytest.approx(-math.log1p(-v), rel=1e-6)


def test_leading_dimensions_and_broadcast():
    sequences, positions = torch.tensor([[1], [2]]), torch.arange(3)
    out = counter_noise(9, sequences, positions, 10)
    assert out.shape == (2, 3, 10)
    assert torch.equal(out[1, 2], counter_noise(9, torch.tensor(2), torch.tensor(2), 10))


def test_values_depend_on_every_key():
    def draw(seed=1, sequence=2, position=3, stream=0):
        return counter_noise(seed, torch.tensor(sequence), torch.tensor(position), 50, stream)

    others = [draw(seed=2), draw(sequence=3), draw(position=4), draw(stream=1), draw(sequence=3, position=2)]
    assert all((draw() != other).all() for other in others)
    assert torch.equal(draw(), draw())
    assert torch.equal(counter_noise(1, torch.tensor(2), torch.tensor(3), 20), draw()[:20])


def test_seed_on_the_device(device):
    rows = torch.tensor([4, 5], device=device), torch.tensor([6, 7], device=device)
    expected = launch_noise(77, *rows, 40, 1, "bits")
    assert torch.equal(launch_noise(torch.tensor([77], device=device), *rows, 40, 1, "bits"), expected)
    assert torch.equal(module._torch_noise(torch.tensor([77], device=device), *rows, 40, 1, "bits"), expected)


def test_gumbel_statistics():
    """100,000 values: mean 0.5772 and variance pi^2 / 6 within five standard errors (false alarm about 1e-6)."""
    g = counter_noise(123, torch.tensor(0), torch.tensor(0), 100_000).double()
    assert abs(g.mean() - 0.5772157) < 5 * math.pi / math.sqrt(6 * 100_000)
    assert abs(g.var() - math.pi**2 / 6) < 5 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / 100_000)


def test_asserts_name_the_argument(device):
    one, two = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(AssertionError, match=r"positions: shape \(2,\) received, \(1\) expected"):
        launch_noise(0, one, two, 5, 0, "bits")
    with pytest.raises(AssertionError, match="sequences: dtype torch.float32 received"):
        launch_noise(0, one.float(), one, 5, 0, "bits")
    with pytest.raises(AssertionError, match="num_tokens: 0 received"):
        launch_noise(0, one, one, 0, 0, "bits")
    with pytest.raises(AssertionError, match=r"seed: shape \(2,\) received, one element expected"):
        launch_noise(two, one, one, 5, 0, "bits")
    with pytest.raises(AssertionError, match="kind: 'normal' received"):
        counter_noise(0, one, one, 5, kind="normal")


@pytest.mark.gpu
def test_gpu_equals_cpu(device):
    """Torch on the CPU, torch on the GPU and Triton hold the same integers."""
    rows = torch.arange(6), torch.arange(6) * 1000
    cpu = counter_noise(2**61, *rows, 50_000, 2, "bits")
    on_gpu = [row.to(device) for row in rows]
    assert torch.equal(counter_noise(2**61, *on_gpu, 50_000, 2, "bits").cpu(), cpu)
    assert torch.equal(module._torch_noise(2**61, *on_gpu, 50_000, 2, "bits").cpu(), cpu)
    gumbel = counter_noise(2**61, *on_gpu, 50_000, 2).cpu()
    torch.testing.assert_close(gumbel, counter_noise(2**61, *rows, 50_000, 2), rtol=2e-6, atol=2e-6)
