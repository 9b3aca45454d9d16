"""Calibrated trees against exhaustive search, and the measurement against a loop over plain forwards."""

import itertools

import pytest
import torch

from decode.calibrate import expected_length, frontier, rank_counts, rates, sequoia
from decode.draft import ModelDraft
from decode.errors import UserError
from decode.forward import Forward
from decode.tree import Static
from tests.tiny import VOCAB_SIZE, tiny_target


def all_trees(depth: int, width: int, size: int):
    """Every prefix-closed set of paths in which ranks are filled from 0 on."""
    nodes = [path for d in range(1, depth + 1) for path in itertools.product(range(width), repeat=d)]
    for chosen in itertools.combinations(nodes, size - 1):
        known = {(), *chosen}
        if all(path[:-1] in known and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in known) for path in chosen):
            yield Static(chosen)


@pytest.mark.parametrize("size", [2, 4, 6])
def test_frontier_is_the_best_tree(size):
    generator = torch.Generator().manual_seed(size)
    for _ in range(5):
        rows = torch.rand(3, 2, generator=generator).sort(1, descending=True).values
        acceptance = (rows / (1.3 * rows.sum(1, keepdim=True))).tolist()
        best = max(expected_length(tree, acceptance) for tree in all_trees(3, 2, size))
        tree = frontier(acceptance, size)
        assert tree.num_nodes == size
        assert expected_length(tree, acceptance) == pytest.approx(best)


def test_sequoia_is_the_best_tree_for_the_step_times():
    generator = torch.Generator().manual_seed(1)
    for slope in (0.02, 0.3):
        ranks = (torch.rand(2, generator=generator).sort(descending=True).values * 0.5).tolist()
        verify = {n: 1 + slope * n for n in (2, 3, 5)}
        tree, speed = sequoia(ranks, verify, 0.1, depth=3)
        acceptance = [ranks] * 3
        speeds = {
            plan: expected_length(plan, acceptance) / (verify[n] + plan.depth * 0.1)
            for n in verify
            for plan in all_trees(3, 2, n)
        }
        assert speed == pytest.approx(max(speeds.values()))
        assert expected_length(tree, acceptance) / (verify[tree.num_nodes] + tree.depth * 0.1) == pytest.approx(speed)


def test_a_tree_of_one_rank_is_a_chain():
    assert frontier([[0.9], [0.8], [0.7]], 4).paths == ((0,), (0, 0), (0, 0, 0))
    with pytest.raises(UserError, match="at least one measured depth"):
        frontier([], 4)
    with pytest.raises(UserError, match="two nodes or more"):
        sequoia([0.5], {1: 1.0}, 0.1, 3)


def test_rank_counts_are_those_of_plain_forwards():
    target, small = tiny_target("llama"), tiny_target("llama", seed=1)
    draft = ModelDraft(small, VOCAB_SIZE)
    tokens = torch.randint(3, VOCAB_SIZE, (1, 14), generator=torch.Generator().manual_seed(0))
    prompt, depth, width = 5, 3, 4
    counts = rank_counts(draft, None, tokens, prompt, depth, width)
    logits = small(tokens).logits[0]
    expected = torch.zeros(depth, width + 1, dtype=torch.int64)
    for root in range(prompt, tokens.shape[1] - 1):
        for d in range(min(depth, tokens.shape[1] - 1 - root)):
            at = root + 1 + d
            rank = int((logits[at - 1] > logits[at - 1, tokens[0, at]]).sum())
            expected[d, min(rank, width)] += 1
    assert torch.equal(counts, expected)
    assert rates(counts)[0][0] == pytest.approx(float(counts[0, 0] / counts[0].sum()))
    assert Forward(target).vocab_size == VOCAB_SIZE
