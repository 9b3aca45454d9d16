"""Trees of drafted tokens and the plans by which they grow.

A plan says how many children each node gets. `Chain` and `Static` trees have one shape for all steps; a `Dynamic` tree
follows the draft's own probabilities (expand and rerank, arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError

MAX_NODES = 128  # two 64-bit words of ancestors per node


@dataclass
class Tree:
    """Drafted tokens of B sequences in breadth-first order: parents precede children, node 0 is the last committed token.

    tokens [B, n] int64; parents [B, n] int64, root -1; depths [B, n] int64, root 0;
    ancestors [B, n, n] bool, row v marks v, its ancestors and the root;
    log_q [B, n] float32, draft log-probability of the node's token after its parent (draft temperature applied), root 0;
    valid [B, n] bool, False marks padding, which is never accepted;
    q [B, n, Vd] float32 log-probabilities for the children of each node, -inf rows where a node was not expanded, or None;
    max_depth and max_width bound the depth and the children of a node, known without reading the device;
    scores [B, n] float32, what a dynamic tree kept its nodes for, greatest first, root 0; None for other plans.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    log_q: Tensor
    valid: Tensor
    q: Tensor | None = None
    max_depth: int = MAX_NODES
    max_width: int = MAX_NODES
    scores: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @staticmethod
    def root(tokens: Tensor) -> Tree:
        """Trees of one node, the last committed tokens [B]: what plain decoding verifies."""
        tokens = tokens[:, None]
        ones = torch.ones_like(tokens, dtype=torch.bool)
        zeros = torch.zeros_like(tokens)
        q = torch.full_like(tokens, -torch.inf, dtype=torch.float32)[:, :, None]  # no child was drawn
        return Tree(tokens, zeros - 1, zeros, ones[:, :, None], zeros.float(), ones, q, 0, 0)


@dataclass(frozen=True)
class Chain:
    """One drafted token a level."""

    depth: int

    def __post_init__(self) -> None:
        _check_size(self.depth >= 1, self.num_nodes, f"chain of depth {self.depth}")

    @property
    def num_nodes(self) -> int:
        return self.depth + 1

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "chain", "depth": self.depth}

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        return tuple((0,) * d for d in range(1, self.depth + 1))


@dataclass(frozen=True)
class Static:
    """A fixed shape: each path lists ranks among the children of each node on the way, e.g. [(0,), (1,), (0, 0)]."""

    paths: tuple[tuple[int, ...], ...]

    def __init__(self, paths: Iterable[Iterable[int]]):
        ordered: list[tuple[int, ...]] = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        _check_size(bool(ordered), len(ordered) + 1, "static tree")
        known: set[tuple[int, ...]] = {()}
        for path in ordered:
            if not path or any(not isinstance(rank, int) or rank < 0 for rank in path):
                raise UserError(f"static tree: path {list(path)} must be a non-empty list of ranks >= 0")
            if path in known:
                raise UserError(f"static tree: path {list(path)} occurs twice; each child may be listed once")
            if path[:-1] not in known:
                raise UserError(f"static tree: path {list(path)} needs its parent {list(path[:-1])} in the list")
            known.add(path)
        object.__setattr__(self, "paths", tuple(ordered))

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def num_nodes(self) -> int:
        return len(self.paths) + 1

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "static", "paths": [list(path) for path in self.paths]}


