"""Acceptance and parity against numbers worked out by hand."""

import pytest
import torch

from decode.engine import Output
from decode.metrics import TOLERANCE, Parity, acceptance_by_depth, acceptance_length, compare, tolerance


def test_acceptance_by_hand():
    """Five steps accept 0, 2, 1, 2 and 3 drafts: 8 + 5 bonus tokens in 5 forwards."""
    outputs = [Output(accepted=[0, 2, 1]), Output(accepted=[2, 3]), Output()]
    assert acceptance_length(outputs) == pytest.approx(13 / 5)
    assert acceptance_by_depth(outputs) == pytest.approx([4 / 5, 3 / 4, 1 / 3])


def test_no_steps():
    assert acceptance_length([Output()]) == 0.0
    assert acceptance_by_depth([]) == []


def never(*_: int) -> tuple[float, float]:
    raise AssertionError("nothing is asked where no token stands against another")


def test_compare_counts_where_replies_part():
    asked = []

    def gap(value, best=20.0):
        return lambda *at: asked.append(at) or (value, best)

    assert compare([1, 2, 3], [1, 2, 3], never, torch.float32) == Parity(1, 1, 0, 0)
    assert compare([1, 2, 3], [1, 9, 3], gap(0.0), torch.float32) == Parity(1, 0, 1, 0)
    assert compare([1, 2, 3], [1, 9, 3], gap(0.1), torch.float32) == Parity(1, 0, 0, 1, 0.1)
    assert compare([1, 2, 3], [1, 9, 3], gap(0.1), torch.bfloat16) == Parity(1, 0, 1, 0, 0.1)
    assert compare([1, 2, 3], [1, 9, 3], gap(0.5), torch.bfloat16) == Parity(1, 0, 0, 1, 0.5)
    assert compare([1, 2, 3], [1, 9, 3], gap(0.5, 40.0), torch.bfloat16) == Parity(1, 0, 1, 0, 0.5)
    assert asked == [(1, 9)] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logit", [0.0, -3.0, 17.0, 31.0, 32.0, 63.0, 65.0])
def test_tolerance_is_two_roundings(dtype, logit):
    size = torch.tensor(abs(logit), dtype=dtype)
    spacing = float(torch.nextafter(size, torch.tensor(torch.inf, dtype=dtype)) - size)
    assert tolerance(dtype, logit) == max(TOLERANCE[dtype], 2 * spacing)


def test_another_length_is_no_near_tie():
    assert compare([1, 2], [1, 2, 3], never, torch.bfloat16) == Parity(1, 0, 0, 1)
    assert compare([1, 2, 3], [1, 2], never, torch.bfloat16) == Parity(1, 0, 0, 1)


def test_parity_adds_up():
    assert Parity(1, 1, 0, 0) + Parity(2, 0, 1, 1, 0.5) == Parity(3, 1, 1, 1, 0.5)
    assert set(TOLERANCE) == {torch.float32, torch.bfloat16, torch.float16}
