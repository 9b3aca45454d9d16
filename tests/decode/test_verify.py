"""decode/verify.py: every rule against a plain loop over one sequence with equal uniforms, and its edges."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode import verify
from decode.errors import UserError
from decode.noise import Noise
from decode.tree import Tree
from decode.verify import RULES, TYPICAL_ALPHA, TYPICAL_THRESHOLD, Given, Verdict, check_rule, follow, gumbel_choices
from tests.decode.enumeration import (
    block_reference,
    block_vectorised,
    choose_reference,
    plain_row,
    sampled_reference,
    shape_of,
    typical_reference,
)

INF = math.inf


def random_parents(n: int, generator: torch.Generator, chain: bool) -> list[int]:
    """In breadth-first order."""
    if chain:
        return list(range(-1, n - 1))
    depths, parents = [0], [-1]
    for _ in range(n - 1):
        candidates = [v for v in range(len(parents)) if depths[v] >= depths[-1] - 1 and v >= max(parents)]
        parents.append(candidates[int(torch.randint(len(candidates), (), generator=generator))])
        depths.append(depths[parents[-1]] + 1)
    return parents


def random_case(
    seed: int, batch: int, n: int, size: int, columns: int, reduced: bool, chain: bool = False
) -> tuple[Tree, Tensor, Noise, Tensor, Tensor | None]:
    """Trees with padding, twins, tokens that the draft cannot draw and targets that exclude tokens; rows differ."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    trees = [shape_of(random_parents(n, generator, chain), 1) for _ in range(batch)]
    parents, depths, ancestors = (torch.cat(parts) for parts in zip(*trees, strict=True))
    vocabulary = torch.randperm(size, generator=generator)[:columns].sort().values if reduced else None
    logits = 2 * torch.randn(batch, n, size, generator=generator)
    logits[uniform(batch, n, size) < 0.2] = -INF
    logits[..., 0] = logits[..., 0].clamp(min=-3)
    guess = torch.randn(batch, n, columns, generator=generator)
    shared = min(size, columns)
    guess[..., :shared] += (logits[..., :shared] if vocabulary is None else logits[..., vocabulary]).clamp(min=-4)
    guess[uniform(batch, n, columns) < 0.1] = -INF
    guess[..., 0] = guess[..., 0].clamp(min=-3)
    q = torch.log_softmax(guess, -1)
    drawn = torch.multinomial(q.exp().flatten(0, 1), n, replacement=True, generator=generator).view(batch, n, n)
    column = drawn.gather(1, parents.clamp(min=0)[..., None].expand(-1, -1, n)).diagonal(dim1=1, dim2=2)
    anything = torch.randint(columns, (batch, n), generator=generator)
    column = torch.where(uniform(batch, n) < 0.1, anything, column)
    tokens = column if vocabulary is None else vocabulary[column]
    bad = (uniform(batch, n) < 0.15) & (depths > 0)
    valid = ~(ancestors & bad[:, None]).any(-1)
    tokens = torch.where(valid, tokens, torch.where(uniform(batch, n) < 0.5, 0, -1))
    leaf = ~(parents[:, None] == torch.arange(n)[:, None]).any(-1)
    q = q.masked_fill(leaf[..., None], -INF)
    tree = Tree(tokens, parents, depths, ancestors, torch.zeros(batch, n), valid, q)
    positions = torch.randint(1000, (batch,), generator=generator)
    return tree, logits, Noise(seed, torch.randperm(batch, generator=generator)), positions, vocabulary


SIZES = [(1, 5, 5, False), (6, 8, 5, True), (7, 6, 9, False), (9, 7, 4, False), (12, 6, 6, False)]


