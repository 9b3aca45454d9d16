"""decode/processors.py: every node of a tree sees what plain decoding with transformers' processors would see there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode.errors import UserError
from decode.noise import Noise
from decode.processors import OccurrencePenalty, Processors, TreeRows
from decode.tree import Tree
from decode.verify import RULES
from tests.decode.enumeration import Toy, chi_square, propose, shape_of

SIZE = 11
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
STOPS = (0, 3)

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.3},
    "all row-wise": {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.4},
    "bad words": {"bad_words": [[2], [4, 5], [1, 4, 6], [0]], "stop_tokens": STOPS},
    "min new tokens": {"min_new_tokens": 4, "stop_tokens": STOPS},
    "extra": {"extra": [NoRepeatNGramLogitsProcessor(2)]},
    "everything": {
        "temperature": 0.8,
        "top_k": 8,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "bad_words": [[2], [4, 5]],
        "min_new_tokens": 4,
        "stop_tokens": STOPS,
        "extra": [NoRepeatNGramLogitsProcessor(2)],
    },
}


def plain(ids: list[int], scores: Tensor, prompt_length: int, settings: dict[str, Any]) -> Tensor:
    """What transformers' `generate` does to scores [V] behind ids, one row, processor by processor."""
    chosen: list[LogitsProcessor] = []
    if "repetition_penalty" in settings:
        chosen.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    reply = torch.tensor(ids[prompt_length:], dtype=torch.int64)
    if "presence_penalty" in settings or "frequency_penalty" in settings:
        scores = LogitsProcessorList(chosen)(torch.tensor([ids]), scores[None])[0].clone()
        chosen = []
        for token in range(len(scores)):
            count = int((reply == token).sum())
            scores[token] -= settings.get("frequency_penalty", 0.0) * count
            scores[token] -= settings.get("presence_penalty", 0.0) if count else 0.0
    if "bad_words" in settings:
        chosen.append(NoBadWordsLogitsProcessor([list(word) for word in settings["bad_words"]], torch.tensor(STOPS)))
    if "min_new_tokens" in settings:
        stops = torch.tensor(settings["stop_tokens"])
        chosen.append(MinNewTokensLengthLogitsProcessor(prompt_length, settings["min_new_tokens"], stops))
    chosen += settings.get("extra", [])
    if "temperature" in settings:
        chosen.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        chosen.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        chosen.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        chosen.append(MinPLogitsWarper(settings["min_p"]))
    return LogitsProcessorList(chosen)(torch.tensor([ids]), scores[None])[0]


def make(
    seed: int, lengths: tuple[int, ...] = (6, 6, 9), prompts: tuple[int, ...] = (4, 6, 3)
) -> tuple[Tree, Tensor, list[Tensor], list[int]]:
    """Three sequences of different lengths with one tree shape; tokens repeat often."""
    generator = torch.Generator().manual_seed(seed)
    batch, n = len(lengths), len(PARENTS)
    parents, depths, ancestors = shape_of(PARENTS, batch)
    tokens = torch.randint(SIZE, (batch, n), generator=generator)
    committed = [torch.randint(SIZE, (length,), generator=generator) for length in lengths]
    tokens[:, 0] = torch.stack([row[-1] for row in committed])
    tree = Tree(tokens, parents, depths, ancestors, torch.zeros(batch, n), torch.ones(batch, n, dtype=torch.bool))
    return tree, 2 * torch.randn(batch, n, SIZE, generator=generator), committed, list(prompts)


def path_ids(tree: Tree, b: int, node: int, committed: Tensor) -> list[int]:
    drafted = []
    while node:
        drafted.insert(0, int(tree.tokens[b, node]))
        node = int(tree.parents[b, node])
    return committed.tolist() + drafted


@pytest.mark.parametrize("name", CASES)
def test_each_node_sees_its_own_path(name: str) -> None:
    chosen = CASES[name]
    for seed in range(5):
        tree, logits, committed, prompts = make(seed)
        before = logits.clone()
        rows = Processors(**chosen).over(tree, logits, committed, prompts)
        whole = rows.all()
        for b in range(3):
            for node in range(tree.num_nodes):
                expected = plain(path_ids(tree, b, node, committed[b]), logits[b, node], prompts[b], chosen)
                torch.testing.assert_close(whole[b, node], expected, rtol=1e-6, atol=1e-6)
                one = rows.row(torch.full((3,), node), int(tree.depths[b, node]))
                assert torch.equal(one[b], whole[b, node])
        assert torch.equal(logits, before)


