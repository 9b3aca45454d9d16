"""Oracles of the decoder's tests: slow rules for one sequence, exact laws by enumeration, and a chi-square test.

The toy model of the joint laws: p and q are tables over the last two tokens of the reply, so three tokens in a row
depend on one another. A context (a, b) of two tokens, -1 where there is none, has the number (a + 1) * (V + 1) + b + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decode.noise import ACCEPT, DRAFT, RESIDUAL, Noise
from decode.tree import Tree
from decode.verify import RANK_STRIDE, Verdict


@dataclass
class Row:
    """A row of a batch in plain lists: laws p[v][x] and q[v][x] over target ids, and its uniforms."""

    tokens: list[int]
    parents: list[int]
    valid: list[bool]
    p: list[list[float]]
    q: list[list[float]]
    uniform: Callable[[int, int], float]  # (depth of the parent, rank)
    chain_uniform: Callable[[int], float]
    final: Callable[[int], float]

    def children(self, v: int) -> list[int]:
        return [c for c in range(len(self.tokens)) if self.parents[c] == v and self.valid[c]]


def plain_row(tree: Tree, logits: Tensor, noise: Noise, positions: Tensor, vocabulary: Tensor | None, b: int) -> Row:
    n, size = tree.num_nodes, logits.shape[-1]
    p = [_softmax(row) for row in logits[b].double().tolist()]
    q = [[0.0] * max(size, tree.q.shape[-1]) for _ in range(n)] if tree.q is not None else []
    for v, row in enumerate(tree.q[b].double().tolist() if tree.q is not None else []):
        for column, mass in enumerate(_softmax(row)):
            q[v][column if vocabulary is None else int(vocabulary[column])] = mass
    at = positions[b : b + 1]
    alone = Noise(noise.seed, noise.sequences[b : b + 1])
    table = [alone.uniform(at, d * RANK_STRIDE + torch.arange(n), ACCEPT)[0].tolist() for d in range(n)]
    chain = alone.uniform(at, torch.arange(n), ACCEPT)[0].tolist()
    finals = [alone.uniform(at + d, torch.tensor([0]), RESIDUAL)[0, 0].item() for d in range(n)]
    lists = (tree.tokens[b].tolist(), tree.parents[b].tolist(), tree.valid[b].tolist())
    return Row(*lists, p, q, lambda d, r: table[d][r], lambda i: chain[i], lambda d: finals[d])


def choose_reference(s: Row, choices: list[int]) -> tuple[list[int], int]:
    """The walk of greedy and gumbel: choices[v] is the target's token after node v."""
    path = [0]
    while True:
        y = choices[path[-1]]
        fitting = [c for c in s.children(path[-1]) if s.tokens[c] == y]
        if not fitting:
            return path, y
        path.append(fitting[0])


def sampled_reference(s: Row, rule: str) -> tuple[list[int], int]:
    """rejection, specinfer and deterministic."""
    path = [0]
    while True:
        v, depth = path[-1], len(path) - 1
        p, q = list(s.p[v]), list(s.q[v]) if rule != "deterministic" else []
        accepted = None
        for rank, c in enumerate(s.children(v)):
            x = s.tokens[c]
            p_x = p[x] if x < len(p) else 0.0
            q_x = 1.0 if rule == "deterministic" else q[x]
            if q_x == 0:
                continue
            if s.uniform(depth, rank) * q_x < p_x:
                accepted = c
                break
            if rule == "deterministic":
                p = _normal([0.0 if y == x else mass for y, mass in enumerate(p)]) or p
            else:
                p = _normal([max(mass - q[y], 0.0) for y, mass in enumerate(p)]) or p
            if rule == "rejection":
                q = _normal([0.0 if y == x else mass for y, mass in enumerate(q)]) or [0.0] * len(q)
        if accepted is None:
            return path, _invert(p, s.final(depth))
        path.append(accepted)


