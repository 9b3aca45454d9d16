"""Logits processors for trees: each node sees the tokens of its own path, as plain decoding would at that point.

The row of ids of a node is the committed tokens (prompt and reply, the root included) and the drafted tokens on the
way to it. The maths is transformers' own, in the order of its `generate`: penalties, bad words, minimum length,
processors of the caller, then temperature, top-k, top-p and min-p, which as there only apply when sampling (temperature
above 0). Presence and frequency penalties, which transformers does not have, follow the repetition penalty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode.errors import UserError
from decode.tree import Tree

# They remember earlier calls or run the model, so what they do at a node would depend on the nodes before it.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


class OccurrencePenalty(LogitsProcessor):
    """logit[x] -= presence * (count(x) > 0) + frequency * count(x), count(x) in the reply, without the prompt."""

    def __init__(self, presence: float, frequency: float, prompt_length: int):
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        reply = input_ids[:, self.prompt_length :]
        size = scores.shape[-1]
        counts = scores.new_zeros(len(scores), size + 1)  # the last column takes ids that the target cannot produce
        counts.scatter_add_(1, reply.clamp(max=size), torch.ones_like(reply, dtype=counts.dtype))
        counts = counts[:, :size]
        return scores - self.presence * (counts > 0) - self.frequency * counts


class Processors:
    """What is done to the target's logits before a token is chosen. Built once from the settings of a request."""

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        bad_words: Sequence[Sequence[int]] = (),
        min_new_tokens: int = 0,
        stop_tokens: Sequence[int] = (),
        extra: Sequence[LogitsProcessor] = (),
        vocab_size: int | None = None,
    ):
        """`extra`: functions of (ids [R, T], scores [R, V]) alone. `vocab_size`: bad words are checked against it."""
        _check_number("temperature", temperature, _finite(temperature) and temperature >= 0, "0 or more")
        _check_number("top_k", top_k, _whole(top_k) and top_k >= 0, "a whole number, 0 for no limit")
        _check_number("top_p", top_p, _finite(top_p) and 0 < top_p <= 1, "above 0 and at most 1")
        _check_number("min_p", min_p, _finite(min_p) and 0 <= min_p <= 1, "between 0 and 1")
        good = _finite(repetition_penalty) and repetition_penalty > 0
        _check_number("repetition_penalty", repetition_penalty, good, "above 0; 1 is none")
        _check_number("presence_penalty", presence_penalty, _finite(presence_penalty), "a finite number")
        _check_number("frequency_penalty", frequency_penalty, _finite(frequency_penalty), "a finite number")
        _check_number("min_new_tokens", min_new_tokens, _whole(min_new_tokens) and min_new_tokens >= 0, "0 or more")
        _check_bad_words(bad_words, vocab_size)
        _check_extra(extra)
        self.repetition_penalty = float(repetition_penalty)
        self.presence_penalty, self.frequency_penalty = float(presence_penalty), float(frequency_penalty)
        self.min_new_tokens, self.stop_tokens = min_new_tokens, list(stop_tokens)
        self.extra = list(extra)
        self._built: dict[tuple[int, torch.device], list[LogitsProcessor]] = {}
        words = [list(word) for word in bad_words]
        words = [word for word in words if len(word) > 1 or word[0] not in self.stop_tokens]  # as transformers
        self.bad_words = NoBadWordsLogitsProcessor(words) if words else None
        self.warpers: list[LogitsProcessor] = []
        if temperature > 0:
            if temperature != 1:
                self.warpers.append(TemperatureLogitsWarper(float(temperature)))
            if top_k:
                self.warpers.append(TopKLogitsWarper(top_k))
            if top_p < 1:
                self.warpers.append(TopPLogitsWarper(float(top_p)))
            if min_p:
                self.warpers.append(MinPLogitsWarper(float(min_p)))
        self.needs_ids = bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words is not None
            or (self.min_new_tokens and self.stop_tokens)
            or self.extra
        )

    @property
    def idle(self) -> bool:
        """Nothing to do: logits pass as they are."""
        return not self.needs_ids and not self.warpers

    def warp(self, scores: Tensor) -> Tensor:
        """Temperature, top-k, top-p and min-p on scores [.., V]: the part that looks at no ids."""
        flat = scores.float().reshape(-1, scores.shape[-1])
        for warper in self.warpers:
            flat = warper(None, flat)
        return flat.view(scores.shape)

    def __call__(self, ids: Tensor, scores: Tensor, prompt_length: int) -> Tensor:
        """Processed scores [R, V] behind rows of ids [R, T], all of them with prompts of one length."""
        scores = scores.float()
        for processor in self._by_prompt(prompt_length, scores.device) if self.needs_ids else ():
            scores = processor(ids, scores)
        return self.warp(scores)

    def over(self, tree: Tree, logits: Tensor, committed: Sequence[Tensor], prompt_lengths: Sequence[int]) -> TreeRows:
        """The rows [B, n, V] of a tree, each processed when it is asked for.

        committed: for each sequence its prompt and reply [T_b], the root included; prompt_lengths: how much is prompt.
        """
        return TreeRows(self, tree, logits, list(committed), list(prompt_lengths))

    def _by_prompt(self, prompt_length: int, device: torch.device) -> list[LogitsProcessor]:
        if (prompt_length, device) not in self._built:
            self._built[prompt_length, device] = self._build(prompt_length, device)
        return self._built[prompt_length, device]

    def _build(self, prompt_length: int, device: torch.device) -> list[LogitsProcessor]:
        chosen: list[LogitsProcessor] = []
        if self.repetition_penalty != 1:
            chosen.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.presence_penalty or self.frequency_penalty:
            chosen.append(OccurrencePenalty(self.presence_penalty, self.frequency_penalty, prompt_length))
        if self.bad_words is not None:
            chosen.append(self.bad_words)
        if self.min_new_tokens and self.stop_tokens:
            stops = torch.tensor(self.stop_tokens, device=device)
            chosen.append(MinNewTokensLengthLogitsProcessor(prompt_length, self.min_new_tokens, stops))
        return chosen + self.extra


