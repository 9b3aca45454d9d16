"""Counter-based random numbers: the value of a token depends on (seed, sequence, position, stream, token) alone.

    key  = mix(mix(mix(seed + GOLDEN * (stream + 1)) + sequence) + position)        (mix: the splitmix64 finaliser)
    lane = mix(token * GOLDEN + GOLDEN)
    bits = fold(fold(key ^ lane)),  fold(y) = y * FOLD; y ^ (y >>> 32)
    v = ((bits >>> 11) + 0.5) * 2^-53,  E = -log1p(-v),  g = -log(E)

All integers are int64 with wrap-around, `>>>` is a logical shift, so torch on a CPU, torch on a GPU and Triton hold equal
integers; floats agree to a few units of float32. Small v, which win an argmax, keep their full relative precision: E never
comes from 1 - v there.

Shapes: sequences and positions [...], result [..., N]. Constants: Steele, Lea and Flood, "Fast splittable pseudorandom
number generators" (splitmix64). Not a cryptographic generator.
"""

import torch
from torch import Tensor

from headtrain_kernels._triton import tl, triton
from headtrain_kernels.checks import INTEGERS, check_device, check_dtype, check_shape

KINDS = ("gumbel", "exponential", "bits")


def wrap(value: int) -> int:
    """The int64 with the same 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN, MIX_A, MIX_B, FOLD = (
    wrap(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
_GOLDEN, _MIX_A, _MIX_B, _FOLD = (tl.constexpr(x) for x in (GOLDEN, MIX_A, MIX_B, FOLD))


@triton.jit
def shift_right(x, s: tl.constexpr):
    return (x >> s) & ((1 << (64 - s)) - 1)


@triton.jit
def mix(x):
    x = (x ^ shift_right(x, 30)) * _MIX_A
    x = (x ^ shift_right(x, 27)) * _MIX_B
    return x ^ shift_right(x, 31)


@triton.jit
def noise_key(seed, sequence, position, stream):
    """All arguments int64 tensors (scalars or blocks)."""
    return mix(mix(mix(seed + (stream + 1) * _GOLDEN) + sequence) + position)


@triton.jit
def noise_bits(key, token):
    """`token` int64."""
    y = key ^ mix(token * _GOLDEN + _GOLDEN)
    y = y * _FOLD
    y = y ^ shift_right(y, 32)
    y = y * _FOLD
    return y ^ shift_right(y, 32)


@triton.jit
def exponential_of(bits):
    """E = -log1p(-v) in float32. The GPU's log is only good to 2^-22 absolute near 1, so below 1/2 the series of
    2 atanh(v / (2 - v)) is used (eight terms: 2e-9 relative at v = 1/2); above it 1 - v is exact."""
    v = (shift_right(bits, 11).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    v = tl.minimum(v, 0.99999994)
    s = v / (2.0 - v)
    t = s * s
    series = 1.0 / 13 + t * (1.0 / 15)
    series = 1.0 / 11 + t * series
    series = 1.0 / 9 + t * series
    series = 1.0 / 7 + t * series
    series = 1.0 / 5 + t * series
    series = 1.0 / 3 + t * series
    series = 2.0 * s * (1.0 + t * series)
    return tl.where(v < 0.5, series, -tl.log(1.0 - tl.maximum(v, 0.5)))


@triton.jit
def gumbel_of(bits):
    return -tl.log(exponential_of(bits))


@triton.jit
def load_seed(seed, IS_POINTER: tl.constexpr):
    """A graph that is replayed with another seed needs the seed on the device."""
    if IS_POINTER:
        return tl.load(seed).to(tl.int64)
    return tl.full((), seed, tl.int64)


@triton.jit(do_not_specialize=["seed", "stream"])
def _noise_kernel(
    out_ptr,
    sequence_ptr,
    position_ptr,
    seed,
    stream,
    N,
    SEED_PTR: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.load(sequence_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + row).to(tl.int64)
    key = noise_key(load_seed(seed, SEED_PTR), sequence, position, tl.full((), stream, tl.int64))
    bits = noise_bits(key, token.to(tl.int64))
    out = out_ptr + row * N + token
    if KIND == "bits":
        tl.store(out, bits, mask=token < N)
    elif KIND == "exponential":
        tl.store(out, exponential_of(bits), mask=token < N)
    else:
        tl.store(out, gumbel_of(bits), mask=token < N)


def launch_noise(
    seed: int | Tensor, sequences: Tensor, positions: Tensor, num_tokens: int, stream: int, kind: str
) -> Tensor:
    """sequences and positions [R] integers on one device -> [R, N]."""
    check_dtype("sequences", sequences, *INTEGERS)
    check_dtype("positions", positions, *INTEGERS)
    check_shape("positions", positions, sequences.shape[0])
    check_device("positions", positions, sequences.device)
    assert num_tokens > 0, f"num_tokens: {num_tokens} received, at least 1 expected"
    dtype = torch.int64 if kind == "bits" else torch.float32
    out = torch.empty(sequences.shape[0], num_tokens, dtype=dtype, device=sequences.device)  # [R, N]
    if out.numel():
        block = 1024
        _noise_kernel[(sequences.shape[0], triton.cdiv(num_tokens, block))](
            out, sequences.contiguous(), positions.contiguous(), seed_argument(seed), stream, num_tokens,
            SEED_PTR=isinstance(seed, Tensor), KIND=kind, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def seed_argument(seed: int | Tensor) -> int | Tensor:
    """Checked seed as the kernels take it: an int64 by value, or a one-element integer tensor by pointer."""
    if isinstance(seed, Tensor):
        check_dtype("seed", seed, *INTEGERS)
        assert seed.numel() == 1, f"seed: shape {tuple(seed.shape)} received, one element expected"
        return seed
    return wrap(seed)


_lanes: dict[tuple[int, torch.device], Tensor] = {}


def _lane_hashes(num_tokens: int, device: torch.device) -> Tensor:
    """[N] int64, hashed once per size and device."""
    if (num_tokens, device) not in _lanes:
        tokens = torch.arange(num_tokens, device=device)  # [N]
        _lanes[num_tokens, device] = _mix(tokens.mul_(GOLDEN).add_(GOLDEN))
    return _lanes[num_tokens, device]


def _shift_right(x: Tensor, s: int) -> Tensor:
    return (x >> s).bitwise_and_((1 << (64 - s)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)).mul_(MIX_A)
    x = (x ^ _shift_right(x, 27)).mul_(MIX_B)
    return x ^ _shift_right(x, 31)


def _torch_noise(
    seed: int | Tensor, sequences: Tensor, positions: Tensor, num_tokens: int, stream: int, kind: str
) -> Tensor:
    start = wrap(wrap(GOLDEN * (stream + 1)) + (0 if isinstance(seed, Tensor) else seed))
    first = torch.full_like(sequences, start, dtype=torch.int64)  # [R]
    if isinstance(seed, Tensor):
        first += seed.reshape(()).long()
    key = _mix(_mix(_mix(first) + sequences) + positions)  # [R]
    y = key[:, None] ^ _lane_hashes(num_tokens, sequences.device)  # [R, N]
    y.mul_(FOLD).bitwise_xor_(_shift_right(y, 32))
    y.mul_(FOLD).bitwise_xor_(_shift_right(y, 32))
    if kind == "bits":
        return y
    v = (y >> 11).bitwise_and_((1 << 53) - 1).to(torch.float32)
    v.add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    e = v.neg_().log1p_().neg_()
    return e if kind == "exponential" else e.log_().neg_()


def counter_noise(
    seed: int | Tensor,
    sequences: Tensor,
    positions: Tensor,
    num_tokens: int,
    stream: int = 0,
    kind: str = "gumbel",
) -> Tensor:
    """Noise of every token at each (sequence, position). Triton on a CUDA device, else torch.

    Args:
        seed: any integer, or a one-element integer tensor on the same device (read there).
        sequences: [...] integers.
        positions: [...] integers, broadcast with `sequences`; the absolute position of the token being chosen.
        num_tokens: N, tokens 0..N-1.
        stream: separates uses of one seed.
        kind: "gumbel" and "exponential" give float32, "bits" the int64 behind them.

    Returns: [..., N].
    """
    assert kind in KINDS, f"kind: {kind!r} received, one of {KINDS} expected"
    sequences, positions = torch.broadcast_tensors(sequences, positions)
    form = launch_noise if sequences.is_cuda else _torch_noise
    flat = form(seed, sequences.reshape(-1), positions.reshape(-1), num_tokens, stream, kind)
    return flat.view(*sequences.shape, num_tokens)