def block_reference(s: Row) -> tuple[list[int], int]:
    """The definition: every P, S and h first, then the largest accepted i."""
    m = 0
    while m + 1 < len(s.tokens) and s.valid[m + 1] and s.q[m][s.tokens[m + 1]] > 0:
        m += 1
    joint = [1.0]
    for i in range(1, m + 1):
        x = s.tokens[i]
        p_x = s.p[i - 1][x] if x < len(s.p[i - 1]) else 0.0
        joint.append(min(joint[-1] * p_x / s.q[i - 1][x], 1.0))
    excess = [[max(joint[i] * mass - s.q[i][y], 0.0) for y, mass in enumerate(s.p[i])] for i in range(m)]
    h = []
    for i in range(m):
        total = sum(excess[i])
        h.append(total / (total + 1 - joint[i]) if total > 0 else float(joint[i] >= 1))
    h.append(joint[m])
    tau = max([i for i in range(1, m + 1) if s.chain_uniform(i) < h[i]], default=0)
    law = s.p[tau] if tau == m or sum(excess[tau]) == 0 else excess[tau]
    return list(range(tau + 1)), _invert(law, s.final(tau))


def typical_reference(s: Row, threshold: float, alpha: float) -> tuple[list[int], int]:
    """The longest accepted path of all, the likelier among equals."""
    best: tuple[int, float] = (-1, 0.0)
    longest: list[int] = []
    for leaf in range(len(s.tokens)):
        path = [leaf]
        while s.parents[path[0]] >= 0:
            path.insert(0, s.parents[path[0]])
        if path[0] != 0:
            continue
        good, log_likelihood = True, 0.0
        for v, c in zip(path, path[1:], strict=False):
            p = s.p[v]
            entropy = -sum(mass * math.log(mass + 1e-5) for mass in p)
            p_x = p[s.tokens[c]] if s.tokens[c] < len(p) else 0.0
            good = good and s.valid[c] and p_x > min(threshold, alpha * math.exp(-entropy))
            log_likelihood += math.log(p_x) if p_x > 0 else -math.inf
        if good and (len(path), log_likelihood) > best:
            best, longest = (len(path), log_likelihood), path
    return longest, _invert(s.p[longest[-1]], s.final(len(longest) - 1))


def _softmax(row: list[float]) -> list[float]:
    top = max(row)
    if top == -math.inf:
        return [0.0] * len(row)
    mass = [math.exp(value - top) for value in row]
    return [value / sum(mass) for value in mass]


def _normal(law: list[float]) -> list[float] | None:
    total = sum(law)
    return [mass / total for mass in law] if total > 0 else None


def _invert(weights: list[float], u: float) -> int:
    total, reached = sum(weights), 0.0
    for x, weight in enumerate(weights):
        reached += weight
        if weight > 0 and reached > u * total:
            return x
    raise AssertionError("u is at least 1")


@dataclass
class Toy:
    """p [C, V] and q [C, Vd] logits by context; `vocabulary` [Vd] as in verify; `told` [C, Vd]: the q reported."""

    p: Tensor
    q: Tensor
    vocabulary: Tensor | None = None
    told: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.p.shape[-1]

    @staticmethod
    def random(num_tokens: int, generator: torch.Generator, drafted: int | None = None, apart: float = 1.5) -> Toy:
        """q is p moved by `apart` nats a token. With `drafted`, the draft knows only that many tokens, ascending."""
        contexts = (num_tokens + 1) ** 2
        p = 1.3 * torch.randn(contexts, num_tokens, generator=generator)
        q = p + apart * torch.randn(contexts, num_tokens, generator=generator)
        if drafted is None:
            return Toy(p, q)
        vocabulary = torch.randperm(num_tokens, generator=generator)[:drafted].sort().values
        return Toy(p, q[:, vocabulary], vocabulary)

    def next_context(self, context: Tensor, token: Tensor) -> Tensor:
        return context % (self.num_tokens + 1) * (self.num_tokens + 1) + token + 1

    def joint(self, length: int) -> Tensor:
        """Exact law of the next `length` tokens, float64 [V ** length], the first token slowest."""
        law, context = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
        tokens = torch.arange(self.num_tokens)
        for _ in range(length):
            law = (law[:, None] * torch.softmax(self.p[context].double(), -1)).flatten()
            context = self.next_context(context[:, None], tokens).flatten()
        return law


