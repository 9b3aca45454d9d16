"""decode/noise.py: the integers are those of the definition, and the numbers made of them are what they claim."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode import noise
from decode.noise import ACCEPT, DRAFT, RESIDUAL, SHARED, Noise, bits, exponential, gumbel, uniform
from tests.decode.enumeration import chi_square

WORD = 2**64
FALSE_ALARM = 1e-6
PINNED = [0xE08B3D245E63AEB2, 0xA4262EB0274D0478]  # bits of seed 1234, sequence 5, position 0, lanes 0 and 49151


def mix_reference(x: int) -> int:
    """SplitMix64's finaliser on unsigned Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def bits_reference(seed: int, sequence: int, position: int, lane: int, stream: int) -> int:
    golden = 0x9E3779B97F4A7C15
    key = mix_reference((seed + golden * (stream + 1)) % WORD)
    key = mix_reference((key + sequence) % WORD)
    key = mix_reference((key + position) % WORD)
    y = (key ^ mix_reference((lane * golden + golden) % WORD)) * 0xD6E8FEB86659FD93 % WORD
    y = (y ^ (y >> 32)) * 0xD6E8FEB86659FD93 % WORD
    return y ^ (y >> 32)


whole = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**70), 2**70), whole, whole, whole, st.integers(0, 2**40))
def test_bits_are_the_definition(seed: int, sequence: int, position: int, lane: int, stream: int) -> None:
    got = bits(seed, sequence, torch.tensor([position]), torch.tensor([lane]), stream)
    assert got.item() % WORD == bits_reference(seed, sequence, position, lane, stream)


def test_known_values() -> None:
    """Pinned: published outputs depend on them, and the Triton kernels must give the same."""
    got = bits(1234, 5, torch.tensor([0, 1, 4096]), torch.tensor([0, 49151]), SHARED)
    expected = [[bits_reference(1234, 5, t, j, 0) for j in (0, 49151)] for t in (0, 1, 4096)]
    assert [[x % WORD for x in row] for row in got.tolist()] == expected
    assert expected[0] == PINNED