def reference(name: str, case: tuple[Tree, Tensor, Noise, Tensor, Tensor | None], b: int) -> tuple[list[int], int]:
    tree, logits, noise, positions, vocabulary = case
    one = plain_row(tree, logits, noise, positions, vocabulary, b)
    if name in ("greedy", "gumbel"):
        scores = logits[b].clone()
        if name == "gumbel":
            for v in range(tree.num_nodes):
                at = (positions[b] + tree.depths[b, v]).view(1, 1)
                scores[v] += Noise(noise.seed, noise.sequences[b : b + 1]).gumbel(at, logits.shape[-1])[0, 0]
        return choose_reference(one, scores.argmax(-1).tolist())
    if name == "block":
        return block_reference(one)
    if name == "typical":
        return typical_reference(one, TYPICAL_THRESHOLD, TYPICAL_ALPHA)
    return sampled_reference(one, name)


def assert_same(verdict: Verdict, b: int, expected: tuple[list[int], int], what: str) -> None:
    path, token = expected
    got = [v for v in verdict.path[b].tolist() if v >= 0]
    assert got == path, f"{what}: path {got}, expected {path}"
    assert verdict.count[b] == len(path) - 1, what
    assert verdict.token[b] == token, f"{what}: token {int(verdict.token[b])}, expected {token}"


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n, size, columns, reduced", SIZES)
def test_rule_against_the_loop(name: str, n: int, size: int, columns: int, reduced: bool) -> None:
    accepted = 0
    for seed in range(4):
        case = random_case(seed, 12, n, size, columns, reduced, chain=RULES[name].shape == "chain")
        verdict = RULES[name].verify(*case)
        assert verdict.path.dtype == verdict.token.dtype == verdict.count.dtype == torch.int64
        for b in range(12):
            assert_same(verdict, b, reference(name, case, b), f"{name}, seed {seed}, row {b}")
        accepted += int(verdict.count.sum())
    assert accepted > 0 or n == 1


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(RULES)), st.integers(0, 10**6), st.integers(1, 14), st.integers(2, 9), st.booleans())
def test_any_tree_against_the_loop(name: str, seed: int, n: int, size: int, chain: bool) -> None:
    case = random_case(seed, 2, n, size, size, False, chain or RULES[name].shape == "chain")
    verdict = RULES[name].verify(*case)
    for b in range(2):
        assert_same(verdict, b, reference(name, case, b), name)


@pytest.mark.parametrize("name", RULES)
def test_bounds_on_depth_and_width_change_nothing_but_the_padding(name: str) -> None:
    tree, *rest = random_case(3, 16, 8, 6, 6, False, chain=RULES[name].shape == "chain")
    loose = RULES[name].verify(tree, *rest)
    twins = tree.parents[:, :, None] == tree.parents[:, None]
    bounded = replace(tree, max_depth=int(tree.depths.max()), max_width=int(twins.sum(-1).max()))
    tight = RULES[name].verify(bounded, *rest)
    assert torch.equal(loose.token, tight.token) and torch.equal(loose.count, tight.count)
    assert torch.equal(loose.path[:, : tight.path.shape[1]], tight.path) or name == "block"


@pytest.mark.parametrize("name", RULES)
def test_rows_do_not_depend_on_their_batch(name: str) -> None:
    tree, logits, noise, positions, vocabulary = random_case(5, 8, 7, 6, 6, False, chain=RULES[name].shape == "chain")
    together = RULES[name].verify(tree, logits, noise, positions, vocabulary)
    for b in range(8):
        row = slice(b, b + 1)
        fields = (tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.log_q, tree.valid, tree.q)
        alone = Tree(*(field[row] for field in fields))
        one = RULES[name].verify(alone, logits[row], noise.select(torch.tensor([b])), positions[row], vocabulary)
        assert torch.equal(one.path[0], together.path[b]) and one.token[0] == together.token[b]


class Spy(Given):
    """Gives rows one at a time and counts the nodes that were asked for."""

    def __init__(self, logits: Tensor):
        super().__init__(logits)
        self.visits: list[tuple[Tensor, int]] = []

    def row(self, nodes: Tensor, depth: int) -> Tensor:
        self.visits.append((nodes, depth))
        return super().row(nodes, depth)

    def all(self) -> Tensor:
        raise AssertionError("a walk needs no more than its own nodes")


