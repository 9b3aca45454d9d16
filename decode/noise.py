"""Random numbers without state: every number is a hash of where it is used.

All arithmetic is int64 with wrap-around; lshr is the logical right shift, G = 0x9E3779B97F4A7C15:

    mix(x):  x = (x ^ lshr(x, 30)) * 0xBF58476D1CE4E5B9;  x = (x ^ lshr(x, 27)) * 0x94D049BB133111EB;  x ^ lshr(x, 31)
    key      = mix(mix(mix(seed + G * (stream + 1)) + sequence) + position)
    lane(j)  = mix(G * j + G)
    y        = (key ^ lane(j)) * M;  y = (y ^ lshr(y, 32)) * M;  bits = y ^ lshr(y, 32);  M = 0xD6E8FEB86659FD93
    v        = (lshr(bits, 11) + 0.5) * 2**-53 in float32, at most 1 - 2**-24
    E        = -log1p(-v), exponential;   g = -log(E), Gumbel
    U        = (lshr(bits, 12) + 0.5) * 2**-52 in float64

E is small where a token wins, and there v keeps its full relative precision. U takes 52 bits and not 53 because
2**53 - 1 + 0.5 rounds to 2**53 in float64, which would make U = 1.
The mixers are the finalisers of SplitMix64 (Steele, Lea, Flood 2014) and of the 64-bit xor-shift-multiply family.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import local
from typing import TypeVar

import torch
from torch import Tensor

SHARED, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
NUM_STREAMS = 4  # `stream + NUM_STREAMS * index` separates the draws that share one stream and one position


def _signed(value: int) -> int:
    """The int64 with the same low 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)
LANE_MULTIPLIER = _signed(0xD6E8FEB86659FD93)
MAX_DRAWS = 256  # children drawn for one parent
LARGEST_V = 1 - 2.0**-24
CHUNK = 65536  # numbers hashed at once on a CPU: the int64 buffers stay in the second-level cache
CACHE_BYTES = 2**28
_scratch = local()


_Bits = TypeVar("_Bits", int, Tensor)


def _lshr(x: _Bits, shift: int) -> _Bits:
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _lshr(x, 30)) * MIX_1
    x = (x ^ _lshr(x, 27)) * MIX_2
    return x ^ _lshr(x, 31)


def _mix_int(x: int) -> int:
    x = _signed((_signed(x) ^ _lshr(_signed(x), 30)) * MIX_1)
    x = _signed((x ^ _lshr(x, 27)) * MIX_2)
    return x ^ _lshr(x, 31)


def _int64(value: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.int64)
    return torch.tensor(_signed(value), device=device)


@lru_cache(maxsize=16)
def _hashed_lanes(num_tokens: int, device: torch.device) -> Tensor:
    return _mix(torch.arange(num_tokens, device=device) * GOLDEN + GOLDEN)


def _seed_key(seed: int, stream: int | Tensor, device: torch.device) -> Tensor:
    return _mix((_int64(stream, device) + 1) * GOLDEN + _signed(seed))


def keys(seed: int, sequence: int | Tensor, position: Tensor, stream: int | Tensor) -> Tensor:
    """int64 keys, one per broadcast element of sequence, position and stream."""
    device = position.device
    return _mix(_mix(_seed_key(seed, stream, device) + _int64(sequence, device)) + position)