@pytest.mark.parametrize("name", CASES)
def test_rows_do_not_depend_on_their_batch(name: str) -> None:
    tree, logits, committed, prompts = make(1)
    together = Processors(**CASES[name]).over(tree, logits, committed, prompts).all()
    for b in range(3):
        row = slice(b, b + 1)
        fields = (tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.log_q, tree.valid)
        alone = Tree(*(field[row] for field in fields))
        one = Processors(**CASES[name]).over(alone, logits[row], committed[row], prompts[row]).all()
        assert torch.equal(one[0], together[b])


def test_only_row_wise_settings_need_no_ids() -> None:
    needs = {name: Processors(**chosen).needs_ids for name, chosen in CASES.items()}
    assert [name for name, needed in needs.items() if not needed] == list(CASES)[:5]
    assert Processors().idle and Processors(min_new_tokens=3).idle and not Processors(top_k=1).idle


def test_temperature_zero_samples_nothing_but_keeps_penalties() -> None:
    assert Processors(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2).idle
    scores = torch.tensor([[1.0, 2.0, 3.0]])
    got = Processors(temperature=0.0, repetition_penalty=2.0)(torch.tensor([[2]]), scores, 1)
    assert got.tolist() == [[1.0, 2.0, 1.5]]


def test_penalties_are_computed_in_float32() -> None:
    scores, ids = torch.randn(1, SIZE).bfloat16(), torch.tensor([[2, 3, 4]])
    processors = Processors(repetition_penalty=1.3)
    assert torch.equal(processors(ids, scores, 1), processors(ids, scores.float(), 1))


def test_warp_takes_any_leading_shape_and_dtype() -> None:
    scores = torch.randn(2, 3, SIZE)
    processors = Processors(temperature=0.5, top_k=4)
    flat = torch.stack([plain([1], row, 0, {"temperature": 0.5, "top_k": 4}) for row in scores.view(-1, SIZE)])
    assert torch.equal(processors.warp(scores), flat.view(2, 3, SIZE))
    assert processors.warp(scores.bfloat16()).dtype == torch.float32
    assert torch.equal(Processors(top_k=SIZE + 5).warp(scores), scores)


def test_presence_and_frequency_count_the_reply_only() -> None:
    scores = torch.zeros(1, 5)
    got = OccurrencePenalty(1.0, 0.5, 2)(torch.tensor([[1, 1, 2, 2, 3, 7]]), scores)  # 7: an id beyond the logits
    assert got.tolist() == [[0.0, 0.0, -2.0, -1.5, 0.0]]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(0, 12),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.1, 3.0),
    st.floats(0.5, 2.0),
)
def test_any_mix_equals_transformers(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float, penalty: float
) -> None:
    tree, logits, committed, prompts = make(seed)
    chosen: dict[str, Any] = {"temperature": temperature, "repetition_penalty": penalty}
    chosen |= {"top_k": top_k} if top_k else {}
    chosen |= {"top_p": top_p} if top_p < 1 else {}
    chosen |= {"min_p": min_p} if min_p else {}
    whole = Processors(**chosen).over(tree, logits, committed, prompts).all()
    for b in range(3):
        expected = plain(path_ids(tree, b, 7, committed[b]), logits[b, 7], prompts[b], chosen)
        torch.testing.assert_close(whole[b, 7], expected, rtol=1e-6, atol=1e-6)