@dataclass
class TreeRows:
    """Processed logits of a tree's nodes on request (`decode.verify.Rows`)."""

    processors: Processors
    tree: Tree
    logits: Tensor  # [B, n, V], raw
    committed: list[Tensor]
    prompt_lengths: list[int]

    def row(self, nodes: Tensor, depth: int) -> Tensor:
        """Processed logits [B, V] at one node [B] of each sequence, all at this depth."""
        scores = self.logits[torch.arange(len(nodes), device=nodes.device), nodes]
        if not self.processors.needs_ids:
            return self.processors.warp(scores)
        drafted = _path_tokens(self.tree, nodes, depth)  # [B, depth]
        # Rows of one length go together; each other would need padding, which a processor takes for tokens.
        groups: dict[tuple[int, int], list[int]] = {}
        for b, (row, prompt) in enumerate(zip(self.committed, self.prompt_lengths, strict=True)):
            groups.setdefault((len(row), prompt), []).append(b)
        if len(groups) == 1:
            ids = torch.cat([torch.stack(self.committed), drafted], 1)
            return self.processors(ids, scores, self.prompt_lengths[0])
        out = torch.empty_like(scores, dtype=torch.float32)
        for (_, prompt), rows in groups.items():
            ids = torch.cat([torch.stack([self.committed[b] for b in rows]), drafted[rows]], 1)
            out[rows] = self.processors(ids, scores[rows], prompt)
        return out

    def all(self) -> Tensor:
        """Processed logits [B, n, V]. With processors that read ids this reads the tree's depths on the host."""
        if not self.processors.needs_ids:
            return self.processors.warp(self.logits)
        out = torch.empty_like(self.logits, dtype=torch.float32)
        for node in range(self.tree.num_nodes):
            depths = self.tree.depths[:, node]
            for depth in set(depths.tolist()):
                rows = depths == depth
                out[rows, node] = self.row(torch.full_like(depths, node), depth)[rows]
        return out


def _path_tokens(tree: Tree, nodes: Tensor, depth: int) -> Tensor:
    """Drafted tokens [B, depth] on the way to these nodes [B], themselves included."""
    on_path = tree.ancestors[torch.arange(len(nodes), device=nodes.device), nodes]  # [B, n]
    wanted = on_path & (tree.depths > 0) & (tree.depths <= depth)
    tokens = torch.zeros(len(nodes), depth + 1, dtype=torch.int64, device=nodes.device)
    tokens.scatter_(1, torch.where(wanted, tree.depths - 1, depth), tree.tokens)  # the last column takes the rest
    return tokens[:, :depth]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(name: str, value: Any, good: bool, wanted: str) -> None:
    if not good:
        raise UserError(f"{name} is {value!r}; it must be {wanted}")


def _check_bad_words(words: Any, vocab_size: int | None) -> None:
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise UserError(f"bad_words is {words!r}; it must be a list of lists of token ids")
    for number, word in enumerate(words):
        listed = isinstance(word, Sequence) and not isinstance(word, str) and len(word) > 0
        if not listed or not all(_whole(token) and token >= 0 for token in word):
            raise UserError(f"bad_words: entry {number} is {word!r}; it must be a non-empty list of token ids")
        if vocab_size is not None and max(word) >= vocab_size:
            raise UserError(f"bad_words: entry {number} has id {max(word)}; the target's ids end at {vocab_size - 1}")


def _check_extra(extra: Sequence[LogitsProcessor]) -> None:
    for processor in extra:
        name = type(processor).__name__
        if name in STATEFUL:
            raise UserError(f"logits processor {name} keeps state between calls and cannot follow a tree; leave it out")
        if not callable(processor):
            raise UserError(f"logits processor {processor!r} cannot be called with (ids, scores)")