def test_floats_follow_from_the_bits() -> None:
    positions, lanes = torch.arange(40), torch.arange(300)
    words = bits(7, 3, positions, lanes, DRAFT)
    top = torch.tensor([[(x % WORD) >> 11 for x in row] for row in words.tolist()])
    v = ((top.float() + 0.5) * 2.0**-53).clamp(max=1 - 2.0**-24)
    e = exponential(7, 3, positions, 300, DRAFT)
    assert torch.equal(e, -torch.log1p(-v))
    assert torch.equal(gumbel(7, 3, positions, 300, DRAFT), -torch.log(e))
    u = uniform(7, 3, positions, lanes, DRAFT)
    assert u.dtype == torch.float64
    expected = [[(((x % WORD) >> 12) + 0.5) / 2**52 for x in row] for row in words.tolist()]
    assert torch.equal(u, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("word", [0, -1, 1, 2**63 - 1, -(2**63), 2047, 2048, -2048])
def test_extreme_bits_stay_finite_and_inside(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_hash", lambda key, lanes, out, spare: out.fill_(word))
    position = torch.tensor([0])
    e = exponential(0, 0, position, 3)
    assert (e > 0).all() and torch.isfinite(e).all()
    assert torch.isfinite(gumbel(0, 0, position, 3)).all()
    u = uniform(0, 0, position, torch.arange(3), ACCEPT)
    assert ((u > 0) & (u < 1)).all()


def test_small_exponentials_keep_their_precision() -> None:
    """The smallest of 2**24 numbers are near 2**-24, the grid of a plain float32 uniform, and still all differ."""
    smallest = [exponential(0, s, torch.tensor([0]), 2**20)[0].topk(20, largest=False).values for s in range(16)]
    pooled = torch.cat(smallest)
    assert pooled.max() < 2.0**-14 and pooled.min() < 2.0**-21
    assert len(pooled.unique()) == len(pooled)


def test_batching_changes_nothing() -> None:
    sequences, positions = torch.tensor([4, 9, 2**40]), torch.tensor([[1, 5], [5, 6], [100, 1]])
    for size in (50, 5000):  # direct, and through the cache
        whole_batch = Noise(-3, sequences).gumbel(positions, size)
        for b in range(3):
            for k in range(2):
                alone = gumbel(-3, int(sequences[b]), positions[b, k : k + 1], size)[0]
                assert torch.equal(whole_batch[b, k], alone)
                again = Noise(-3, sequences[b : b + 1]).gumbel(positions[b : b + 1, k : k + 1], size)
                assert torch.equal(again[0, 0], alone)


def test_a_longer_vocabulary_only_adds_tokens() -> None:
    one = Noise(1, [0])
    positions = torch.tensor([[7]])
    short = one.gumbel(positions, 3000).clone()
    longer = one.gumbel(positions, 4000)
    assert torch.equal(longer[..., :3000], short) and torch.equal(one.gumbel(positions, 3000), short)
    assert torch.equal(Noise(1, [0]).gumbel(positions, 100), short[..., :100])


def test_draft_columns_get_the_noise_of_their_target_ids() -> None:
    vocabulary = torch.tensor([0, 5, 17, 4000])
    one = Noise(1, [3, 4])
    positions = torch.tensor([[7], [8]])
    full = one.gumbel(positions, 5000)
    assert torch.equal(one.gumbel(positions, 5000, vocabulary=vocabulary), full[..., vocabulary])
    index = torch.tensor([[2], [6]])
    own = one.gumbel(positions, 5000, DRAFT, index)
    assert torch.equal(one.gumbel(positions, 5000, DRAFT, index, vocabulary), own[..., vocabulary])
    assert not torch.equal(own, full)


def test_the_batch_object_draws_what_the_functions_draw() -> None:
    sequences, positions = torch.tensor([4, 9]), torch.tensor([[3, 5], [5, 6]])
    one, lanes = Noise(6, sequences), torch.tensor([0, 7, 1024])
    got = one.uniform(positions[:, 0], lanes, ACCEPT)
    assert torch.equal(got, uniform(6, sequences, positions[:, 0], lanes, ACCEPT))
    index = torch.tensor([0, 1])
    got = one.gumbel(positions, 30, DRAFT, index)
    assert torch.equal(got, gumbel(6, sequences[:, None], positions, 30, DRAFT + 4 * index))


def test_no_two_uses_of_a_position_share_a_key() -> None:
    one, at = Noise(0, [0]), torch.tensor([[3]])
    uses = [one._keys(at, stream, torch.tensor([index])) for stream in range(4) for index in range(300)]
    assert len({int(key) for key in uses}) == 1200


def test_cache_is_bounded_and_shared_by_selected_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Noise(0, [0, 1])
    for t in range(100):
        one.gumbel(torch.tensor([[t], [t]]), 2048)
    assert len(one._vectors) == 32
    rest = one.select(torch.tensor([1]))
    expected = gumbel(0, 1, torch.tensor([99]), 2048)
    monkeypatch.setattr(noise, "exponential_of", lambda *_: pytest.fail("the vector was cached"))
    assert torch.equal(rest.gumbel(torch.tensor([[99]]), 2048)[0], expected)


def test_the_cache_keeps_what_a_step_of_depth_15_needs() -> None:
    one = Noise(0, [0])
    first = one.gumbel(torch.arange(16)[None], 2048)
    kept = dict(one._vectors)
    one.gumbel(torch.arange(16)[None], 2048)
    assert all(one._vectors[key] is value for key, value in kept.items()) and first.shape == (1, 16, 2048)


def test_works_inside_and_outside_inference_mode() -> None:
    noise._scratch.__dict__.clear()
    with torch.inference_mode():
        inside = Noise(0, [0]).gumbel(torch.tensor([[3]]), 3001)
    outside = Noise(0, [0]).gumbel(torch.tensor([[3]]), 3001)
    assert torch.equal(inside, outside)


def test_proposal_noise_is_shared_by_position_and_fresh_by_step() -> None:
    one = Noise(0, [0, 1])
    positions, nodes = torch.tensor([10, 20]), torch.tensor([1, 2, 3])
    draw = one.proposal(positions, 64)
    assert torch.equal(draw(1, None, 0), one.gumbel(positions[:, None], 64)[:, 0])
    assert torch.equal(draw(3, None, 0), one.gumbel(positions[:, None] + 2, 64)[:, 0])
    own = draw(2, nodes, 0)
    assert own.shape == (2, 3, 64)
    assert torch.equal(own, draw(3, nodes, 0))
    others = [draw(2, nodes, 1), one.proposal(positions + 1, 64)(1, nodes, 0), draw(2, nodes + 3, 0)]
    assert not any((own == other).any() for other in others)
    assert torch.equal(draw(2, nodes[1:2], 0), own[:, 1:2])


# Statistics: fixed seeds, false-alarm rate FALSE_ALARM a comparison


def assert_uniform(u: Tensor, cells: int = 64) -> None:
    counts = torch.bincount((u.flatten() * cells).long().clamp(max=cells - 1), minlength=cells)
    assert chi_square(counts, torch.full((cells,), 1 / cells, dtype=torch.float64))[2] > FALSE_ALARM


def assert_independent(a: Tensor, b: Tensor, cells: int = 16) -> None:
    """Pairs of uniforms fall evenly into a grid."""
    cell = (a * cells).long() * cells + (b * cells).long()
    counts = torch.bincount(cell.flatten(), minlength=cells**2)
    assert chi_square(counts, torch.full((cells**2,), cells**-2.0, dtype=torch.float64))[2] > FALSE_ALARM


@pytest.mark.parametrize("axis", ["seed", "sequence", "position", "lane", "stream"])
def test_uniform_and_independent_along_every_part_of_the_key(axis: str) -> None:
    steps = torch.arange(1000)
    fixed = torch.zeros(1, dtype=torch.int64)
    if axis == "seed":
        u = torch.stack([uniform(s, 0, fixed, steps, SHARED)[0] for s in range(1000)])
    elif axis == "lane":
        u = uniform(3, 0, steps, steps, SHARED).T
    else:
        keys = {"sequence": (steps, fixed, 0), "position": (0, steps, 0), "stream": (0, fixed, steps)}[axis]
        sequence, position, stream = keys
        position = position.expand(1000)
        u = uniform(3, sequence, position, steps, stream)
    assert u.shape == (1000, 1000)
    assert_uniform(u)
    for apart in (1, 2, 4, 64):  # neighbours, and numbers that differ in one bit
        assert_independent(u[:-apart], u[apart:])
    ranks = u - 0.5
    correlation = (ranks[:-1] * ranks[1:]).mean() * 12
    assert abs(float(correlation)) < 5 / math.sqrt(ranks[1:].numel())


def test_low_and_high_bits_are_fair() -> None:
    words = bits(11, 0, torch.arange(2000), torch.arange(500), SHARED).flatten()
    for bit in range(64):
        ones = int(((words >> bit) & 1).sum())
        assert abs(ones - len(words) / 2) < 5.5 * math.sqrt(len(words)) / 2, f"bit {bit}"


def test_streams_of_one_position_are_independent() -> None:
    positions, lanes = torch.arange(1000), torch.arange(500)
    streams = [uniform(0, 0, positions, lanes, stream) for stream in (SHARED, DRAFT, ACCEPT, RESIDUAL)]
    for i in range(4):
        for j in range(i):
            assert_independent(streams[i], streams[j])


def test_exponential_and_gumbel_moments() -> None:
    e = exponential(5, 0, torch.arange(1000), 1000).double()
    assert abs(float(e.mean()) - 1) < 5e-3 and abs(float(e.var()) - 1) < 1e-2
    g = gumbel(5, 0, torch.arange(1000), 1000).double()
    assert abs(float(g.mean()) - 0.5772157) < 5 * math.pi / math.sqrt(6 * g.numel())
    assert abs(float(g.var()) - math.pi**2 / 6) < 2e-2


@pytest.mark.parametrize("size", [2, 7, 300])
def test_argmax_has_the_law_p(size: int) -> None:
    p = torch.softmax(2 * torch.randn(size, generator=torch.Generator().manual_seed(size)), -1)
    counts = torch.zeros(size, dtype=torch.int64)
    for start in range(0, 200_000, 20_000):
        g = gumbel(size, 0, torch.arange(start, start + 20_000), size)
        counts += torch.bincount((p.log() + g).argmax(-1), minlength=size)
    assert chi_square(counts, p)[2] > FALSE_ALARM


def test_argmax_has_the_law_p_in_the_tail() -> None:
    """Half of the mass on one token, 0.01 on 1000 tokens of 1e-5 each, which must win 1e-5 of the draws each."""
    p = torch.cat([torch.tensor([0.5, 0.49]), torch.full((1000,), 1e-5)]).double()
    p = p / p.sum()
    counts, draws = torch.zeros(len(p), dtype=torch.int64), 150_000
    for start in range(0, draws, 15_000):
        g = gumbel(99, 1, torch.arange(start, start + 15_000), len(p))
        counts += torch.bincount((p.log().float() + g).argmax(-1), minlength=len(p))
    tail = torch.stack([counts[0], counts[1], counts[2:].sum()])
    assert chi_square(tail, torch.stack([p[0], p[1], p[2:].sum()]))[2] > FALSE_ALARM
    groups = counts[2:].view(20, 50).sum(1)  # 75 expected in each
    assert chi_square(groups, torch.full((20,), 0.05, dtype=torch.float64))[2] > FALSE_ALARM


@pytest.mark.slow
def test_argmax_has_the_law_p_in_the_tail_of_a_real_vocabulary() -> None:
    """V = 49152: every group of 1024 tokens of 1e-5 wins its share."""
    size = 49152
    p = torch.full((size,), 1e-5, dtype=torch.float64)
    p[0] = 1 - 1e-5 * (size - 1)
    log_p, counts = p.log().float(), torch.zeros(size, dtype=torch.int64)
    for t in range(40_000):
        counts[(log_p + gumbel(5, 0, torch.tensor([t]), size)[0]).argmax()] += 1
    assert chi_square(counts.view(-1, 1024).sum(1), p.view(-1, 1024).sum(1))[2] > FALSE_ALARM


def test_control_a_grid_of_24_bits_is_caught() -> None:
    """Uniforms on a 2**-24 grid repeat in the winning tail, which the precision test above would notice."""
    words = bits(0, 0, torch.tensor([0]), torch.arange(2**22), SHARED)[0]
    coarse = (((words >> 40) & (2**24 - 1)).float() + 0.5) * 2.0**-24
    smallest = coarse.sort().values[:2000]
    assert len(smallest.unique()) < len(smallest)


def test_control_the_statistics_reject_weak_mixing() -> None:
    """The same tests on a hash without its first multiplication fail."""
    keys = noise.keys(3, 0, torch.arange(1000), SHARED)
    weak = (keys[:, None] + torch.arange(1000)) * noise.LANE_MULTIPLIER
    u = (noise._lshr(weak, 12).double() + 0.5) * 2.0**-52
    with pytest.raises(AssertionError):
        assert_independent(u[:, :-1], u[:, 1:])
