"""Acceptance and parity, defined once.

Acceptance length: tokens committed per target forward, step-weighted, bonus token included, the prompt's forward and
the token it gives excluded. Conditional acceptance at depth d: the share of the steps that accepted depth d among those
that accepted depth d - 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from decode.engine import Output

# How far, in logits, a token may lie behind the best and still be chosen by a forward of n rows instead of one: two
# roundings of a logit between 16 and 32 in half precision, and of a larger one where the best is larger.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.03125}
ROUNDINGS = 2


def tolerance(dtype: torch.dtype, logit: float) -> float:
    """The widest near tie at a best logit of that size."""
    spacing = torch.finfo(dtype).eps * 2 ** (math.frexp(logit)[1] - 1)  # between numbers of that size
    return max(TOLERANCE[dtype], ROUNDINGS * spacing)


def acceptance_length(outputs: Sequence[Output]) -> float:
    """Over all steps of all replies; 0 where there was no step."""
    steps = [count for output in outputs for count in output.accepted]
    return 1 + sum(steps) / len(steps) if steps else 0.0


def acceptance_by_depth(outputs: Sequence[Output]) -> list[float]:
    """[D] conditional acceptance at depths 1, 2, ...; ends at the deepest depth that any step accepted."""
    steps = [count for output in outputs for count in output.accepted]
    reached = [sum(count >= depth for count in steps) for depth in range(max(steps, default=0) + 1)]
    return [after / before for before, after in zip(reached, reached[1:], strict=False)]


@dataclass
class Parity:
    """Replies compared with plain decoding: identical, parted at a near tie, or parted without one."""

    compared: int = 0
    identical: int = 0
    near_ties: int = 0
    mismatches: int = 0
    widest_gap: float = 0.0
    """Largest gap, in logits, at which two replies parted."""

    def __add__(self, other: Parity) -> Parity:
        return Parity(
            self.compared + other.compared,
            self.identical + other.identical,
            self.near_ties + other.near_ties,
            self.mismatches + other.mismatches,
            max(self.widest_gap, other.widest_gap),
        )

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def compare(
    plain: Sequence[int],
    speculative: Sequence[int],
    gap: Callable[[int, int], tuple[float, float]],
    dtype: torch.dtype,
) -> Parity:
    """Compare two replies up to where they part. `gap(i, token)`: how far, in logits, `token` lay behind the best where
    plain decoding chose token i, and the best logit."""
    if list(plain) == list(speculative):
        return Parity(compared=1, identical=1)
    at = next(
        (i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b),
        min(len(plain), len(speculative)),
    )
    if at >= min(len(plain), len(speculative)):  # one goes on where the other ends: no rounding does that
        return Parity(compared=1, mismatches=1)
    width, best = gap(at, speculative[at])
    near = width <= tolerance(dtype, best)
    return Parity(compared=1, near_ties=int(near), mismatches=int(not near), widest_gap=width)
