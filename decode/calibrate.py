"""Static trees fitted to a draft: how often the child of each rank is the right one, and the best tree for that.

`rank_counts` measures. `frontier` is the best tree of a size when ranks are right independently of one another (arXiv
2401.10774). `sequoia` is the best tree for measured step times when ranks are the same at every depth (arXiv 2402.12374).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from decode.draft import Draft
from decode.errors import UserError
from decode.tree import Static

Path = tuple[int, ...]  # ranks among the children of each node on the way


@torch.no_grad()
def rank_counts(
    draft: Draft,
    features: Tensor | None,
    tokens: Tensor,
    prompt: int,
    depth: int,
    width: int,
    temperature: float = 1.0,
    noise: Tensor | None = None,
) -> Tensor:
    """How often the token that the target chose was the draft's child of each rank, along one reply.

    Args:
        features: [1, T, F] of the whole text (None for a draft without layers), tokens: [1, T] prompt and reply.
        prompt: length of the prompt; at least one reply token must follow the root, tokens[:, prompt].
        temperature: of the draft's probabilities.
        noise: [T, Vd] of the position of each token, added to log q for rules with shared noise.

    Returns:
        [depth, width + 1] int64: entry [d, r] counts tokens of rank r at depth d + 1 after a path that was right so
        far; the last column counts those beyond `width`.
    """
    counts = torch.zeros(depth, width + 1, dtype=torch.int64)
    length = tokens.shape[1]
    columns = _columns(draft, tokens)  # [T], -1 outside the draft's vocabulary
    lengths = torch.tensor([prompt], device=tokens.device)
    first = None if features is None else features[:, :prompt]
    state, logits = draft.begin(first, tokens[:, : prompt + 1], lengths, length)
    one = torch.ones(1, dtype=torch.int64, device=tokens.device)
    for root in range(prompt, length - 1):
        for d in range(min(depth, length - 1 - root)):
            at = root + 1 + d  # the token to be guessed
            if d:
                parent = torch.full((1, 1), d - 1, device=tokens.device)
                logits = draft.extend(state, tokens[:, at - 1 : at], parent)
            scores = torch.log_softmax(logits[0, 0] / temperature, -1)
            scores = scores if noise is None else scores + noise[at]
            known = int(columns[at])
            rank = width if known < 0 else int((scores > scores[known]).sum())
            counts[d, min(rank, width)] += 1
        following = None if features is None else features[:, root : root + 1]
        logits = draft.commit(state, following, tokens[:, root + 1 : root + 2], one)
    return counts


def _columns(draft: Draft, tokens: Tensor) -> list[int]:
    if draft.vocabulary is None:
        return tokens[0].tolist()
    place = {token: column for column, token in enumerate(draft.vocabulary.tolist())}
    return [place.get(token, -1) for token in tokens[0].tolist()]


def rates(counts: Tensor) -> list[list[float]]:
    """[depth][width] share of each rank, from `rank_counts`; 0 at depths that were never seen."""
    return (counts[:, :-1] / counts.sum(1, keepdim=True).clamp(min=1)).tolist()


def frontier(acceptance: Sequence[Sequence[float]], size: int) -> Static:
    """The tree of `size` nodes, root included, with the largest expected number of accepted tokens.

    acceptance[d][r]: probability that the child of rank r at depth d + 1 is right, given that its parent is. A path is
    worth the product along it, which never grows with depth or rank where ranks are sorted, so the best next node is
    always a neighbour of the tree so far.
    """
    rows = [sorted(row, reverse=True) for row in acceptance]
    if not rows or not rows[0] or size < 2:
        raise UserError(f"calibration: a tree of {size} nodes needs at least one measured depth and two nodes")
    queue: list[tuple[float, int, Path]] = [(-rows[0][0], 1, (0,))]
    paths: list[Path] = []
    while queue and len(paths) < size - 1:
        value, _, path = heapq.heappop(queue)
        paths.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(rows[depth - 1]):
            above = value / rows[depth - 1][rank] if rows[depth - 1][rank] else 0.0
            heapq.heappush(queue, (above * rows[depth - 1][rank + 1], depth, (*path[:-1], rank + 1)))
        if depth < len(rows):
            heapq.heappush(queue, (value * rows[depth][0], depth + 1, (*path, 0)))
    return Static(paths)


def expected_length(plan: Static, acceptance: Sequence[Sequence[float]]) -> float:
    """Expected tokens per step of a static tree, bonus token included."""
    total = 1.0
    for path in plan.paths:
        value = 1.0
        for depth, rank in enumerate(path):
            value *= acceptance[depth][rank]
        total += value
    return total


def sequoia(
    ranks: Sequence[float], verify: Mapping[int, float], draft_level: float, depth: int
) -> tuple[Static, float]:
    """The tree with the most expected tokens per second.

    Args:
        ranks: probability that the child of each rank is right, taken to be the same at every depth.
        verify: seconds of a target forward by number of nodes (root included); only these sizes are tried.
        draft_level: seconds of one drafted level.
        depth: most drafted levels.

    Returns:
        the tree and its expected tokens per second.
    """
    if not verify or max(verify) < 2 or not ranks or depth < 1:
        raise UserError("calibration: needs ranks, a depth and the time of at least one tree of two nodes or more")

    @cache
    def best(nodes: int, levels: int) -> tuple[float, int]:
        """Expected tokens of the best subtree of `nodes` nodes and `levels` levels, and how many children its root has."""
        options = ((tokens(nodes, levels, children), children) for children in range(len(ranks) + 1))
        return max(options, key=lambda option: (option[0], -option[1]))

    @cache
    def tokens(nodes: int, levels: int, children: int) -> float:
        return split(nodes, levels, children)[0]

    @cache
    def split(nodes: int, levels: int, children: int) -> tuple[float, int]:
        """The same with exactly `children` children, and how many nodes stand under the last of them."""
        if children == 0:
            return (1.0 if nodes == 1 else -float("inf")), 0
        if nodes < children + 1 or levels < 2:
            return -float("inf"), 0
        options = (
            (tokens(nodes - last, levels, children - 1) + ranks[children - 1] * best(last, levels - 1)[0], last)
            for last in range(1, nodes)
        )
        return max(options, key=lambda option: (option[0], -option[1]))

    def paths(nodes: int, levels: int, prefix: Path) -> list[Path]:
        found: list[Path] = []
        for child in range(best(nodes, levels)[1], 0, -1):
            last = split(nodes, levels, child)[1]
            found += [(*prefix, child - 1), *paths(last, levels - 1, (*prefix, child - 1))]
            nodes -= last
        return found

    speeds = {
        (nodes, levels): best(nodes, levels)[0] / (verify[nodes] + (levels - 1) * draft_level)
        for nodes in verify
        for levels in range(2, depth + 2)
        if nodes >= 2 and best(nodes, levels)[0] > 0
    }
    nodes, levels = max(speeds, key=lambda key: speeds[key])
    return Static(paths(nodes, levels, ())), speeds[nodes, levels]
