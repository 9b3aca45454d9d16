"""Acceptance rules: which drafted tokens the target keeps, and which token comes next.

A rule is a pure function of (tree, logits, noise, positions, vocabulary).

- `logits` [B, n, V]: the target's at each node, after temperature and the processors of the node's own path; -inf is
  allowed. A `Rows` object gives one node a sequence at a time: then only the rows of visited nodes are processed.
- `positions` [B]: the absolute position of the token that the root chooses; depth d chooses for positions + d.
- `vocabulary` [Vd]: target ids of the draft's columns, no repeats. None: the same ids; sizes may differ by padding.

p is the target's law after a node, q the draft's, x a drafted token, relu(a) = max(a, 0), norm(a) = a / sum(a).
Sampling rules compute in float64 and only at the nodes of the walk. The order of siblings is their node order, which
must be the order in which they were drawn.

Uniforms of the accept tests hang on the position of the root, which no two steps share: `block` looks at the uniforms
of tokens that it then rejects, and a later step that met them again would be biased.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.errors import UserError
from decode.gpu import runs_kernels
from decode.noise import ACCEPT, RESIDUAL, Noise
from decode.tree import Tree

RANK_STRIDE = 1024  # uniform lane of a child: depth of its parent * RANK_STRIDE + rank; trees are far smaller
TYPICAL_THRESHOLD = 0.09
TYPICAL_ALPHA = 0.3


@dataclass
class Verdict:
    """path [B, D + 1] node ids from the root on, then -1; count [B] accepted drafts; token [B] the next token."""

    path: Tensor
    count: Tensor
    token: Tensor


class Rows(Protocol):
    """Target logits on request."""

    def row(self, nodes: Tensor, depth: int) -> Tensor:
        """Logits [B, V] at one node [B] of each sequence, all at this depth (rows of finished walks do not matter)."""

    def all(self) -> Tensor:
        """Logits [B, n, V] of all nodes."""


@dataclass
class Given:
    """Logits that exist already."""

    logits: Tensor

    def row(self, nodes: Tensor, depth: int) -> Tensor:
        return self.logits[torch.arange(len(nodes), device=nodes.device), nodes]

    def all(self) -> Tensor:
        return self.logits


def greedy(tree: Tree, logits: Tensor | Rows, noise: Noise, positions: Tensor, vocabulary: Tensor | None) -> Verdict:
    """A node chooses its argmax; a child that carries the choice is accepted."""
    if isinstance(logits, Tensor) and runs_kernels(logits):
        return _walk_on_gpu(tree, logits)
    if isinstance(logits, Tensor) and logits.device.type != "cpu":
        return follow(tree, logits.argmax(-1))
    return _match(tree, _rows(logits), lambda scores, depth: scores.max(-1).indices)


def gumbel(tree: Tree, logits: Tensor | Rows, noise: Noise, positions: Tensor, vocabulary: Tensor | None) -> Verdict:
    """A node chooses argmax(log p + g), g the shared noise of the position; a child with that token is accepted.

    What is committed depends on the target and the seed only: plain decoding with this noise gives the same tokens.
    Lossless for this comparison alone; u < p/q with shared noise is not.
    """
    if isinstance(logits, Tensor) and runs_kernels(logits):
        return _walk_on_gpu(tree, logits, noise, positions)
    if isinstance(logits, Tensor) and logits.device.type != "cpu":
        return follow(tree, gumbel_choices(tree, logits, noise, positions))

    def choose(scores: Tensor, depth: int) -> Tensor:
        shared = noise.gumbel(positions[:, None] + depth, scores.shape[-1])[:, 0]
        return (scores.float() + shared).max(-1).indices

    return _match(tree, _rows(logits), choose)


def rejection(tree: Tree, logits: Tensor | Rows, noise: Noise, positions: Tensor, vocabulary: Tensor | None) -> Verdict:
    """Children drawn without replacement: accept x if U < p[x] / q[x], else p = norm(relu(p - q)) and x leaves q.

    On a chain this is speculative sampling (arXiv 2211.17192), on trees the rule of Sequoia (arXiv 2402.12374).
    """

    def reject(p: Tensor, q: Tensor, x: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        return _either(turned, _residual(p, q), p), _without(q, x, turned)

    return _sample(tree, _rows(logits), noise, positions, vocabulary, reject)


def specinfer(tree: Tree, logits: Tensor | Rows, noise: Noise, positions: Tensor, vocabulary: Tensor | None) -> Verdict:
    """Children drawn with replacement: accept x if U < p[x] / q[x], else p = norm(relu(p - q)) (arXiv 2305.09781).

    A token drawn twice must be two nodes: each draw moves p.
    """

    def reject(p: Tensor, q: Tensor, x: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        return _either(turned, _residual(p, q), p), q

    return _sample(tree, _rows(logits), noise, positions, vocabulary, reject)


def deterministic(
    tree: Tree, logits: Tensor | Rows, noise: Noise, positions: Tensor, vocabulary: Tensor | None
) -> Verdict:
    """Children chosen without chance, q = 1: accept x if U < p[x], else p = norm(p without x)."""

    def reject(p: Tensor, q: Tensor, x: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        return _without(p, x, turned), q

    return _sample(tree, _rows(logits), noise, positions, None, reject, one_hot=True)


def block(tree: Tree, logits: Tensor | Rows, noise: Noise, positions: Tensor, vocabulary: Tensor | None) -> Verdict:
    """Block verification of a chain x_1 .. x_m (arXiv 2403.10444); node i is at depth i.

    P_0 = 1, P_i = min(P_{i-1} p(x_i) / q(x_i), 1); S_i = sum(relu(P_i p - q)) after x_i; h_i = S_i / (S_i + 1 - P_i),
    h_m = P_m. The longest prefix with U_i < h_i is accepted; next comes norm(relu(P_i p - q)), or p after x_m.
    """
    rows, (batch, n) = _rows(logits), tree.tokens.shape
    assert tree.q is not None, "block needs the draft's distributions: tree.q is None"
    uniforms = noise.uniform(positions, torch.arange(n, device=positions.device), ACCEPT)  # [B, n], column i for x_i
    joint = torch.ones(batch, 1, dtype=torch.float64, device=positions.device)  # P_i
    running = torch.ones(batch, dtype=torch.bool, device=positions.device)  # x_1 .. x_i were all drafted
    count = torch.zeros_like(positions)
    rest: Tensor | None = None
    for i in range(n):
        last = i + 1 == n
        scores = rows.row(torch.full_like(positions, i), i)
        width = _width(scores, tree, vocabulary)
        p = _law(scores, width)
        q = p if last else _draft_law(tree.q[:, i], vocabulary, width)
        follows = torch.zeros_like(running)  # x_{i+1} was drafted
        if not last:
            p_x, q_x = _at(p, tree.tokens[:, i + 1]), _at(q, tree.tokens[:, i + 1])
            follows = running & tree.valid[:, i + 1] & (q_x > 0)[:, 0]
        candidate = running & (uniforms[:, i] < joint[:, 0]) if i else running  # h_i <= P_i
        if not _none(candidate):
            ends = (running & ~follows)[:, None]  # i = m
            excess = (joint * p - q).clamp_min_(0)
            mass = excess.sum(-1, keepdim=True)  # S_i
            # No excess and P_i = 1 is p = q, and then P_{i+1} = 1 as well: a longer prefix is taken, whatever h_i is.
            threshold = torch.where(mass > 0, mass / (mass + 1 - joint), 0)
            threshold = torch.where(ends, joint, threshold)[:, 0]
            taken = candidate & (uniforms[:, i] < threshold) if i else candidate
            count = torch.where(taken, i, count)
            excess = _either(ends | (mass == 0), p, excess)
            rest = excess if rest is None else _either(taken[:, None], excess, rest)
        running = follows
        if last or _none(running):
            break
        joint = torch.where(running[:, None], (joint * p_x / q_x).clamp(max=1), 0)
    assert rest is not None  # the empty prefix is always taken
    node = torch.arange(n, device=positions.device)
    path = torch.where(node <= count[:, None], node, -1)
    return Verdict(path, count, _draw(rest, noise, positions + count))


def typical(
    tree: Tree,
    logits: Tensor | Rows,
    noise: Noise,
    positions: Tensor,
    vocabulary: Tensor | None,
    threshold: float = TYPICAL_THRESHOLD,
    alpha: float = TYPICAL_ALPHA,
) -> Verdict:
    """Lossy. Accept x if p[x] > min(threshold, alpha exp(-H)), H = -sum p log(p + 1e-5) (arXiv 2401.10774).

    The longest accepted path wins, the likelier among equals; the token behind it is drawn from p. Every node's row is
    read, in float32.
    """
    rows = _rows(logits)
    logits = rows.all()
    log_p = torch.log_softmax(logits.float(), -1)  # [B, n, V]
    p = log_p.exp()
    bar = (alpha * torch.exp((p * torch.log(p + 1e-5)).sum(-1))).clamp(max=threshold)  # [B, n]
    parents = tree.parents.clamp(min=0)
    tokens = tree.tokens.clamp(0, p.shape[-1] - 1)
    batch = torch.arange(len(positions), device=positions.device)[:, None]
    log_p_x = log_p[batch, parents, tokens]  # [B, n]
    agrees = tree.valid & (tree.tokens == tokens) & (log_p_x.exp() > bar.gather(1, parents))
    on_path = tree.ancestors & (tree.depths > 0)[:, None]
    # Clamped, for -inf * 0 is nan. A few float32 numbers add up exactly in float64, so equal paths stay equal.
    likelihood = (on_path * log_p_x.clamp(min=-1e4).double()[:, None]).sum(-1)
    path, count, end = _deepest(tree, agrees, likelihood)
    weights = torch.softmax(logits[batch[:, 0], end].double(), -1)
    return Verdict(path, count, _draw(weights, noise, positions + count))


def _walk_on_gpu(tree: Tree, logits: Tensor, noise: Noise | None = None, positions: Tensor | None = None) -> Verdict:
    """`_match` in two launches and without a host, for the argmax of logits [B, n, V], with noise or without."""
    from headtrain_kernels.tree_verify import tree_verify

    tokens, parents, depths, valid = (x.contiguous() for x in (tree.tokens, tree.parents, tree.depths, tree.valid))
    seed, sequences = (None, None) if noise is None else (noise.seed_on_device, noise.sequences)
    depth = _extent(tree)[0]
    return Verdict(*tree_verify(logits, tokens, parents, depths, valid, depth, seed, sequences, positions))


def gumbel_choices(tree: Tree, logits: Tensor, noise: Noise, positions: Tensor) -> Tensor:
    """argmax(log p + g) of every node, [B, n]: for accelerators, where all rows at once cost less than a walk."""
    at = positions[:, None] + torch.arange(_extent(tree)[0] + 1, device=positions.device)
    shared = noise.gumbel(at, logits.shape[-1])  # [B, D + 1, V]
    batch = torch.arange(len(positions), device=positions.device)[:, None]
    return (logits.float() + shared[batch, tree.depths]).argmax(-1)


def follow(tree: Tree, choices: Tensor) -> Verdict:
    """The verdict when every node's choice [B, n] is known: the deepest node whose whole path agrees with them."""
    agrees = tree.valid & (tree.tokens == choices.gather(1, tree.parents.clamp(min=0)))
    path, count, end = _deepest(tree, agrees, torch.zeros_like(tree.log_q))
    return Verdict(path, count, choices.gather(1, end[:, None])[:, 0])