def _hash(key: Tensor, lanes: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    """bits of keys [R, 1] at hashed lanes [N], written to `out` [R, N]; `spare` is a second buffer of that shape."""
    torch.bitwise_xor(key, lanes, out=out)
    for _ in range(2):
        out.mul_(LANE_MULTIPLIER)
        torch.bitwise_right_shift(out, 32, out=spare)
        out.bitwise_xor_(spare.bitwise_and_(0xFFFFFFFF))
    return out


def bits(seed: int, sequence: int | Tensor, position: Tensor, lanes: Tensor, stream: int | Tensor) -> Tensor:
    """int64 [.., N] for positions [..] (sequence and stream broadcast against them) and lane numbers [N]."""
    return bits_of(keys(seed, sequence, position, stream), _mix(lanes * GOLDEN + GOLDEN))


def bits_of(key: Tensor, hashed: Tensor) -> Tensor:
    """int64 [.., N] for keys [..] and hashed lanes [N]."""
    out = torch.empty(*key.shape, hashed.shape[0], dtype=torch.int64, device=key.device)
    return _hash(key[..., None], hashed, out, torch.empty_like(out))


def _buffers(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two int64 buffers [rows, width]. A CPU keeps a pair per thread: fresh pages cost as much as the hash."""
    size = rows * width
    if device.type != "cpu" or size > CHUNK:
        fresh = torch.empty(2, size, dtype=torch.int64, device=device)
        return fresh[0].view(rows, width), fresh[1].view(rows, width)
    if not hasattr(_scratch, "pair"):
        with torch.inference_mode(False):  # a tensor born in inference mode could not be written outside it
            _scratch.pair = torch.empty(2, CHUNK, dtype=torch.int64)
    return _scratch.pair[0, :size].view(rows, width), _scratch.pair[1, :size].view(rows, width)


def exponential_of(key: Tensor, hashed: Tensor) -> Tensor:
    """E, float32 [.., N], for keys [..] and hashed lanes [N]."""
    flat, width = key.reshape(-1, 1), hashed.shape[0]
    out = torch.empty(flat.shape[0], width, device=key.device)
    rows = flat.shape[0] if key.device.type != "cpu" else max(1, CHUNK // max(1, width))
    for start in range(0, flat.shape[0], rows):
        part = flat[start : start + rows]
        hashes = _hash(part, hashed, *_buffers(part.shape[0], width, key.device))
        out[start : start + rows] = hashes.bitwise_right_shift_(11).bitwise_and_(2**53 - 1)
    # Negated all along, which is exact and spares two passes: out = -v, then log1p(-v) = -E.
    out.add_(0.5).mul_(-(2.0**-53)).clamp_(min=-LARGEST_V)
    return out.log1p_().neg_().view(*key.shape, width)


def exponential(
    seed: int, sequence: int | Tensor, position: Tensor, num_tokens: int, stream: int | Tensor = SHARED
) -> Tensor:
    """Unit exponentials, float32 [.., V], positive and finite, for positions [..]."""
    return exponential_of(keys(seed, sequence, position, stream), _hashed_lanes(num_tokens, position.device))


def gumbel(
    seed: int, sequence: int | Tensor, position: Tensor, num_tokens: int, stream: int | Tensor = SHARED
) -> Tensor:
    """Standard Gumbel noise, float32 [.., V], finite, for positions [..]."""
    return exponential(seed, sequence, position, num_tokens, stream).log_().neg_()


def uniform(seed: int, sequence: int | Tensor, position: Tensor, lanes: Tensor, stream: int | Tensor) -> Tensor:
    """float64 [.., N] strictly between 0 and 1, for positions [..] and lane numbers [N]."""
    return _uniform_of(bits(seed, sequence, position, lanes, stream))


def _uniform_of(words: Tensor) -> Tensor:
    return (_lshr(words, 12).double() + 0.5) * 2.0**-52


class Noise:
    """The random numbers of a batch: one seed, one number per sequence.

    `sequences` [B] names the rows: a row keeps its numbers whatever else is in the batch, if it keeps its name.
    `positions` are absolute: the index that the token being chosen will have in its sequence.
    """

    def __init__(self, seed: int, sequences: Tensor | Sequence[int], device: torch.device | str = "cpu"):
        self.seed = seed
        self.seed_on_device: int | Tensor = seed  # a tensor [1] where a captured step must serve other seeds
        self.device = torch.device(device)
        self.sequences = torch.as_tensor(sequences, dtype=torch.int64, device=self.device)  # [B]
        assert self.sequences.dim() == 1, f"sequences: {tuple(self.sequences.shape)}, expected [B]"
        self._seed_key = _mix_int(seed + GOLDEN * (SHARED + 1))
        self._shared_keys = _mix(self.sequences + self._seed_key)  # [B]
        # Vectors by (sequence, position). Only a CPU keeps them: there one costs a quarter of a millisecond and reading
        # the positions is free, while an accelerator hashes faster than it could tell the host what it holds.
        self._vectors: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._names = self.sequences.tolist() if self.device.type == "cpu" else []

    def select(self, rows: Tensor) -> Noise:
        """The noise of these rows [R] (indices) of the batch; the cached vectors go along."""
        chosen = Noise(self.seed, self.sequences[rows], self.device)
        chosen._vectors = self._vectors
        return chosen

    def gumbel(
        self,
        positions: Tensor,
        num_tokens: int,
        stream: int = SHARED,
        index: Tensor | None = None,
        vocabulary: Tensor | None = None,
    ) -> Tensor:
        """Gumbel noise, float32 [B, k, V], or [B, k, Vd] at the token ids `vocabulary` [Vd], for positions [B, k].

        `index`, int64 broadcast with positions, separates several draws at one position (a parent node, a child).
        Rows may be views of the cache: do not write into the result.
        """
        if stream == SHARED and index is None:
            rows = self._shared(positions, num_tokens)
            return rows if vocabulary is None else rows.index_select(-1, vocabulary)
        lanes = _hashed_lanes(num_tokens, self.device)
        if vocabulary is not None:
            lanes = lanes[vocabulary]
        return exponential_of(self._keys(positions, stream, index), lanes).log_().neg_()

    def proposal(
        self, positions: Tensor, num_tokens: int, vocabulary: Tensor | None = None
    ) -> Callable[[int, Tensor | None, int], Tensor]:
        """Noise (depth, parents, draw) of one drafting step whose root chooses at `positions` [B].

        Without parents: the shared noise of children at `depth`, [B, Vd]. With parents, node ids [m]: each parent's own
        noise for its draw number `draw`, [B, m, Vd]. It hangs on the root's position and not on the child's, for two
        steps may draft at one position and the second must not repeat guesses whose rejection shaped the text before.
        num_tokens: ids that `vocabulary` [Vd] points into; without a vocabulary, the draft's columns.
        """

        def noise(depth: int, parents: Tensor | None, draw: int) -> Tensor:
            if parents is None:
                return self.gumbel(positions[:, None] + (depth - 1), num_tokens, vocabulary=vocabulary)[:, 0]
            at = positions[:, None].expand(-1, len(parents))
            return self.gumbel(at, num_tokens, DRAFT, parents * MAX_DRAWS + draw, vocabulary)

        return noise

    def uniform(self, positions: Tensor, lanes: Tensor, stream: int) -> Tensor:
        """float64 [B, N] strictly between 0 and 1, for positions [B] and lane numbers [N]."""
        return _uniform_of(bits(self.seed, self.sequences, positions, lanes, stream))

    def _keys(self, positions: Tensor, stream: int, index: Tensor | None) -> Tensor:
        full = stream if index is None else index * NUM_STREAMS + stream
        return keys(self.seed, self.sequences[:, None], positions, full)  # [B, k]

    def _shared(self, positions: Tensor, num_tokens: int) -> Tensor:
        if self.device.type != "cpu" or num_tokens < 2048:  # a short vector costs less than its look-up
            key = _mix(self._shared_keys[:, None] + positions)
            return exponential_of(key, _hashed_lanes(num_tokens, self.device)).log_().neg_()
        wanted = [(name, at) for name, row in zip(self._names, positions.tolist(), strict=True) for at in row]
        vectors = [self._vector(name, at, num_tokens) for name, at in wanted]
        stacked = vectors[0][None] if len(vectors) == 1 else torch.stack(vectors)
        return stacked.view(*positions.shape, num_tokens)

    def _vector(self, name: int, position: int, num_tokens: int) -> Tensor:
        """One vector [V]. A shorter one is a prefix of a longer one, so drafts and targets of two sizes share them."""
        held = self._vectors.get((name, position))
        if held is None or held.shape[0] < num_tokens:
            key = _mix_int(_mix_int(self._seed_key + name) + position)  # tensors of one number would take 80 us
            lanes = _hashed_lanes(num_tokens, self.device)
            held = exponential_of(torch.tensor([key]), lanes)[0].log_().neg_()
            self._vectors[name, position] = held
            room = max(16, min(16 * len(self._names), CACHE_BYTES // (4 * num_tokens)))
            while len(self._vectors) > room:
                self._vectors.popitem(last=False)  # positions only grow, so the oldest is behind
        return held[:num_tokens]
