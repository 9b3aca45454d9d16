"""What proposes tokens: the `Draft` protocol, a smaller model, and prompt lookup."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.cache import TreeCache
from decode.errors import UserError
from decode.forward import Forward
from decode.guesses import Guesses


class Draft(Protocol):
    """Guesses the target's next tokens, level by level. All state lives in the object that `begin` returns.

    Logits are float32, unnormalised, at temperature 1, over the draft's own columns: column i stands for the target's
    token `vocabulary[i]`.
    """

    target_layers: tuple[int, ...]
    """Boundaries of the target whose hidden states are the features; () when it needs none."""

    @property
    def vocabulary(self) -> Tensor | None:
        """[Vd] int64, ascending target ids of the columns; None: column i is token i."""
        ...

    max_depth: int | None
    """Deepest level it can guess; None: any."""

    def begin(self, features: Any, tokens: Tensor, lengths: Tensor, capacity: int) -> tuple[Any, Tensor]:
        """features [B, T, F] of the prompts, right padded; tokens [B, T + 1] prompt and the root behind it, lengths[b] + 1
        valid; lengths [B] of the prompts; capacity: most tokens a row can reach.

        Returns the state and logits [B, 1, Vd] of the token after the root.
        """
        ...

    def extend(self, state: Any, tokens: Tensor, parents: Tensor) -> Tensor:
        """One more level: tokens [B, m] and their parents [B, m], 0 for the root, i for the i-th node extended this step.

        Returns logits for the children of each node, [B, m, Vd], or [B, 1, Vd] where they are the same for all.
        """
        ...

    def commit(self, state: Any, features: Any, tokens: Tensor, counts: Tensor) -> Tensor:
        """features [B, m, F] of the newly verified positions (root and accepted nodes, right padded); tokens [B, m] the
        token that follows each, the last of them the new root; counts [B] valid positions.

        Forgets this step's guesses. Returns logits [B, 1, Vd] of the token after the new root.
        """
        ...

    def select(self, state: Any, rows: Tensor) -> None:
        """Keep these rows [B'] of the batch."""
        ...


@dataclass
class _ModelState:
    cache: TreeCache
    guesses: Guesses


class ModelDraft:
    """A smaller causal language model with the target's tokenizer. It reads tokens only."""

    target_layers: tuple[int, ...] = ()
    vocabulary: Tensor | None = None
    max_depth: int | None = None

    def __init__(self, model: PreTrainedModel, target_vocab_size: int):
        self.forward = Forward(model)
        # Padded sizes may differ: ids that only one of the two has belong to no token.
        self.size = min(self.forward.vocab_size, target_vocab_size)

    def begin(self, features: Tensor | None, tokens: Tensor, lengths: Tensor, capacity: int):
        cache = self.forward.new_cache(len(tokens), capacity)
        logits, _ = self.forward.prompt(cache, self._known(tokens), (lengths + 1).tolist())
        return _ModelState(cache, Guesses(len(tokens), tokens.device)), logits[..., : self.size]

    def extend(self, state: _ModelState, tokens: Tensor, parents: Tensor) -> Tensor:
        rows = state.guesses.add(parents)
        logits, _ = self.forward(state.cache, self._known(tokens), state.guesses.depths, rows)
        return logits[..., : self.size]

    def commit(self, state: _ModelState, features: Tensor | None, tokens: Tensor, counts: Tensor) -> Tensor:
        batch, m = tokens.shape
        chain = torch.arange(m, device=tokens.device).expand(batch, m)
        causal = torch.ones(m, m, dtype=torch.bool, device=tokens.device).tril().expand(batch, m, m)
        logits, _ = self.forward(state.cache, self._known(tokens), chain, causal)
        state.cache.commit(chain, counts, moved=False)
        state.guesses = Guesses(batch, tokens.device)
        last = (counts - 1)[:, None, None].expand(-1, 1, logits.shape[-1])
        return logits.gather(1, last)[..., : self.size]

    def select(self, state: _ModelState, rows: Tensor) -> None:
        state.cache.select(rows)
        state.guesses.select(rows)

    def _known(self, tokens: Tensor) -> Tensor:
        """Ids that the draft has an embedding for."""
        return tokens.clamp(max=self.forward.vocab_size - 1)


def require_same_tokenizer(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse a draft model whose token ids mean other tokens; a longer list of ids on one side is padding."""
    ours, theirs = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    for i in range(max(len(ours), len(theirs))):
        if i in ours and i in theirs and ours[i] != theirs[i]:
            raise UserError(
                f"draft model: token {i} is {theirs[i]!r} but the target's is {ours[i]!r}; use a draft model that shares"
                " the target's tokenizer"
            )


@dataclass
class _LookupState:
    tokens: Tensor  # [B, S] committed tokens, the root last, 0 behind a row's end
    lengths: Tensor  # [B] including the root
    active: Tensor  # [B, 1 + nodes extended this step, S] float32: score of the guess that slot s follows; 0: none


class NgramDraft:
    """Prompt lookup: what followed the last tokens where they occurred before. No training, no features.

    The guess after the longest earlier match of up to `longest` tokens is the likeliest, recent ones before old ones;
    without a match all tokens are equally likely.
    """

    target_layers: tuple[int, ...] = ()
    vocabulary: Tensor | None = None
    max_depth: int | None = None

    def __init__(self, vocab_size: int, longest: int = 3):
        if longest < 1:
            raise UserError(f"prompt lookup: longest {longest} must be at least 1")
        self.vocab_size, self.longest = vocab_size, longest

    def begin(self, features: Tensor | None, tokens: Tensor, lengths: Tensor, capacity: int):
        state = _LookupState(torch.nn.functional.pad(tokens, (0, self.longest + capacity)), lengths + 1, tokens)
        past_end = torch.arange(state.tokens.shape[1], device=tokens.device) >= state.lengths[:, None]
        state.tokens.masked_fill_(past_end, 0)
        return state, self._look(state)

    def extend(self, state: _LookupState, tokens: Tensor, parents: Tensor) -> Tensor:
        slots = state.tokens.shape[1]
        guesses = state.active.gather(1, parents[:, :, None].expand(-1, -1, slots))  # [B, m, S]
        right = guesses * (state.tokens[:, None] == tokens[:, :, None])
        known = torch.arange(slots, device=tokens.device) < state.lengths[:, None]
        active = torch.nn.functional.pad(right, (1, -1)) * known[:, None]
        state.active = torch.cat([state.active, active], 1)
        return self._logits(state, active)

    def commit(self, state: _LookupState, features: Tensor | None, tokens: Tensor, counts: Tensor) -> Tensor:
        m = tokens.shape[1]
        steps = torch.arange(m, device=tokens.device)
        tokens = tokens.masked_fill(steps >= counts[:, None], 0)
        state.tokens.scatter_(1, state.lengths[:, None] + steps, tokens)
        state.lengths = state.lengths + counts
        return self._look(state)

    def select(self, state: _LookupState, rows: Tensor) -> None:
        state.tokens, state.lengths, state.active = state.tokens[rows], state.lengths[rows], state.active[rows]

    def _look(self, state: _LookupState) -> Tensor:
        """Scores of all earlier places whose last tokens are ours: [B, 1, S], and the logits they give."""
        slots = torch.arange(state.tokens.shape[1], device=state.tokens.device)
        same = (slots < state.lengths[:, None]) & (slots > 0)  # slot s holds a token that had one before it
        length = torch.zeros_like(same, dtype=torch.float32)
        for back in range(1, self.longest + 1):
            ours = state.tokens.gather(1, (state.lengths - back).clamp(min=0)[:, None])
            before = torch.nn.functional.pad(state.tokens, (back, -back), value=-1)  # [B, S], the token at s - back
            same = same & (before == ours) & (state.lengths >= back)[:, None]
            length += same
        recency = slots / state.lengths[:, None]  # below 1, so a longer match always wins
        state.active = ((length + recency) * (length > 0))[:, None]
        return self._logits(state, state.active)

    def _logits(self, state: _LookupState, active: Tensor) -> Tensor:
        """[B, m, V]: log V + twice the score for guessed tokens, so that a match outweighs all other tokens; else 0."""
        batch, m, slots = active.shape
        scores = active.new_zeros(batch, m, self.vocab_size)
        scores.scatter_reduce_(2, state.tokens[:, None].expand(batch, m, slots), active, "amax")
        return torch.where(scores > 0, math.log(self.vocab_size) + 2 * scores, 0.0)
