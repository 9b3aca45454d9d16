"""Draft heads that guess all levels in one forward: a guess does not depend on the tokens guessed before it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.errors import UserError
from headtrain.heads.base import Head
from headtrain.target import Target


@dataclass
class State:
    """What drafting keeps between calls: its own KV cache, logits [B, K, Vd] of all levels, and the level reached."""

    cache: TreeCache
    logits: Tensor = None  # type: ignore[assignment]
    level: int = 0
    rows: list[Tensor] = field(default_factory=list)  # [Vd, H] of lm_head, where the head has none of its own


class ParallelHead(Head):
    """A family defines `begin` and `commit`, which end with `start`."""

    def start(self, state: State, logits: Tensor) -> Tensor:
        """A new step; logits [B, K, Vd] of all its levels. Returns those of the first."""
        state.level, state.logits = 0, logits
        return logits[:, :1]

    @torch.no_grad()
    def extend(self, state: State, tokens: Tensor, parents: Tensor) -> Tensor:
        state.level += 1
        levels = state.logits.shape[1]
        assert state.level < levels, f"level {state.level}: expected below {levels}"
        return state.logits[:, state.level : state.level + 1]

    def select(self, state: State, rows: Tensor) -> None:
        state.cache.select(rows)
        state.logits = state.logits[rows]

    def generator(self) -> torch.Generator | None:
        """Of the random choices of `loss`: torch's own in training, a fixed one when losses are compared."""
        return None if self.training else torch.Generator().manual_seed(0)


def choose_mask_token(target: Target, given: int | None) -> int:
    """The token that stands for unknown ones: padding, else the end of a reply, unless the recipe says otherwise."""
    config = target.config
    size = len(target.embedding.weight)
    if given is not None:
        if not 0 <= given < size:
            raise UserError(f"head.mask_token: {given} is no token of the target's {size}; give an id below, or null")
        return given
    tokens = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
    ids = (token[0] if isinstance(token, list) else token for token in tokens)
    return next((token for token in ids if token is not None and 0 <= token < size), 0)