@pytest.mark.parametrize("name", [name for name in RULES if name != "typical"])
def test_only_visited_nodes_are_read(name: str) -> None:
    tree, logits, noise, positions, vocabulary = random_case(6, 1, 12, 6, 6, False, chain=RULES[name].shape == "chain")
    spy = Spy(logits)
    verdict = RULES[name].verify(tree, spy, noise, positions, vocabulary)
    assert torch.equal(verdict.token, RULES[name].verify(tree, logits, noise, positions, vocabulary).token)
    read = [int(nodes[0]) for nodes, _ in spy.visits]
    assert all(int(tree.depths[0, nodes[0]]) == depth for nodes, depth in spy.visits)
    if name != "block":  # which must look past what it rejects
        assert read == verdict.path[0, : verdict.count[0] + 1].tolist()


@pytest.mark.parametrize("name", ["greedy", "gumbel"])
def test_the_form_for_accelerators_agrees_with_the_walk(name: str) -> None:
    """On trees without twins, where most children carry their parent's choice; bounds on the depth loose and tight."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        tree, logits, noise, positions, _ = random_case(seed, 10, 9, 40, 40, False)
        if seed % 2:
            tree = replace(tree, max_depth=int(tree.depths.max()))
        choices = gumbel_choices(tree, logits, noise, positions) if name == "gumbel" else logits.argmax(-1)
        tokens = torch.rand(10, 40, generator=generator).argsort(-1)[:, :9]
        hit = torch.rand(10, 9, generator=generator) < 0.7
        tokens = torch.where(hit, choices.gather(1, tree.parents.clamp(min=0)), tokens)
        twins = (tree.parents[:, :, None] == tree.parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
        first = ~(twins & torch.ones(9, 9, dtype=torch.bool).tril(-1)).any(-1)
        valid = ~(tree.ancestors & ~(tree.valid & first)[:, None]).any(-1)
        tree = replace(tree, tokens=tokens, valid=valid)
        walk, jump = RULES[name].verify(tree, logits, noise, positions, None), follow(tree, choices)
        assert torch.equal(walk.path, jump.path) and torch.equal(walk.token, jump.token)
        assert torch.equal(walk.count, jump.count) and int(walk.count.sum()) > 0


def star(tokens: list[int], q: Tensor | None = None, valid: list[bool] | None = None) -> Tree:
    """A root with these children."""
    n = len(tokens) + 1
    parents, depths, ancestors = shape_of([-1] + [0] * (n - 1), 1)
    return Tree(
        torch.tensor([[0, *tokens]]),
        parents,
        depths,
        ancestors,
        torch.zeros(1, n),
        torch.tensor([[True, *(valid or [True] * (n - 1))]]),
        None if q is None else q.expand(1, n, -1),
    )


def with_uniforms(monkeypatch: pytest.MonkeyPatch, value: float) -> Noise:
    noise = Noise(0, [0])
    monkeypatch.setattr(
        noise, "uniform", lambda positions, lanes, stream: torch.full((1, len(lanes)), value, dtype=torch.float64)
    )
    return noise


AT = torch.tensor([10])
SAMPLING = ["rejection", "specinfer", "block", "deterministic"]


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_a_token_outside_the_support_is_never_accepted(name: str, u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with U = 0, which the noise cannot give; the next token is then one that the target allows."""
    logits = torch.tensor([-INF, 1.0, -INF, 0.0]).expand(1, 2, 4)
    tree = star([2], torch.log_softmax(torch.tensor([0.0, 0.0, 5.0, 0.0]), -1))
    verdict = RULES[name].verify(tree, logits, with_uniforms(monkeypatch, u), AT, None)
    assert verdict.count.item() == 0 and verdict.token.item() in (1, 3)


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("u", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_a_residual_without_mass_falls_back_to_the_target(name: str, u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """p = q, and a refusal is forced: what is left is p."""
    law = torch.log_softmax(torch.tensor([-INF, 1.0, 0.5, -INF]), -1)
    assert torch.equal(verify._residual(law.exp()[None], law.exp()[None]), law.exp()[None])
    forced = with_uniforms(monkeypatch, u)
    stream_of = {}

    def uniform(positions: Tensor, lanes: Tensor, stream: int) -> Tensor:
        stream_of[stream] = True
        return torch.full((1, len(lanes)), u if stream == 3 else 1.0, dtype=torch.float64)  # 1: p < U q by force

    monkeypatch.setattr(forced, "uniform", uniform)
    verdict = RULES[name].verify(star([1], law), law.expand(1, 2, 4), forced, AT, None)
    assert verdict.token.item() in (1, 2)
    if name == "block":  # P = 1 with p = q: no uniform below 1 refuses it
        assert verdict.count.item() == 0 and set(stream_of) == {2, 3}


def test_a_certain_target_that_refuses_its_own_token_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([-INF, 0.0, -INF]).expand(1, 2, 3)
    noise = with_uniforms(monkeypatch, 1.0)
    assert RULES["deterministic"].verify(star([1]), logits, noise, AT, None).token.item() == 1


@pytest.mark.parametrize("name", RULES)
def test_padding_is_never_accepted(name: str) -> None:
    """Neither with the token that the target is sure of nor with -1 or an id beyond the vocabulary."""
    logits = torch.tensor([9.0, -INF, -INF]).expand(1, 2, 3)
    q = torch.log_softmax(torch.tensor([9.0, 0.0, 0.0]), -1)
    for token, valid in ((0, False), (-1, True), (-1, False), (3, True), (10**9, True)):
        verdict = RULES[name].verify(star([token], q, [valid]), logits, Noise(0, [0]), AT, None)
        assert verdict.count.item() == 0 and verdict.token.item() == 0 and verdict.path[0].tolist() == [0, -1]


@pytest.mark.parametrize("name", SAMPLING)
def test_exhausted_draft_accepts_no_more(name: str) -> None:
    """A one-hot draft with three children drew one token; the others were not drawn and must not be taken for draws."""
    logits = torch.tensor([0.0, 3.0, 0.0, 0.0]).expand(1, 4, 4)
    q = torch.tensor([0.0, -INF, -INF, -INF])
    if name in ("rejection", "specinfer"):
        for seed in range(200):
            verdict = RULES[name].verify(star([0, 1, 2], q), logits, Noise(seed, [0]), AT, None)
            assert verdict.path[0, 1].item() in (-1, 1)


@pytest.mark.parametrize("name", ["rejection", "specinfer", "deterministic"])
def test_a_twin_of_a_refused_child_is_refused(name: str) -> None:
    logits = torch.tensor([0.0, -1.0, 0.0]).expand(1, 3, 3)
    q = torch.log_softmax(torch.tensor([-2.0, 2.0, -2.0]), -1)
    firsts = 0
    for seed in range(300):
        verdict = RULES[name].verify(star([1, 1], q), logits, Noise(seed, [0]), AT, None)
        assert verdict.path[0, 1].item() in (-1, 1)
        firsts += verdict.path[0, 1].item() == 1
    assert 0 < firsts < 300


def test_plain_decoding_is_a_tree_of_one_node() -> None:
    logits = torch.randn(3, 1, 7)
    noise, positions = Noise(2, [0, 1, 2]), torch.tensor([4, 5, 6])
    tree = Tree.root(torch.tensor([1, 2, 3]))
    for name, rule in RULES.items():
        for vocabulary in (None, torch.tensor([0, 2, 5])):
            verdict = rule.verify(tree, logits, noise, positions, vocabulary)
            assert verdict.path.tolist() == [[0], [0], [0]] and verdict.count.tolist() == [0, 0, 0], name
        if name == "greedy":
            assert torch.equal(verdict.token, logits[:, 0].argmax(-1))
        if name == "gumbel":
            assert torch.equal(verdict.token, (logits + noise.gumbel(positions[:, None], 7))[:, 0].argmax(-1))


def test_gumbel_draws_by_depth_and_in_float32() -> None:
    """bfloat16 logits get float32 noise: a sum in bfloat16 would often tie its best tokens."""
    batch = 40
    logits = torch.randn(batch, 3, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    parents, depths, ancestors = shape_of([-1, 0, 1], batch)
    noise, positions = Noise(0, torch.arange(batch)), torch.arange(batch)
    shared = noise.gumbel(positions[:, None] + torch.arange(3), 5000)
    choice = (logits.float() + shared).argmax(-1)  # [B, 3]
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), choice[:, :2]], 1)
    valid = torch.ones(batch, 3, dtype=torch.bool)
    tree = Tree(tokens, parents, depths, ancestors, torch.zeros(batch, 3), valid)
    verdict = RULES["gumbel"].verify(tree, logits, noise, positions, None)
    assert verdict.count.tolist() == [2] * batch and torch.equal(verdict.token, choice[:, 2])


