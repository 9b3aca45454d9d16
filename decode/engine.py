"""Speculative decoding of a batch: propose -> verify -> commit, until every row has ended.

Read `Engine._step` first. Plain decoding is the same step with a tree of one node, so both draw with the same noise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.cache import TreeCache
from decode.draft import Draft
from decode.errors import UserError
from decode.forward import Forward
from decode.linear import FastLinears
from decode.noise import Noise
from decode.processors import Processors
from decode.settings import Settings
from decode.tree import Chain, Plan, Proposer, Static, Tree, grow
from decode.verify import Rule, Verdict, check_rule

RESERVE = 256  # tokens of a reply that the cache has room for at once; it doubles beyond


@dataclass
class Timing:
    """Seconds spent by one call of `generate`, all rows together; `steps` are the target forwards after the prompt's."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    steps: int = 0
    _mark: float = field(default=0.0, repr=False)

    def lap(self, part: str | None = None) -> None:
        """Add the time since the last lap to `part`."""
        now = time.perf_counter()
        if part is not None:
            setattr(self, part, getattr(self, part) + now - self._mark)
        self._mark = now


@dataclass
class Output:
    """One reply. `accepted` holds for each step how many drafted tokens the target accepted, before any cut."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    """`stop` (a token or string) or `length`; empty while decoding."""
    accepted: list[int] = field(default_factory=list)
    text: str | None = None
    """The reply up to its stop token or string; None without a tokenizer."""
    rule: str = ""
    lossless: bool = True
    timing: Timing = field(default_factory=Timing)


@dataclass
class _Run:
    """The rows still decoding. Row b of every tensor belongs to output `rows[b]`."""

    settings: Settings
    rule: Rule
    processors: Processors
    stops: frozenset[int]
    prompts: list[list[int]]
    outputs: list[Output]
    timing: Timing
    rows: list[int]
    noise: Noise
    cache: TreeCache
    root: Tensor  # [B] last committed token, not yet in the cache
    state: Any = None  # the draft's
    guesses: Tensor | None = None  # [B, 1, Vd] the draft's logits behind the root

    def committed(self) -> list[Tensor]:
        """Prompt and reply of each row, for processors that read them."""
        if not self.processors.needs_ids:
            return []
        ids = [self.prompts[row] + self.outputs[row].tokens for row in self.rows]
        return [torch.tensor(row, device=self.root.device) for row in ids]

    def prompt_lengths(self) -> list[int]:
        return [len(self.prompts[row]) for row in self.rows]


class Engine:
    """Decodes with `model`, guessing with `draft` in trees that grow by `plan`; without a draft it decodes plainly."""

    def __init__(
        self,
        model: PreTrainedModel,
        draft: Draft | None = None,
        plan: Plan | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        if draft is not None and plan is None:
            plan = Chain(min(4, draft.max_depth or 4))
        if draft is not None and draft.max_depth is not None and plan is not None and plan.depth > draft.max_depth:
            raise UserError(f"tree: depth {plan.depth} is more than the draft's {draft.max_depth}; lower the depth")
        self.model, self.draft, self.plan, self.tokenizer = model, draft, plan, tokenizer
        self.forward = Forward(model, draft.target_layers if draft else ())
        self.device = self.forward.device
        self.fast_linears = FastLinears(draft) if isinstance(draft, torch.nn.Module) else nullcontext

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: Settings | None = None, sequences: Sequence[int] | None = None
    ) -> list[Output]:
        """Replies to prompts of token ids, decoded as one batch.

        `sequences` names the rows for the noise (default 0, 1, ..): under one name and seed a prompt gets the same
        reply in any batch.
        """
        run = self._begin(prompts, settings or Settings(), sequences)
        while run.rows:
            self._step(run)
        return run.outputs

    def stream(self, prompt: Sequence[int], settings: Settings | None = None, sequence: int = 0) -> Iterator[list[int]]:
        """The reply to one prompt: the new tokens of each step as they are committed."""
        run = self._begin([prompt], settings or Settings(), [sequence])
        yield run.outputs[0].tokens[:]
        while run.rows:
            before = len(run.outputs[0].tokens)
            self._step(run)
            yield run.outputs[0].tokens[before:]

    @torch.no_grad()
    def _step(self, run: _Run) -> None:
        """One target forward: each row's guesses are checked, the accepted path and one more token are kept."""
        run.timing.lap()
        tree = self._propose(run)
        run.timing.lap("draft")
        logits, features = self.forward(run.cache, tree.tokens, tree.depths, tree.ancestors)
        verdict = self._verify(run, tree, logits, run.cache.lengths + 1)
        following, counts = _read(tree, verdict)
        run.timing.lap("verify")
        self._commit(run, verdict.path, following, counts, features)
        run.timing.lap("draft" if self.draft else "other")
        run.timing.steps += 1

    def _propose(self, run: _Run) -> Tree:
        """Guesses behind the root of each row; without a draft the root alone."""
        if self.draft is None or self.plan is None or run.guesses is None:
            return Tree.root(run.root)
        proposer = self._proposer(run)
        with self.fast_linears():
            return grow(self.plan, run.root, run.guesses, partial(self.draft.extend, run.state), proposer)

    def _verify(self, run: _Run, tree: Tree, logits: Tensor, positions: Tensor) -> Verdict:
        """The path that the target accepts. logits [B, n, V]; positions [B] of the token behind the root."""
        if run.settings.ignore_eos:
            logits[..., list(run.stops)] = -torch.inf
        rows = (
            logits if run.processors.idle else run.processors.over(tree, logits, run.committed(), run.prompt_lengths())
        )
        vocabulary = self.draft.vocabulary if self.draft and tree.num_nodes > 1 else None
        return run.rule.verify(tree, rows, run.noise, positions, vocabulary)

    def _commit(
        self, run: _Run, path: Tensor, following: list[list[int]], counts: list[int], features: Tensor | None
    ) -> None:
        """Keep path[b, :counts[b]] in the cache and the token behind each of its nodes in the reply; tell the draft."""
        run.cache.commit(path[:, : max(counts)], counts, moved=path.shape[1] > 1 and not isinstance(self.plan, Chain))
        for b, count in enumerate(counts):
            run.outputs[run.rows[b]].accepted.append(count - 1)
        alive = [b for b, tokens in enumerate(following) if self._take(run, b, tokens)]
        if len(alive) < len(counts):
            following, counts = [following[b] for b in alive], [counts[b] for b in alive]
            rows = torch.tensor(alive, dtype=torch.int64, device=self.device)
            path, features = path[rows], None if features is None else features[rows]
            self._select(run, rows)
        if not alive:
            return
        run.timing.lap("other")
        longest = max(counts)
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in following], device=self.device)
        kept = torch.tensor(counts, device=self.device)
        run.root = tokens.gather(1, kept[:, None] - 1)[:, 0]
        if self.draft is not None:
            if features is not None:
                nodes = path[:, :longest].clamp(min=0)
                features = features.gather(1, nodes[:, :, None].expand(-1, -1, features.shape[2]))
            with self.fast_linears():
                run.guesses = self.draft.commit(run.state, features, tokens, kept)

    @torch.no_grad()
    def _begin(self, prompts: Sequence[Sequence[int]], settings: Settings, sequences: Sequence[int] | None) -> _Run:
        """Run the prompts, choose each row's first token, and let the draft guess behind it."""
        rows_of_ids = [list(prompt) for prompt in prompts]
        return self._start(rows_of_ids, settings, list(range(len(prompts)) if sequences is None else sequences))

    def _start(self, prompts: list[list[int]], settings: Settings, names: list[int]) -> _Run:
        self._check_prompts(prompts, settings.max_new_tokens)
        rule, stops = self._rule(settings), self._stop_tokens(settings)
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts], device=self.device)
        nodes = self.plan.num_nodes if self.draft and self.plan else 1
        timing = Timing()
        timing.lap()
        cache = self.forward.new_cache(len(prompts), max(lengths) + min(settings.max_new_tokens, RESERVE) + nodes)
        logits, features = self.forward.prompt(cache, tokens, lengths)
        root = tokens.gather(1, cache.lengths[:, None] - 1)[:, 0]
        outputs = [Output(rule=rule.name, lossless=rule.lossless, timing=timing) for _ in prompts]
        rows, noise = list(range(len(prompts))), Noise(settings.seed, names, self.device)
        processors = settings.processors(sorted(stops), self.forward.vocab_size)
        run = _Run(settings, rule, processors, stops, prompts, outputs, timing, rows, noise, cache, root)
        first = self._verify(run, Tree.root(root), logits, cache.lengths).token
        alive = [b for b, token in enumerate(first.tolist()) if self._take(run, b, [token])]
        timing.lap("prefill")
        kept = torch.tensor(alive, dtype=torch.int64, device=self.device)
        self._select(run, kept)
        run.root = first[kept]
        if self.draft is not None and alive:
            tokens = torch.nn.functional.pad(tokens, (0, 1))[kept]
            tokens.scatter_(1, cache.lengths[:, None], run.root[:, None])
            features = None if features is None else features[kept]
            capacity = max(lengths) + settings.max_new_tokens + nodes
            with self.fast_linears():
                run.state, run.guesses = self.draft.begin(features, tokens, cache.lengths, capacity)
            timing.lap("prefill")
        return run

    def _take(self, run: _Run, b: int, tokens: list[int]) -> bool:
        """Add the tokens committed to row b, up to the first stop or the limit. Does the row go on?"""
        output, settings = run.outputs[run.rows[b]], run.settings
        for token in tokens:
            output.tokens.append(token)
            if token in run.stops or self._ends_in_stop_string(output.tokens, settings.stop_strings):
                output.finish = "stop"
            elif len(output.tokens) == settings.max_new_tokens:
                output.finish = "length"
            if output.finish:
                output.text = self._text(output.tokens, run.stops, settings.stop_strings)
                return False
        return True

    def _ends_in_stop_string(self, tokens: list[int], strings: Sequence[str]) -> bool:
        """Does the last token complete a stop string? Decodes only as many tokens as one can span."""
        for string in strings:
            assert self.tokenizer is not None
            tail = self.tokenizer.decode(tokens[-4 * len(string.encode()) - 16 :])
            if string in tail:
                return True
        return False

    def _text(self, tokens: list[int], stops: frozenset[int], strings: Sequence[str]) -> str | None:
        if self.tokenizer is None:
            return None
        text = str(self.tokenizer.decode(tokens[:-1] if tokens[-1] in stops else tokens, skip_special_tokens=True))
        return text[: min([at for at in map(text.find, strings) if at >= 0], default=len(text))]

    def _select(self, run: _Run, rows: Tensor) -> None:
        """Go on with these rows [B'] of the batch."""
        kept = rows.tolist()
        if len(kept) == len(run.rows):
            return
        run.rows = [run.rows[b] for b in kept]
        if not kept:
            return
        run.noise, run.root = run.noise.select(rows), run.root[rows]
        run.cache.select(rows)
        if run.state is not None and self.draft is not None:
            self.draft.select(run.state, rows)

    def _rule(self, settings: Settings) -> Rule:
        chain = self.draft is None or isinstance(self.plan, Chain)
        return check_rule(settings.rule, chain, settings.temperature, chain or _in_order(self.plan))

    def _proposer(self, run: _Run) -> Proposer:
        """How children are chosen for the run's rule, with the noise that the target will use."""
        assert self.draft is not None and run.guesses is not None
        settings, vocabulary = run.settings, self.draft.vocabulary
        size = run.guesses.shape[-1] if vocabulary is None else self.forward.vocab_size
        noise = run.noise.proposal(run.cache.lengths + 1, size, vocabulary)
        temperature = settings.draft_temperature or settings.temperature or 1.0
        return Proposer(run.rule.propose, temperature, vocabulary, noise, run.rule.needs_q)

    def _stop_tokens(self, settings: Settings) -> frozenset[int]:
        if settings.stop_strings and self.tokenizer is None:
            raise UserError("settings: stop_strings need the tokenizer; give it to the Engine")
        stops = settings.stop_tokens
        if stops is None:
            config = self.model.generation_config or self.model.config
            stops = config.eos_token_id if config.eos_token_id is not None else ()
        return frozenset([stops] if isinstance(stops, int) else stops)

    def _check_prompts(self, prompts: list[list[int]], limit: int) -> None:
        context = self.forward.context
        self._check_rotary([len(prompt) for prompt in prompts], limit)
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise UserError(f"prompt {number}: it is empty; give at least one token")
            if context is not None and len(prompt) + limit > context:
                raise UserError(
                    f"prompt {number}: {len(prompt)} tokens and max_new_tokens {limit} exceed the target's context of"
                    f" {context}; shorten one of them"
                )
            if not all(0 <= token < self.forward.vocab_size for token in prompt):
                raise UserError(
                    f"prompt {number}: a token id is outside the target's vocabulary of {self.forward.vocab_size}"
                )

    def _check_rotary(self, lengths: list[int], limit: int) -> None:
        """A rotary embedding that changes at some length rotates cached keys and new ones differently there."""
        rotary = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        if rotary.get("rope_type") != "longrope":
            return
        change = rotary["original_max_position_embeddings"]
        ahead = limit + (self.plan.depth if self.draft and self.plan else 0)
        if min(lengths) <= change < max(lengths) + ahead:
            raise UserError(
                f"prompts: the target's rotary embedding changes at {change} tokens; keep all prompts with their replies"
                f" (and {ahead - limit} guesses) below it, or all prompts above it"
            )


def _in_order(plan: Plan | None) -> bool:
    """Does each node keep its first draws, none dropped for what it is?"""
    if not isinstance(plan, Static):
        return isinstance(plan, Chain)
    return all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in plan.paths for path in plan.paths)


def _read(tree: Tree, verdict: Verdict) -> tuple[list[list[int]], list[int]]:
    """The tokens that follow the nodes of each row's path, and how many: the one wait for the device in a step."""
    tokens = tree.tokens.gather(1, verdict.path.clamp(min=0))  # [B, D + 1]
    following = torch.cat([verdict.count[:, None] + 1, tokens[:, 1:], verdict.token[:, None]], 1)
    following.scatter_(1, verdict.count[:, None] + 1, verdict.token[:, None])
    rows = following.tolist()
    return [row[1 : 1 + row[0]] for row in rows], [row[0] for row in rows]