@dataclass(frozen=True)
class Dynamic:
    """Expand the `width` best nodes of each level by `width` children each, then keep the best `size` nodes of all.

    The score of a node is the sum over its path of log softmax(sharpness * (log q + noise_weight * g)); g is the shared
    noise of the position. (1, 0) is the plain cumulative log q.
    """

    depth: int
    width: int
    size: int
    """Nodes of the verified tree, the root included."""
    noise_weight: float = 0.0
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        what = f"dynamic tree of depth {self.depth}, width {self.width}, size {self.size}"
        _check_size(min(self.depth, self.width) >= 1 and self.size >= 2, self.size, what)
        candidates = 1 + self.width + (self.depth - 1) * self.width**2
        if self.size > candidates:
            raise UserError(f"{what}: only {candidates} nodes are ever grown; lower the size or raise depth or width")
        if not self.sharpness > 0:
            raise UserError(f"{what}: sharpness {self.sharpness} must be above 0")

    @property
    def num_nodes(self) -> int:
        return self.size

    def to_dict(self) -> dict[str, Any]:
        fields = ("depth", "width", "size", "noise_weight", "sharpness")
        return {"kind": "dynamic", **{name: getattr(self, name) for name in fields}}


Plan = Chain | Static | Dynamic


def from_dict(saved: dict[str, Any]) -> Plan:
    """The plan that `to_dict` wrote."""
    kinds: dict[str, type] = {"chain": Chain, "static": Static, "dynamic": Dynamic}
    fields = dict(saved)
    kind = fields.pop("kind", None)
    if kind not in kinds:
        raise UserError(f"tree: kind {kind!r} is unknown; use one of {', '.join(kinds)}")
    try:
        return kinds[kind](**fields)
    except TypeError as error:
        raise UserError(f"tree: {kind} with {', '.join(fields) or 'no fields'}: {error}") from None


def _check_size(positive: bool, nodes: int, what: str) -> None:
    if not positive:
        raise UserError(f"{what}: depth, width and the number of drafted nodes must be at least 1")
    if nodes > MAX_NODES:
        raise UserError(
            f"{what}: {nodes} nodes are more than the {MAX_NODES} that a step can hold; make the tree smaller"
        )