@pytest.mark.parametrize("name", SAMPLING)
def test_laws_are_computed_in_float64_whatever_the_logits(name: str) -> None:
    tree, logits, noise, positions, vocabulary = random_case(8, 200, 6, 8, 8, False, chain=True)
    logits = logits.bfloat16()
    coarse = RULES[name].verify(tree, logits, noise, positions, vocabulary)
    fine = RULES[name].verify(tree, logits.double(), noise, positions, vocabulary)
    assert torch.equal(coarse.path, fine.path) and torch.equal(coarse.token, fine.token)


def test_first_of_equal_logits_wins() -> None:
    logits = torch.zeros(1, 2, 5000)
    logits[..., [17, 18, 4000]] = 1.0
    verdict = RULES["greedy"].verify(star([17]), logits, Noise(0, [0]), AT, None)
    assert verdict.count.item() == 1 and verdict.token.item() == 17


def test_block_against_its_vectorised_definition() -> None:
    for seed in range(10):
        tree, logits, noise, positions, _ = random_case(seed, 50, 6, 5, 5, False, chain=True)
        assert tree.q is not None
        logits = logits.clamp(min=-6)
        q = torch.log_softmax(torch.randn(50, 6, 5), -1)
        tokens = torch.randint(5, (50, 6))
        tree = replace(tree, q=q, tokens=tokens, valid=torch.ones_like(tree.valid))
        got = RULES["block"].verify(tree, logits, noise, positions, None)
        expected = block_vectorised(scaled=True)(tree, logits, noise, positions, None)
        assert torch.equal(got.path, expected.path) and torch.equal(got.token, expected.token)