def _deepest(tree: Tree, agrees: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """path, count and end [B] of the deepest node whose whole path agrees [B, n], by score [B, n] among equals."""
    agrees = agrees | (tree.depths == 0)
    whole = agrees & ~(tree.ancestors & ~agrees[:, None]).any(-1)
    depth = torch.where(whole, tree.depths, -1)
    count = depth.max(-1).values
    end = torch.where(depth == count[:, None], score, -torch.inf).max(-1).indices
    node = torch.arange(tree.num_nodes, device=end.device)
    on_path = tree.ancestors[torch.arange(len(end), device=end.device), end]  # [B, n]
    width = _extent(tree)[0] + 1
    path = torch.full((len(end), width + 1), -1, device=end.device)
    path.scatter_(1, torch.where(on_path, tree.depths, width), node.expand_as(on_path))
    return path[:, :width], count, end


def _match(tree: Tree, rows: Rows, choose: Callable[[Tensor, int], Tensor]) -> Verdict:
    """Walk down from the root for as long as a child carries the token that its parent chooses."""
    levels = _extent(tree)[0]
    node = torch.zeros_like(tree.tokens[:, 0])
    alive = node == 0
    path = torch.full((len(node), levels + 1), -1, device=node.device)
    path[:, 0] = 0
    token = node
    for depth in range(levels + 1):
        choice = choose(rows.row(node, depth), depth)
        token = torch.where(alive, choice, token)
        if depth == levels:
            break
        fits = (tree.parents == node[:, None]) & (tree.tokens == choice[:, None]) & tree.valid
        found, child = fits.max(-1)
        alive = alive & found
        if _none(alive):
            break
        node = torch.where(alive, child, node)
        path[:, depth + 1] = torch.where(alive, child, -1)
    return Verdict(path, (path >= 0).sum(-1) - 1, token)


def _sample(
    tree: Tree,
    rows: Rows,
    noise: Noise,
    positions: Tensor,
    vocabulary: Tensor | None,
    reject: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    one_hot: bool = False,
) -> Verdict:
    """Walk down from the root; at each node its children are tested in order, each against what the last one left.

    reject(p, q, x, turned) gives p and q after x [B, 1] was refused in the rows turned [B, 1]. `one_hot`: q[x] is 1.
    """
    assert one_hot or tree.q is not None, "this rule needs the draft's distributions: tree.q is None"
    (levels, ranks), n = _extent(tree), tree.num_nodes
    batch = torch.arange(len(positions), device=positions.device)
    node = torch.zeros_like(positions)
    alive = node == 0
    path = torch.full((len(node), levels + 1), -1, device=node.device)
    path[:, 0] = 0
    rest = None
    for depth in range(levels + 1):
        scores = rows.row(node, depth)
        width = scores.shape[-1] if one_hot else _width(scores, tree, vocabulary)
        p = _law(scores, width)
        moved = torch.zeros_like(alive)
        if depth < levels:
            children = _children(tree, node, ranks)  # [B, K], n where there is none
            lanes = depth * RANK_STRIDE + torch.arange(ranks, device=node.device)
            uniforms = noise.uniform(positions, lanes, ACCEPT)  # [B, K]
            q = p if one_hot or tree.q is None else _draft_law(tree.q[batch, node], vocabulary, width)
            parent = node
            for rank in range(ranks):
                tested = alive & ~moved & (children[:, rank] < n)
                if _none(tested):
                    break
                child = children[:, rank].clamp(max=n - 1)
                x = tree.tokens.gather(1, child[:, None])  # [B, 1]
                p_x = _at(p, x[:, 0])
                q_x = torch.ones_like(p_x) if one_hot else _at(q, x[:, 0])
                drawn = tested[:, None] & (q_x > 0)  # what the draft could not draw says nothing about its draws
                accepted = drawn & (p_x > 0) & (uniforms[:, rank : rank + 1] * q_x < p_x)
                turned = drawn & ~accepted
                if not _none(turned):
                    p, q = reject(p, q, x, turned)
                moved = moved | accepted[:, 0]
                parent = torch.where(accepted[:, 0], child, parent)
            node = parent
            path[:, depth + 1] = torch.where(moved, node, -1)
        rest = p if rest is None else _either(alive[:, None], p, rest)
        alive = moved
        if _none(alive):
            break
    assert rest is not None
    count = (path >= 0).sum(-1) - 1
    return Verdict(path, count, _draw(rest, noise, positions + count))


def _width(logits: Tensor, tree: Tree, vocabulary: Tensor | None) -> int:
    """W, how many ids p and q are laid out for: V, or Vd where the draft has columns beyond the target's."""
    columns = tree.q.shape[-1] if tree.q is not None and vocabulary is None else 0
    return max(logits.shape[-1], columns)


def _law(logits: Tensor, width: int) -> Tensor:
    """p, float64 [B, W], of logits [B, V]."""
    p = torch.softmax(logits.double(), -1)
    return torch.nn.functional.pad(p, (0, width - p.shape[-1])) if width > p.shape[-1] else p


def _draft_law(log_q: Tensor, vocabulary: Tensor | None, width: int) -> Tensor:
    """q, float64 [B, W] over target ids, of log q [B, Vd]; nan where a node was not expanded, which has no children."""
    q = torch.softmax(log_q.double(), -1)
    if vocabulary is not None:
        return q.new_zeros(len(q), width).index_copy_(-1, vocabulary, q)
    return torch.nn.functional.pad(q, (0, width - q.shape[-1])) if width > q.shape[-1] else q


def _at(law: Tensor, tokens: Tensor) -> Tensor:
    """law [B, W] at tokens [B], as [B, 1]; 0 for ids that it does not have."""
    inside = tokens.clamp(0, law.shape[-1] - 1)
    return torch.where(tokens == inside, law.gather(-1, inside[:, None])[:, 0], 0)[:, None]


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(relu(p - q)), or p where nothing is left (p = q up to rounding)."""
    excess = (p - q).clamp_min_(0)
    mass = excess.sum(-1, keepdim=True)
    return _either(mass > 0, excess.div_(mass), p)


def _without(law: Tensor, x: Tensor, turned: Tensor) -> Tensor:
    """norm(law without x [B, 1]) in the rows turned [B, 1]; a law that has nothing but x stays."""
    inside = x.clamp(0, law.shape[-1] - 1)
    left = law.scatter(-1, inside, torch.where(turned & (x == inside), 0, law.gather(-1, inside)))
    mass = left.sum(-1, keepdim=True)
    return _either(mass > 0, left.div_(mass), law)


def _children(tree: Tree, node: Tensor, ranks: int) -> Tensor:
    """Valid children of node [B] in node order, [B, K], then n."""
    n = tree.num_nodes
    own = (tree.parents == node[:, None]) & tree.valid
    return torch.where(own, torch.arange(n, device=node.device), n).sort(-1).values[:, :ranks]


def _draw(weights: Tensor, noise: Noise, positions: Tensor) -> Tensor:
    """One token [B] from weights [B, V] by inverting the cumulative sum, in float64."""
    cumulative = weights.cumsum(-1)
    u = noise.uniform(positions, torch.zeros_like(positions[:1]), RESIDUAL)  # [B, 1]
    token = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).clamp(max=weights.shape[-1] - 1)
    # A parallel sum may rise by rounding where the weight is 0.
    possible = weights.gather(-1, token) > 0
    return (token if _none(~possible) else torch.where(possible, token, weights.argmax(-1, keepdim=True)))[:, 0]


def _rows(logits: Tensor | Rows) -> Rows:
    return Given(logits) if isinstance(logits, Tensor) else logits


def _extent(tree: Tree) -> tuple[int, int]:
    """Bounds on the depth of the tree and on the children of a node."""
    most = tree.num_nodes - 1
    return min(most, tree.max_depth), min(most, tree.max_width)


def _either(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """torch.where over whole rows [B, W] by mask [B, 1], without the copy where a CPU sees that all rows agree."""
    if _none(~mask):
        return a
    return b if _none(mask) else torch.where(mask, a, b)


def _none(mask: Tensor) -> bool:
    """Whether the loop may end early. Only a CPU may ask: an accelerator would have to wait for the answer."""
    return mask.device.type == "cpu" and not bool(mask.any())


Verify = Callable[[Tree, "Tensor | Rows", Noise, Tensor, "Tensor | None"], Verdict]


@dataclass(frozen=True)
class Rule:
    """An acceptance rule and the trees it is right for.

    propose: children are the `top` of log q, the top of log q + `shared` noise, `independent` draws without replacement
    or `iid` draws with replacement. Noise of the last two must differ from step to step (`Noise.proposal`).
    shape: "any"; "drawn", where each node keeps its first draws, so that no child is dropped for what it is; "chain".
    """

    name: str
    propose: str
    shape: str
    needs_q: bool
    lossless: bool
    verify: Verify


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("greedy", "top", "any", False, True, greedy),
        Rule("gumbel", "shared", "any", False, True, gumbel),
        Rule("rejection", "independent", "drawn", True, True, rejection),
        Rule("specinfer", "iid", "drawn", True, True, specinfer),
        Rule("block", "independent", "chain", True, True, block),
        Rule("deterministic", "top", "any", False, True, deterministic),
        Rule("typical", "top", "any", False, False, typical),
    )
}


def check_rule(name: str | None, plan_is_chain: bool, temperature: float, drawn_in_order: bool = True) -> Rule:
    """The rule of this name, or the default (None): greedy at temperature 0, gumbel above.

    drawn_in_order: False if the plan drops or reorders children by their tokens or scores (dynamic trees), or skips
    ranks (a static tree with a child 1 but no child 0). UserError if the rule is unknown or does not fit.
    """
    if name is None:
        name = "greedy" if temperature == 0 else "gumbel"
    if name not in RULES:
        near = difflib.get_close_matches(str(name), RULES, n=1)
        raise UserError(f"rule {name!r} is unknown; " + (f"did you mean {near[0]!r}?" if near else _names()))
    rule = RULES[name]
    if name == "greedy" and temperature != 0:
        raise UserError(f"rule 'greedy' does not sample: set temperature 0 instead of {temperature}, or rule 'gumbel'")
    if name != "greedy" and temperature == 0:
        raise UserError(f"rule {name!r} samples and temperature is 0: use rule 'greedy' or a temperature above 0")
    if rule.shape == "chain" and not plan_is_chain:
        raise UserError(f"rule {name!r} is for chains: use a chain, or rule 'gumbel' or 'rejection' on this tree")
    if rule.shape == "drawn" and not drawn_in_order:
        raise UserError(
            f"rule {name!r} loses exactness when a tree keeps children by score: use a static tree without gaps in its "
            "ranks, or rule 'gumbel'"
        )
    return rule


def _names() -> str:
    return f"use one of {', '.join(RULES)}"
