"""Who wrote each token of a reply: the draft, at which depth and as which of its choices, or the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decode.draft import Draft
from decode.engine import Engine, Output
from decode.metrics import acceptance_length
from decode.settings import Settings
from decode.tree import Plan, Tree
from decode.verify import Verdict
from headtrain.conversations import Message
from headtrain.target import Target


@dataclass(frozen=True)
class Written:
    """One token. Probabilities are those given the text before it, at the temperature of the run (1 where that is 0)."""

    token: int
    depth: int
    """Of the accepted guess; 0: the target wrote it."""
    rank: int | None
    """Among the guesses behind the same token, 1 the draft's first choice; None for the target's own."""
    draft: float | None
    target: float
    refused: tuple[int, float, float] | None = None
    """Where the target wrote: the draft's first guess for the place, its draft and target probability."""


class Tracer(Engine):
    """Decodes as `Engine` does and keeps in `traces` who wrote the tokens of the last `generate`; slower by a softmax."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.traces: list[list[Written]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: Settings | None = None, sequences: Sequence[int] | None = None
    ) -> list[Output]:
        self.traces = [[] for _ in prompts]
        outputs = super().generate(prompts, settings, sequences)
        self.traces = [trace[: len(out.tokens)] for trace, out in zip(self.traces, outputs, strict=True)]
        return outputs

    def _verify(self, run: Any, tree: Tree, logits: Tensor, positions: Tensor) -> Verdict:
        verdict = super()._verify(run, tree, logits, positions)
        for b, row in enumerate(run.rows):
            self.traces[row] += _written(tree, logits[b], verdict, b, run.settings.temperature or 1.0)
        return verdict


def _written(tree: Tree, logits: Tensor, verdict: Verdict, b: int, temperature: float) -> list[Written]:
    """The tokens that one step adds to sequence b; logits [n, V]."""
    count = int(verdict.count[b])
    path = verdict.path[b, : count + 1].tolist()
    p = torch.softmax(logits[path].float() / temperature, -1)  # [count + 1, V]
    tokens, q = tree.tokens[b].tolist(), tree.log_q[b].exp().tolist()
    parents, valid = tree.parents[b].tolist(), tree.valid[b].tolist()

    def children(node: int) -> list[int]:
        return [child for child, above in enumerate(parents) if above == node and valid[child]]

    written = []
    for step, (above, node) in enumerate(zip(path, path[1:], strict=False)):
        rank = 1 + children(above).index(node)
        written.append(Written(tokens[node], step + 1, rank, q[node], float(p[step, tokens[node]])))
    last, guesses = int(verdict.token[b]), children(path[-1])
    refused = None
    if guesses:
        first = guesses[0]
        known = tokens[first] < p.shape[-1]
        refused = (tokens[first], q[first], float(p[-1, tokens[first]]) if known else 0.0)
    written.append(Written(last, 0, None, None, float(p[-1, last]), refused))
    return written


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; a token that ends inside a character adds nothing, its successor the character."""
    found, start, shown = [], 0, 0  # text of tokens[start:shown] has been given out
    for end in range(1, len(tokens) + 1):
        before = str(tokenizer.decode(list(tokens[start:shown])))
        text = str(tokenizer.decode(list(tokens[start:end])))
        if text.endswith("\ufffd") and end < len(tokens):
            found.append("")
            continue
        found.append(text[len(before) :])
        start, shown = shown, end
    return found


def to_rows(tokenizer: PreTrainedTokenizerBase, trace: Sequence[Written]) -> list[dict[str, Any]]:
    """A trace for JSON: text, depth, rank, draft and target probability, and the refused guess with its text."""
    texts = pieces(tokenizer, [written.token for written in trace])
    rows = []
    for text, written in zip(texts, trace, strict=True):
        refused = None
        if written.refused is not None:
            token, q, p = written.refused
            refused = {"text": str(tokenizer.decode([token])), "draft": q, "target": p}
        row = {"text": text, "token": written.token, "depth": written.depth, "rank": written.rank}
        rows.append({**row, "draft": written.draft, "target": written.target, "refused": refused})
    return rows


def trace_replies(
    draft: Draft,
    target: Target,
    prompts: Mapping[str, Sequence[list[Message]]],
    settings: Settings,
    plan: Plan,
    count: int = 1,
) -> list[dict[str, Any]]:
    """The token view of the first `count` prompts of each set, decoded once more and up to their end token."""
    engine = Tracer(target.model, draft, plan, target.tokenizer)
    replies = []
    for name, rows in prompts.items():
        for messages in rows[:count]:
            outputs = engine.generate([target.prompt_ids(messages)], replace(settings, ignore_eos=False), [0])
            view = {
                "name": name,
                "prompt": str(messages[-1]["content"]),
                "acceptance_length": acceptance_length(outputs),
            }
            replies.append({**view, "rows": to_rows(target.tokenizer, engine.traces[0])})
    return replies