def random_shape(generator: torch.Generator, depth: int = 3, width: int = 3, size: int = 10) -> list[int]:
    """Parents of a tree in breadth-first order, the root's -1, with at least one node that has two children."""
    while True:
        parents, level = [-1], [0]
        for d in range(depth):
            following = []
            for v in level:
                children = int(torch.randint(1 if d == 0 else 0, width + 1, (), generator=generator))
                for _ in range(min(children, size - len(parents))):
                    following.append(len(parents))
                    parents.append(v)
            level = following
        if len(level) and len(set(parents)) < len(parents):
            return parents


def shape_of(parents: list[int], batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """parents and depths [B, n], ancestors [B, n, n], the same for every row."""
    n = len(parents)
    depths, ancestors = [0] * n, torch.eye(n, dtype=torch.bool)
    for v in range(1, n):
        depths[v] = depths[parents[v]] + 1
        ancestors[v] |= ancestors[parents[v]]
    return (
        torch.tensor(parents).expand(batch, n),
        torch.tensor(depths).expand(batch, n),
        ancestors.expand(batch, n, n),
    )


def propose(
    toy: Toy, parents: list[int], mode: str, context: Tensor, noise: Noise, positions: Tensor
) -> tuple[Tree, Tensor]:
    """Draw a tree of this shape behind contexts [B]; also the target's logits [B, n, V] at its nodes."""
    batch, n = len(context), len(parents)
    expanded = shape_of(parents, batch)
    draw = noise.proposal(positions, toy.q.shape[-1] if toy.vocabulary is None else toy.num_tokens, toy.vocabulary)
    tokens = torch.zeros(batch, n, dtype=torch.int64)
    contexts = context[:, None].repeat(1, n)
    log_q = torch.log_softmax(toy.q, -1)
    values = torch.zeros(batch, n)
    for v in range(n):
        children = [c for c in range(n) if parents[c] == v]
        if not children:
            continue
        own = log_q[contexts[:, v]]  # [B, Vd]
        if mode == "iid":
            nodes = torch.tensor([v])
            columns = torch.stack([(own + draw(0, nodes, i)[:, 0]).argmax(-1) for i in range(len(children))], 1)
        else:
            keys = own
            if mode == "shared":
                keys = own + draw(int(expanded[1][0, v]) + 1, None, 0)
            elif mode == "independent":
                keys = own + draw(0, torch.tensor([v]), 0)[:, 0]
            columns = keys.topk(len(children), -1).indices
        tokens[:, children] = columns if toy.vocabulary is None else toy.vocabulary[columns]
        values[:, children] = own.gather(1, columns)
        contexts[:, children] = toy.next_context(contexts[:, v : v + 1], tokens[:, children])
    q = torch.log_softmax(toy.q if toy.told is None else toy.told, -1)[contexts]
    return Tree(tokens, *expanded, values, values > -torch.inf, q), toy.p[contexts]


Step = Callable[[Tree, Tensor, Noise, Tensor, "Tensor | None"], Verdict]


def sample(
    toy: Toy,
    shape: list[int],
    mode: str,
    verify: Step,
    draws: int,
    seed: int,
    length: int = 3,
    chunk: int = 50_000,
    alter: Callable[[Tree], Tree] | None = None,
    prompt: int = 5,
) -> Tensor:
    """The next `length` tokens [draws, length] of as many independent sequences, step by step as an engine would.

    `alter` changes each drawn tree before it is verified.
    """
    parts = []
    for start in range(0, draws, chunk):
        names = torch.arange(start, min(start + chunk, draws))
        context = torch.zeros_like(names)
        count = torch.zeros_like(names)
        out = torch.zeros(len(names), length + max(shape_of(shape, 1)[1][0].tolist()) + 1, dtype=torch.int64)
        rows = names - start
        while len(rows):
            noise, positions = Noise(seed, names[rows]), prompt + count[rows]
            tree, logits = propose(toy, shape, mode, context[rows], noise, positions)
            tree = alter(tree) if alter else tree
            verdict = verify(tree, logits, noise, positions, toy.vocabulary)
            nodes = torch.nn.functional.pad(verdict.path[:, 1:].clamp(min=0), (0, 1))
            drafted = tree.tokens.gather(1, nodes)
            for i in range(int(verdict.count.max()) + 1):
                token = torch.where(verdict.count > i, drafted[:, i], verdict.token)
                active = rows[verdict.count >= i]
                token = token[verdict.count >= i]
                out[active, count[active]] = token
                context[active] = toy.next_context(context[active], token)
                count[active] += 1
            rows = rows[count[rows] < length]
        parts.append(out[:, :length])
    return torch.cat(parts)


def plain_gumbel(toy: Toy, draws: int, seed: int, length: int = 3, prompt: int = 5) -> Tensor:
    """What plain decoding with the shared noise gives, [draws, length]."""
    noise, context, out = Noise(seed, torch.arange(draws)), torch.zeros(draws, dtype=torch.int64), []
    for i in range(length):
        shared = noise.gumbel(torch.full((draws, 1), prompt + i), toy.num_tokens)[:, 0]
        out.append((toy.p[context] + shared).argmax(-1))
        context = toy.next_context(context, out[-1])
    return torch.stack(out, 1)


def chi_square(counts: Tensor, law: Tensor, least: float = 8.0) -> tuple[float, int, float]:
    """Statistic, degrees of freedom and p-value of counts [cells] against a law [cells].

    Cells expected below `least` times are put together. A count where the law has no mass gives p-value 0.
    """
    expected = law.double() * counts.sum()
    if bool((counts[law == 0] > 0).any()):
        return math.inf, 0, 0.0
    counts, expected = counts[law > 0].double(), expected[law > 0]
    small = expected < least
    if bool(small.any()):
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return statistic, freedom, float(torch.special.gammaincc(half[0], half[1])) if freedom else 1.0


def joint_p_values(toy: Toy, tokens: Tensor, lengths: tuple[int, ...] = (2, 3)) -> list[float]:
    """p-values of the joint law of the first two and the first three of tokens [draws, 3]."""
    values = []
    for length in lengths:
        cell = torch.zeros(len(tokens), dtype=torch.int64)
        for i in range(length):
            cell = cell * toy.num_tokens + tokens[:, i]
        counts = torch.bincount(cell, minlength=toy.num_tokens**length)
        values.append(chi_square(counts, toy.joint(length))[2])
    return values


def block_vectorised(scaled: bool, fresh: bool = True) -> Step:
    """Block verification from its definition on batches without padding.

    Wrong if not `scaled` (the residual forgets P) or not `fresh` (uniforms hang on the drafted position, so a step
    meets those that the last one has looked at).
    """

    def verify(tree: Tree, logits: Tensor, noise: Noise, positions: Tensor, vocabulary: Tensor | None) -> Verdict:
        assert vocabulary is None and tree.q is not None
        batch, n = tree.tokens.shape
        p, q = torch.softmax(logits.double(), -1), torch.softmax(tree.q.double(), -1)
        lanes = torch.arange(n)
        if fresh:
            u = noise.uniform(positions, lanes, ACCEPT)
        else:
            u = torch.cat([noise.uniform(positions + i - 1, lanes[:1], ACCEPT) for i in range(n)], 1)
        following = tree.tokens[:, 1:, None]
        ratio = (p[:, :-1].gather(2, following) / q[:, :-1].gather(2, following))[..., 0]
        joint = torch.ones(batch, n, dtype=torch.float64)
        for i in range(1, n):
            joint[:, i] = (joint[:, i - 1] * ratio[:, i - 1]).clamp(max=1)
        excess = (joint[:, :-1, None] * p[:, :-1] - q[:, :-1]).clamp(min=0)
        total = excess.sum(-1)
        h = torch.cat([total / (total + 1 - joint[:, :-1]), joint[:, -1:]], 1)
        taken = u < h
        taken[:, 0] = True
        tau = torch.where(taken, lanes, 0).max(-1).values
        residual = excess if scaled else (p[:, :-1] - q[:, :-1]).clamp(min=0)
        law = torch.cat([residual, p[:, -1:]], 1)[torch.arange(batch), tau]
        law = torch.where(law.sum(-1, keepdim=True) > 0, law, p[torch.arange(batch), tau])
        u_final = noise.uniform(positions + tau, lanes[:1], RESIDUAL)
        total = law.cumsum(-1)
        token = torch.searchsorted(total, u_final * total[:, -1:], right=True)[:, 0]
        return Verdict(torch.where(lanes <= tau[:, None], lanes, -1), tau, token)

    return verify


def per_path_draws(tree: Tree, logits: Tensor, noise: Noise, positions: Tensor, vocabulary: Tensor | None) -> Verdict:
    """Wrong: every leaf draws the target's tokens along its own path, and the longest agreement wins."""
    batch, n = tree.tokens.shape
    parents, depths = tree.parents[0].tolist(), tree.depths[0].tolist()
    best, ids = torch.full((batch,), -1), torch.full((1, 1), 10_000)
    path, token = torch.full((batch, n), -1), torch.zeros(batch, dtype=torch.int64)
    for leaf in set(range(n)) - set(parents):
        nodes = [leaf]
        while nodes[0]:
            nodes.insert(0, parents[nodes[0]])
        alive = torch.ones(batch, dtype=torch.bool)
        length, last = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
        for d, v in enumerate(nodes):
            drawn = noise.gumbel(positions[:, None] + d, logits.shape[-1], DRAFT, ids + leaf)[:, 0]
            choice = (logits[:, v] + drawn).argmax(-1)
            last = torch.where(alive, choice, last)
            if d + 1 < len(nodes):
                alive = alive & (tree.tokens[:, nodes[d + 1]] == choice)
                length = length + alive
        better = length > best
        own = torch.tensor(nodes + [-1] * (n - len(nodes)))
        path = torch.where(better[:, None], torch.where(torch.arange(n) <= length[:, None], own, -1), path)
        token, best = torch.where(better, last, token), torch.where(better, length, best)
    assert max(depths) < n
    return Verdict(path, best, token)


def keep_likeliest(size: int) -> Callable[[Tree], Tree]:
    """Drop (mark invalid) all but the `size` nodes of largest cumulative log q, as reranking a dynamic tree does."""

    def alter(tree: Tree) -> Tree:
        score = (tree.ancestors * tree.log_q.clamp(min=-1e4)[:, None]).sum(-1)
        rank = score.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        return replace(tree, valid=tree.valid & (rank < size))

    return alter


def merge_twins(tree: Tree) -> Tree:
    """Drop (mark invalid) children that repeat the token of an earlier sibling, and what hangs on them."""
    n = tree.num_nodes
    twins = (tree.parents[:, :, None] == tree.parents[:, None]) & (tree.tokens[:, :, None] == tree.tokens[:, None])
    repeats = (twins & torch.ones(n, n, dtype=torch.bool).tril(-1)).any(-1)
    return replace(tree, valid=tree.valid & ~(tree.ancestors & repeats[:, None]).any(-1))
