"""The joint law of the next two and three tokens equals the target's, for every lossless rule, on random trees.

Each comparison is a chi-square test against exact enumeration with a false-alarm rate of 1e-6; seeds are fixed. Each
way to be wrong must be rejected by the same test, at 1e-9.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode import verify
from decode.noise import Noise
from decode.processors import Processors
from decode.tree import Tree
from decode.verify import RULES, Verdict
from tests.decode.enumeration import (
    Toy,
    block_vectorised,
    joint_p_values,
    keep_likeliest,
    merge_twins,
    per_path_draws,
    plain_gumbel,
    propose,
    random_shape,
    sample,
)

DRAWS = 200_000
FEWER = 60_000  # what is wrong enough shows with these
FALSE_ALARM = 1e-6
CAUGHT = 1e-9
CHAIN = [-1, 0, 1, 2]
BUSHY = [-1, 0, 0, 0, 1, 1, 2, 4, 4]
SAMPLING = [name for name, rule in RULES.items() if rule.lossless and name != "greedy"]
TARGETS = {
    "plain": Processors(temperature=0.8),
    "top-k": Processors(top_k=3),
    "top-p": Processors(temperature=1.2, top_p=0.7),
}
ALL = "top-k, top-p, min-p"


def make(seed: int, num_tokens: int, target: str = "plain", drafted: int | None = None) -> tuple[Toy, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    toy = Toy.random(num_tokens, generator, drafted)
    processors = Processors(top_k=4, top_p=0.8, min_p=0.2) if target == ALL else TARGETS[target]
    return replace(toy, p=processors.warp(toy.p)), generator


def shape_for(rule: str, generator: torch.Generator) -> list[int]:
    return CHAIN if RULES[rule].shape == "chain" else random_shape(generator)


def assert_lossless(toy: Toy, tokens: Tensor) -> None:
    for length, value in zip((2, 3), joint_p_values(toy, tokens), strict=True):
        assert value > FALSE_ALARM, f"joint law of {length} tokens: p-value {value:.2e}"


def assert_caught(toy: Toy, tokens: Tensor) -> None:
    values = joint_p_values(toy, tokens)
    assert min(values) < CAUGHT, f"a wrong rule passed with p-values {values}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rule", SAMPLING)
def test_joint_law(rule: str, target: str) -> None:
    seed = 100 * SAMPLING.index(rule) + list(TARGETS).index(target)
    toy, generator = make(seed, 4 + seed % 3, target)
    shape = shape_for(rule, generator)
    assert_lossless(toy, sample(toy, shape, RULES[rule].propose, RULES[rule].verify, DRAWS, seed))


@pytest.mark.parametrize("rule", SAMPLING)
def test_joint_law_with_reduced_draft_vocabulary(rule: str) -> None:
    seed = 1000 + SAMPLING.index(rule)
    toy, generator = make(seed, 6, ALL, drafted=4)
    shape = shape_for(rule, generator)
    assert_lossless(toy, sample(toy, shape, RULES[rule].propose, RULES[rule].verify, DRAWS, seed))


@pytest.mark.parametrize("rule", ["rejection", "specinfer", "block"])
def test_joint_law_with_padded_columns(rule: str) -> None:
    """Two draft columns have no target token, though the draft likes them, and one target token is never drafted."""
    toy, generator = make(2000, 5)
    q = torch.cat([toy.q, torch.full((len(toy.q), 2), 0.5)], 1)
    q[:, 1] = -torch.inf
    toy = PaddedToy(toy.p, q)
    assert_lossless(toy, sample(toy, shape_for(rule, generator), RULES[rule].propose, RULES[rule].verify, DRAWS, 7))


class PaddedToy(Toy):
    """Contexts behind tokens that the target cannot produce exist in trees but are never committed."""

    def next_context(self, context: Tensor, token: Tensor) -> Tensor:
        return super().next_context(context, token.clamp(max=self.num_tokens - 1))


@pytest.mark.parametrize("shape", [CHAIN, BUSHY], ids=["chain", "bushy"])
def test_gumbel_is_plain_decoding_token_for_token(shape: list[int]) -> None:
    toy, _ = make(5, 6, "top-p")
    drafted = sample(toy, shape, "shared", RULES["gumbel"].verify, 20_000, seed=3)
    assert torch.equal(drafted, plain_gumbel(toy, 20_000, seed=3))


def test_gumbel_and_deterministic_do_not_mind_which_children_are_kept() -> None:
    toy, _ = make(6, 5)
    for rule, mode in (("gumbel", "shared"), ("deterministic", "shared"), ("gumbel", "independent"), ("gumbel", "iid")):
        tokens = sample(toy, BUSHY, mode, RULES[rule].verify, FEWER, seed=11, alter=keep_likeliest(5))
        assert_lossless(toy, tokens)


def test_greedy_is_plain_greedy_decoding() -> None:
    toy, generator = make(7, 6)
    for _ in range(5):
        tokens = sample(toy, random_shape(generator), "top", RULES["greedy"].verify, 1, seed=0)
        context, expected = torch.zeros(1, dtype=torch.int64), []
        for _ in range(3):
            expected.append(toy.p[context].argmax(-1))
            context = toy.next_context(context, expected[-1])
        assert torch.equal(tokens[0], torch.cat(expected))


def test_rejection_outlives_draws_with_shared_noise_if_the_residual_has_its_own() -> None:
    """Shared noise alone does no harm to u < p/q: the coupling of draft and recovery does (see the control below)."""
    toy, _ = make(8, 5)
    assert_lossless(toy, sample(toy, BUSHY, "shared", RULES["rejection"].verify, FEWER, seed=2))


def test_dropping_twins_does_not_harm_rejection() -> None:
    """First occurrences of draws with replacement are draws without."""
    toy, _ = make(9, 5)
    assert_lossless(toy, sample(toy, BUSHY, "iid", RULES["rejection"].verify, FEWER, seed=2, alter=merge_twins))


def test_typical_is_lossy_and_says_so() -> None:
    toy, _ = make(10, 5)
    assert not RULES["typical"].lossless
    assert_caught(toy, sample(toy, BUSHY, "top", RULES["typical"].verify, FEWER, seed=1))


# Negative controls


def shared_residual(tree: Tree, logits: Tensor, noise: Noise, positions: Tensor, vocabulary: Tensor | None) -> Verdict:
    """u < p/q on a chain where the recovered token is argmax(log residual + g) with the noise that drew the draft."""
    verdict = RULES["rejection"].verify(tree, logits, noise, positions, vocabulary)
    assert tree.q is not None
    batch, end = torch.arange(len(positions)), verdict.path.max(-1).values
    p, q = torch.softmax(logits[batch, end].double(), -1), torch.softmax(tree.q[batch, end].double(), -1)
    law = torch.where((end == tree.num_nodes - 1)[:, None], p, (p - q).clamp(min=0))
    shared = noise.gumbel((positions + verdict.count)[:, None], p.shape[-1])[:, 0]
    return replace(verdict, token=(law.log() + shared).argmax(-1))


def test_control_shared_noise_with_ratio_test() -> None:
    toy, _ = make(20, 5)
    assert_caught(toy, sample(toy, CHAIN, "shared", shared_residual, FEWER, seed=1))


def wrong_rejection(kind: str):
    def reject(p: Tensor, q: Tensor, x: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "residual not renormalised":
            left = (p - q).clamp(min=0)
        elif kind == "residual only at the drafted token":
            left = p.scatter(-1, x, (p.gather(-1, x) - q.gather(-1, x)).clamp(min=0))
            left = left / left.sum(-1, keepdim=True)
        else:
            left = verify._residual(p, q)
        kept = kind == "token stays in q"
        return torch.where(turned, left, p), q if kept else verify._without(q, x, turned)

    def rule(tree: Tree, logits: Tensor, noise: Noise, positions: Tensor, vocabulary: Tensor | None) -> Verdict:
        return verify._sample(tree, verify.Given(logits), noise, positions, vocabulary, reject)

    return rule


@pytest.mark.parametrize(
    "kind", ["residual not renormalised", "residual only at the drafted token", "token stays in q"]
)
def test_control_wrong_residual(kind: str) -> None:
    toy, _ = make(21, 5)
    assert_caught(toy, sample(toy, BUSHY, "independent", wrong_rejection(kind), FEWER, seed=1))


def test_the_harness_of_that_control_passes_the_right_residual() -> None:
    toy, _ = make(21, 5)
    assert_lossless(toy, sample(toy, BUSHY, "independent", wrong_rejection("none"), FEWER, seed=1))


@pytest.mark.parametrize("rule", ["rejection", "specinfer", "block"])
def test_control_reported_q_is_not_the_sampled_one(rule: str) -> None:
    toy, _ = make(22, 5)
    toy = replace(toy, q=Processors(top_k=3).warp(toy.q), told=toy.q)
    shape = CHAIN if rule == "block" else BUSHY
    assert_caught(toy, sample(toy, shape, RULES[rule].propose, RULES[rule].verify, FEWER, seed=1))


def test_control_one_draw_per_path() -> None:
    toy, _ = make(23, 5)
    assert_caught(toy, sample(toy, BUSHY, "top", per_path_draws, FEWER, seed=1))


def test_control_unscaled_block_residual() -> None:
    toy, _ = make(26, 5)
    assert_lossless(toy, sample(toy, CHAIN, "independent", block_vectorised(scaled=True), FEWER, seed=1))
    assert_caught(toy, sample(toy, CHAIN, "independent", block_vectorised(scaled=False), FEWER, seed=1))


def test_control_uniforms_of_a_rejected_block_met_again() -> None:
    toy, _ = make(26, 5)
    assert_caught(toy, sample(toy, CHAIN, "independent", block_vectorised(scaled=True, fresh=False), FEWER, seed=1))


@pytest.mark.parametrize("rule", ["rejection", "specinfer"])
def test_control_children_dropped_by_score(rule: str) -> None:
    toy, _ = make(26, 5)
    alter = keep_likeliest(5)
    assert_caught(toy, sample(toy, BUSHY, RULES[rule].propose, RULES[rule].verify, FEWER, seed=1, alter=alter))


def test_control_twins_merged_under_specinfer() -> None:
    toy, _ = make(26, 4)
    rule = RULES["specinfer"]
    assert_caught(toy, sample(toy, [-1, 0, 0, 0, 0], "iid", rule.verify, FEWER, seed=1, alter=merge_twins))


def test_control_deterministic_rule_on_drawn_children() -> None:
    """q = 1 is right whatever the children are, as long as they do not depend on the target's own draw."""
    toy, _ = make(28, 5)
    assert_lossless(toy, sample(toy, BUSHY, "independent", RULES["deterministic"].verify, FEWER, seed=1))


def test_propose_keeps_the_tree_in_step_with_the_tables() -> None:
    toy, _ = make(29, 5)
    noise, start = Noise(0, torch.arange(4)), torch.zeros(4, dtype=torch.int64)
    tree, logits = propose(toy, BUSHY, "independent", start, noise, torch.full((4,), 5))
    context = toy.next_context(toy.next_context(start, tree.tokens[:, 1]), tree.tokens[:, 4])
    assert torch.equal(logits[:, 4], toy.p[context])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rule", SAMPLING)
def test_joint_law_long(rule: str, seed: int) -> None:
    toy, generator = make(5000 + seed, 4 + seed % 5, [*TARGETS, ALL][seed % 4], drafted=4 if seed % 3 == 2 else None)
    shape = shape_for(rule, generator)
    assert_lossless(toy, sample(toy, shape, RULES[rule].propose, RULES[rule].verify, 2_000_000, seed))
