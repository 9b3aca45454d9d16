"""How to decode: lengths, sampling, stops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import LogitsProcessor

from decode.errors import UserError
from decode.processors import Processors


@dataclass(frozen=True)
class Settings:
    """Checked once, when it is built."""

    max_new_tokens: int = 128
    """Most tokens of a reply; a stop token counts."""
    temperature: float = 0.0
    """0: the likeliest token always."""
    top_k: int = 0
    """Sample among the k likeliest; 0: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that reach this mass."""
    min_p: float = 0.0
    """Sample among tokens at least this share as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1: tokens of prompt and reply lose."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the reply contains."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the reply."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that may not appear."""
    min_new_tokens: int = 0
    """No stop token before this many tokens."""
    seed: int = 0
    """Of the noise: sampling is a function of (target, seed, sequence number)."""
    rule: str | None = None
    """Acceptance rule; None: `greedy` at temperature 0, else `gumbel`."""
    draft_temperature: float | None = None
    """Of the draft's probabilities; None: the target's temperature, 1 at temperature 0."""
    stop_tokens: Sequence[int] | None = None
    """End the reply, themselves included; None: those of the target's generation config."""
    stop_strings: Sequence[str] = ()
    """End the reply with the token that completes one."""
    ignore_eos: bool = False
    """Stop tokens get probability 0, so every reply has max_new_tokens: equal lengths for speed comparisons."""

    logits_processors: Sequence[LogitsProcessor] = ()
    """Further processors of transformers: functions of a node's own ids and scores, without memory."""

    def __post_init__(self) -> None:
        def check(good: bool, name: str, wanted: str) -> None:
            if not good:
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

        check(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        check(self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", f"at most {self.max_new_tokens}")
        good = self.draft_temperature is None or 0 < self.draft_temperature < math.inf
        check(good, "draft_temperature", "a positive number")
        strings = not isinstance(self.stop_strings, str) and all(s and isinstance(s, str) for s in self.stop_strings)
        check(strings, "stop_strings", "a list of non-empty strings")
        self.processors()

    def processors(self, stop_tokens: Sequence[int] = (), vocab_size: int | None = None) -> Processors:
        """What these settings do to the target's logits. UserError for values that make no sense."""
        return Processors(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.bad_words,
            self.min_new_tokens,
            stop_tokens,
            self.logits_processors,
            vocab_size,
        )