def test_block_accepts_at_least_as_much_as_rejection_on_average() -> None:
    counts = {"block": 0, "rejection": 0}
    generator = torch.Generator().manual_seed(0)
    parents, depths, ancestors = shape_of([-1, 0, 1, 2, 3], 20_000)
    p, q = torch.randn(6, generator=generator), torch.randn(6, generator=generator)
    tokens = torch.multinomial(q.softmax(-1), 100_000, replacement=True, generator=generator).view(20_000, 5)
    valid = torch.ones(20_000, 5, dtype=torch.bool)
    log_q = q.log_softmax(-1).expand(20_000, 5, -1)
    tree = Tree(tokens, parents, depths, ancestors, torch.zeros(20_000, 5), valid, log_q)
    for name in counts:
        noise, positions = Noise(1, torch.arange(20_000)), torch.full((20_000,), 3)
        counts[name] = int(RULES[name].verify(tree, p.expand(20_000, 5, -1), noise, positions, None).count.sum())
    assert counts["block"] > 1.02 * counts["rejection"]


def test_typical_thresholds_are_not_swapped() -> None:
    """threshold caps, alpha scales exp(-entropy): a certain target uses the cap, a flat one alpha / V."""
    assert (TYPICAL_THRESHOLD, TYPICAL_ALPHA) == (0.09, 0.3)
    certain = torch.tensor([[0.0, -2.2, -9.0]]).expand(1, 2, 3)  # p[1] = 0.0998, H = 0.34: bar 0.09
    assert RULES["typical"].verify(star([1]), certain, Noise(0, [0]), AT, None).count.item() == 1
    below = torch.tensor([[0.0, -2.4, -9.0]]).expand(1, 2, 3)  # p[1] = 0.083
    assert RULES["typical"].verify(star([1]), below, Noise(0, [0]), AT, None).count.item() == 0
    flat = torch.zeros(1, 2, 100)  # p = 0.01, bar 0.3 * 0.01
    assert RULES["typical"].verify(star([5]), flat, Noise(0, [0]), AT, None).count.item() == 1
    assert verify.typical(star([5]), flat, Noise(0, [0]), AT, None, alpha=1.1).count.item() == 0