@dataclass
class Proposer:
    """How the children of a node are chosen from the draft's logits.

    mode: `top` the likeliest; `shared` the top of log q + g with the noise of the position, as the target will draw;
    `independent` the top of log q + noise of the node's own (drawing without replacement); `iid` draws with replacement.
    noise(depth, nodes, draw): Gumbel noise for the position `depth` behind the root, [B, Vd] in the draft's columns for
    `shared`, else [B, len(nodes), Vd] with a lane for each node id.
    """

    mode: str = "top"
    temperature: float = 1.0
    vocabulary: Tensor | None = None
    noise: Callable[[int, Tensor | None, int], Tensor] | None = None
    keep_q: bool = False

    def log_q(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits if self.temperature == 1.0 else logits / self.temperature, -1)

    def tokens(self, columns: Tensor) -> Tensor:
        return columns if self.vocabulary is None else self.vocabulary[columns]

    def choose(self, log_q: Tensor, depth: int, nodes: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Children of the parents `nodes` [m]: columns and log q, [B, m, count]. log_q [B, m or 1, Vd], 1: for all."""
        if self.mode == "top":
            values, columns = log_q.max(-1, keepdim=True) if count == 1 else log_q.topk(count, -1)
            return _spread(columns, len(nodes)), _spread(values, len(nodes))
        assert self.noise is not None, f"mode {self.mode} needs noise"
        log_q = _spread(log_q, len(nodes))
        if self.mode == "shared":
            columns = _top(log_q + self.noise(depth, None, 0)[:, None], count)
        elif self.mode == "independent":
            columns = _top(log_q + self.noise(depth, nodes, 0), count)
        else:
            assert self.mode == "iid", f"mode is {self.mode!r}"
            draws = [(log_q + self.noise(depth, nodes, draw)).argmax(-1) for draw in range(count)]
            columns = torch.stack(draws, -1)
        return columns, log_q.gather(-1, columns)


def _spread(x: Tensor, m: int) -> Tensor:
    return x if x.shape[1] == m else x.expand(-1, m, -1)


def _top(keys: Tensor, count: int) -> Tensor:
    return keys.argmax(-1, keepdim=True) if count == 1 else keys.topk(count, -1).indices


Extend = Callable[[Tensor, Tensor], Tensor]  # (tokens [B, m], parents [B, m]) -> logits [B, m or 1, Vd]


def grow(plan: Plan, root: Tensor, logits: Tensor, extend: Extend, proposer: Proposer) -> Tree:
    """Grow a tree behind the committed tokens `root` [B]; logits [B, 1, Vd] are the draft's for the root's children.

    `extend` is the draft's for one more level; the last level needs none. Nothing here waits for the device.
    """
    if isinstance(plan, Dynamic):
        return _grow_dynamic(plan, root, logits, extend, proposer)
    return _grow_static(plan, root, logits, extend, proposer)


@dataclass(frozen=True)
class _Level:
    """The parents of one level of a fixed shape: node ids, their parents as `extend` counts them, and their children."""

    nodes: Tensor  # [m]
    extend_parents: Tensor  # [1, m]
    count: int  # children chosen for each parent
    pick: Tensor | None  # [c] children in the tree, as parent * count + rank; None: all


@lru_cache(maxsize=64)
def _template(plan: Chain | Static, device: torch.device) -> tuple[Tensor, Tensor, Tensor, list[_Level]]:
    """parents [n], depths [n], ancestors [n, n] and the levels of a fixed shape."""
    paths = [(), *plan.paths]
    ids = {path: i for i, path in enumerate(paths)}
    parents = [ids[path[:-1]] if path else -1 for path in paths]
    ancestors = torch.eye(len(paths), dtype=torch.bool)
    for node in range(1, len(paths)):
        ancestors[node] |= ancestors[parents[node]]
    levels, extended = [], {0: 0}
    for depth in range(1, plan.depth + 1):
        children = [path for path in paths if len(path) == depth]
        nodes = sorted({ids[path[:-1]] for path in children})
        count = 1 + max(path[-1] for path in children)
        pick = [nodes.index(ids[path[:-1]]) * count + path[-1] for path in children]
        whole = pick == list(range(len(nodes) * count))
        extend_parents = [extended[parents[node]] if node else 0 for node in nodes]
        for node in nodes:
            extended.setdefault(node, len(extended))
        levels.append(
            _Level(
                torch.tensor(nodes, device=device),
                torch.tensor([extend_parents], device=device),
                count,
                None if whole else torch.tensor(pick, device=device),
            )
        )
    depths = torch.tensor([len(path) for path in paths], device=device)
    return torch.tensor(parents, device=device), depths, ancestors.to(device), levels


def _grow_static(plan: Chain | Static, root: Tensor, logits: Tensor, extend: Extend, proposer: Proposer) -> Tree:
    batch = len(root)
    parents, depths, ancestors, levels = _template(plan, root.device)
    tokens = root[:, None]  # [B, nodes so far]
    log_q = logits.new_zeros(batch, 1)
    q = logits.new_full((batch, len(parents), logits.shape[-1]), -torch.inf) if proposer.keep_q else None
    for depth, level in enumerate(levels, 1):
        if depth > 1:
            logits = extend(tokens[:, level.nodes], level.extend_parents.expand(batch, -1))
        level_q = proposer.log_q(logits)  # [B, m or 1, Vd]
        columns, values = (x.flatten(1) for x in proposer.choose(level_q, depth, level.nodes, level.count))
        if level.pick is not None:
            columns, values = columns[:, level.pick], values[:, level.pick]
        tokens = torch.cat([tokens, proposer.tokens(columns)], 1)
        log_q = torch.cat([log_q, values], 1)
        if q is not None:
            q[:, level.nodes] = level_q
    parents, depths, ancestors = (x.expand(batch, *x.shape) for x in (parents, depths, ancestors))
    width = max(level.count for level in levels)
    return Tree(tokens, parents, depths, ancestors, log_q, log_q > -torch.inf, q, plan.depth, width)


def _grow_dynamic(plan: Dynamic, root: Tensor, logits: Tensor, extend: Extend, proposer: Proposer) -> Tree:
    assert proposer.mode in ("top", "shared") and not proposer.keep_q, "reranking would bias drawn children"
    batch, width, device = len(root), plan.width, root.device
    beam = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # of the parents: 1 + index in the pool, root 0
    beam_score = logits.new_zeros(batch, 1)
    beam_tokens, extend_parents = root[:, None], beam
    # the pool of candidates, a list entry a level: tokens, parents (as in `beam`), log q and scores, [B, m * width]
    pool: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    seen, extended = 1, 0
    for depth in range(1, plan.depth + 1):
        m = beam.shape[1]
        first = 0  # number of the first parent, as `extend` counts: the root is 0
        if depth > 1:
            logits = extend(beam_tokens, extend_parents)
            first, extended = extended + 1, extended + m
        level_q = proposer.log_q(logits)
        columns, values = proposer.choose(level_q, depth, beam[0], min(width, level_q.shape[-1]))  # [B, m, width]
        gain = _gains(plan, level_q, depth, columns, proposer) if plan.noise_weight or plan.sharpness != 1 else values
        score = (gain + beam_score[:, :, None]).flatten(1)
        tokens = proposer.tokens(columns).flatten(1)
        pool.append((tokens, beam.repeat_interleave(columns.shape[2], 1), values.flatten(1), score))
        best = _best(score, width)
        beam_tokens, beam_score = tokens.gather(1, best), score.gather(1, best)
        extend_parents = best // columns.shape[2] + first
        beam = best + seen
        seen += score.shape[1]
    tokens, parents, log_q, score = (torch.cat(parts, 1) for parts in zip(*pool, strict=True))
    keep = _best(score, plan.size - 1).sort(1).values  # ascending, so parents stay in front of their children
    place = torch.zeros(batch, seen, dtype=torch.int64, device=device)  # pool index + 1 -> node id; root stays 0
    place.scatter_(1, keep + 1, torch.arange(1, keep.shape[1] + 1, device=device).expand(batch, -1))
    zero = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    parents = torch.cat([zero - 1, place.gather(1, parents.gather(1, keep))], 1)
    ancestors = _closure(parents, plan.depth)
    log_q = torch.cat([zero.to(log_q.dtype), log_q.gather(1, keep)], 1)
    score = torch.cat([zero.to(score.dtype), score.gather(1, keep)], 1)
    tokens = torch.cat([root[:, None], tokens.gather(1, keep)], 1)
    depths = ancestors.sum(-1) - 1
    return Tree(tokens, parents, depths, ancestors, log_q, score > -torch.inf, None, plan.depth, width, score)


def _gains(plan: Dynamic, log_q: Tensor, depth: int, columns: Tensor, proposer: Proposer) -> Tensor:
    """log softmax(sharpness * (log q + noise_weight * g)) of the chosen children, [B, m, width]."""
    if plan.noise_weight:
        assert proposer.noise is not None and proposer.mode == "shared", "noise_weight is for rules with shared noise"
        log_q = log_q + plan.noise_weight * proposer.noise(depth, None, 0)[:, None]
    return _spread(torch.log_softmax(plan.sharpness * log_q, -1), columns.shape[1]).gather(-1, columns)


def _best(score: Tensor, count: int) -> Tensor:
    """Indices [B, count] of the largest scores, the smaller index first among equals, so no child precedes its parent."""
    return score.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _closure(parents: Tensor, depth: int) -> Tensor:
    """Ancestor matrix [B, n, n] of parents [B, n]: paths double in length with each product."""
    n = parents.shape[1]
    nodes = torch.arange(n, device=parents.device)
    reach = ((parents[:, :, None] == nodes) | (nodes[:, None] == nodes)).float()
    length = 1
    while length < depth:
        reach = (reach @ reach > 0).float()
        length *= 2
    return reach > 0