def test_greedy_generation_equals_transformers_generate() -> None:
    """Token for token, plain decoding with our processors and with `generate`, which also fixes their order."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, **shape, bos_token_id=None, eos_token_id=None)).eval()
    model.lm_head.weight.data.mul_(20)
    prompt = torch.tensor([[5, 6, 7, 6]])
    stops, words = [1, 2, 9, 14], [[3], [6, 7], [8, 8]]
    config = GenerationConfig(
        max_new_tokens=24, do_sample=False, repetition_penalty=1.4, bad_words_ids=words, min_new_tokens=24,
        eos_token_id=stops, pad_token_id=0, no_repeat_ngram_size=3,
    )  # fmt: skip
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)[0].tolist()
    processors = Processors(
        0.0, repetition_penalty=1.4, bad_words=words, min_new_tokens=24, stop_tokens=stops,
        extra=[NoRepeatNGramLogitsProcessor(3)],
    )  # fmt: skip
    ids = prompt
    with torch.no_grad():
        for _ in range(24):
            scores = processors(ids, model(ids).logits[:, -1], 4)
            ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
    assert ids[0].tolist() == expected
    assert len(set(expected[4:])) > 5


class Broadcast(TreeRows):
    """Wrong: every node is processed with the ids of the root."""

    def row(self, nodes: Tensor, depth: int) -> Tensor:
        scores = self.logits[torch.arange(len(nodes)), nodes]
        return self.processors(torch.stack(self.committed), scores, self.prompt_lengths[0])


def penalised_law(toy: Toy, processors: Processors) -> Tensor:
    """Exact law of the next three tokens [V ** 3] with processors that read the reply; prompt [0]."""
    law = torch.zeros(toy.num_tokens**3, dtype=torch.float64)

    def descend(reply: list[int], context: Tensor, mass: float) -> None:
        if len(reply) == 3:
            law[(reply[0] * toy.num_tokens + reply[1]) * toy.num_tokens + reply[2]] = mass
            return
        ids = torch.tensor([[0, *reply]])
        p = torch.softmax(processors(ids, toy.p[context], 1).double(), -1)[0]
        for token in range(toy.num_tokens):
            descend([*reply, token], toy.next_context(context, torch.tensor([token])), mass * float(p[token]))

    descend([], torch.zeros(1, dtype=torch.int64), 1.0)
    return law


def three_tokens(toy: Toy, processors: Processors, rule: str, kind: type[TreeRows], draws: int) -> Tensor:
    """Counts [V ** 3] of the first three tokens of trees that are a chain of three behind the prompt [0].

    A step that accepts less is continued by plain draws with the processors, so every draw gives three tokens.
    """
    noise = Noise(4, torch.arange(draws))
    start = torch.zeros(draws, dtype=torch.int64)
    tree, logits = propose(toy, [-1, 0, 1, 2], RULES[rule].propose, start, noise, torch.full((draws,), 1))
    committed = list(torch.zeros(draws, 1, dtype=torch.int64))
    rows = kind(processors, tree, logits, committed, [1] * draws)
    verdict = RULES[rule].verify(tree, rows, noise, torch.full((draws,), 1), None)
    out = torch.cat([tree.tokens[:, 1:], start[:, None]], 1)
    out.scatter_(1, verdict.count[:, None], verdict.token[:, None])
    for i in range(1, 3):
        context = start
        for j in range(i):
            context = toy.next_context(context, out[:, j])
        ids = torch.cat([start[:, None], out[:, :i]], 1)
        scores = processors(ids, toy.p[context], 1)
        own = (scores + noise.gumbel(torch.full((draws, 1), 1 + i), toy.num_tokens)[:, 0]).argmax(-1)
        out[:, i] = torch.where(verdict.count < i, own, out[:, i])
    cell = (out[:, 0] * toy.num_tokens + out[:, 1]) * toy.num_tokens + out[:, 2]
    return torch.bincount(cell, minlength=toy.num_tokens**3)


@pytest.mark.parametrize("rule", ["gumbel", "rejection", "block"])
def test_joint_law_with_penalties_on_paths_and_the_control_that_broadcasts_them(rule: str) -> None:
    """False-alarm rate 1e-6; penalties of the root's ids on every node must be rejected at 1e-9."""
    toy = Toy.random(4, torch.Generator().manual_seed(3))
    processors = Processors(temperature=0.9, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5)
    law = penalised_law(toy, processors)
    assert chi_square(three_tokens(toy, processors, rule, TreeRows, 50_000), law)[2] > 1e-6
    assert chi_square(three_tokens(toy, processors, rule, Broadcast, 50_000), law)[2] < 1e-9


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"temperature": value}, "temperature is") for value in (-0.1, math.nan, math.inf, "1", None, True)),
    *(({"top_k": value}, "top_k is") for value in (-1, 2.5, True)),
    *(({"top_p": value}, "top_p is") for value in (0, 0.0, 1.01, -1, math.nan)),
    *(({"min_p": value}, "min_p is") for value in (-0.01, 1.5, math.nan)),
    *(({"repetition_penalty": value}, "repetition_penalty is") for value in (0, -1.0, math.nan)),
    ({"presence_penalty": math.nan}, "presence_penalty is"),
    ({"frequency_penalty": math.inf}, "frequency_penalty is"),
    ({"min_new_tokens": -1}, "min_new_tokens is"),
    *(({"bad_words": value}, "bad_words") for value in ("no", [[]], [[-1]], [["a"]], [3], [[1.5]], None)),
    ({"bad_words": [[50]], "vocab_size": 50}, "end at 49"),
    ({"extra": [3]}, "cannot be called"),
]


@pytest.mark.parametrize("chosen, words", BAD, ids=str)
def test_bad_values_are_one_line(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        Processors(**chosen)
    assert "\n" not in str(error.value)


def test_processors_with_a_memory_are_refused() -> None:
    class SynthIDTextWatermarkLogitsProcessor(LogitsProcessor):
        pass

    with pytest.raises(UserError, match="keeps state"):
        Processors(extra=[SynthIDTextWatermarkLogitsProcessor()])