def test_typical_prefers_the_longest_path() -> None:
    parents, depths, ancestors = shape_of([-1, 0, 0, 2], 1)
    tokens = torch.tensor([[0, 1, 2, 2]])
    tree = Tree(tokens, parents, depths, ancestors, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool))
    logits = torch.tensor([0.0, 2.0, 1.0]).expand(1, 4, 3)
    verdict = RULES["typical"].verify(tree, logits, Noise(0, [0]), AT, None)
    assert verdict.path[0].tolist() == [0, 2, 3, -1] and verdict.count.item() == 2


def test_large_vocabulary_draws_from_the_tail() -> None:
    """The final draw in float64 reaches tokens whose float32 cumulative sum would not move."""
    weights = torch.zeros(1, 49152, dtype=torch.float64)
    weights[0, 0], weights[0, -1] = 1.0, 1e-9
    found = set()
    for u in (0.5, 1 - 1e-10, 1 - 2.0**-53):
        noise = Noise(0, [0])
        noise.uniform = lambda positions, lanes, stream, u=u: torch.full((1, 1), u, dtype=torch.float64)  # type: ignore[method-assign]
        found.add(int(verify._draw(weights, noise, AT)))
    assert found == {0, 49151}


def test_nothing_in_the_rules_waits_for_the_device() -> None:
    source = inspect.getsource(verify)
    assert ".item(" not in source and ".tolist(" not in source and ".nonzero(" not in source
    assert source.count("bool(mask.any())") == 1 and "bool(" not in source.replace("bool(mask.any())", "")


def test_the_registry_says_what_each_rule_needs() -> None:
    assert {name: (r.propose, r.shape, r.needs_q, r.lossless) for name, r in RULES.items()} == {
        "greedy": ("top", "any", False, True),
        "gumbel": ("shared", "any", False, True),
        "rejection": ("independent", "drawn", True, True),
        "specinfer": ("iid", "drawn", True, True),
        "block": ("independent", "chain", True, True),
        "deterministic": ("top", "any", False, True),
        "typical": ("top", "any", False, False),
    }
    assert all(rule.name == name for name, rule in RULES.items())


def test_check_rule_chooses_and_refuses() -> None:
    assert check_rule(None, True, 0.0).name == "greedy" and check_rule(None, False, 0.7).name == "gumbel"
    assert check_rule("block", True, 1.0).name == "block"
    assert check_rule("gumbel", False, 1.0, drawn_in_order=False).name == "gumbel"
    for arguments, words in (
        (("gumble", False, 1.0), "did you mean 'gumbel'"),
        (("zzz", False, 1.0), "use one of greedy, gumbel"),
        (("greedy", False, 0.7), "temperature 0"),
        (("block", True, 0.0), "rule 'greedy'"),
        (("gumbel", True, 0.0), "rule 'greedy'"),
        (("block", False, 1.0), "chain"),
        (("rejection", False, 1.0, False), "static tree"),
        (("specinfer", False, 1.0, False), "static tree"),
    ):
        with pytest.raises(UserError, match=words) as error:
            check_rule(*arguments)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.needs_q])
def test_a_missing_q_is_named(name: str) -> None:
    with pytest.raises(AssertionError, match="tree.q is None"):
        RULES[name].verify(star([1]), torch.zeros(1, 2, 3), Noise(0, [0]), AT, None)
