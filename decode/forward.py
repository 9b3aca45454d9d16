"""One forward of a causal language model over a `TreeCache`: the target's verification, or a draft model's level."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decode.attention import Visibility, tree_attention
from decode.cache import TreeCache, require_rollback
from decode.capture import Capture
from decode.linear import FastLinears


class Forward:
    """Runs `model`; with `layers`, also gives the hidden states at those boundaries."""

    def __init__(self, model: Any, layers: Sequence[int] = ()):
        require_rollback(model)
        self.model: Any = model
        self.capture = Capture(model, layers) if layers else None
        self.fast_linears = FastLinears(model)
        self.device: torch.device = model.get_input_embeddings().weight.device
        config = model.config.get_text_config()
        self.vocab_size = config.vocab_size
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        # transformers 5.24 renamed the argument
        parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"

    def new_cache(self, batch: int, capacity: int) -> TreeCache:
        return TreeCache(self.model.config.get_text_config().num_hidden_layers, batch, capacity, self.device)

    def prompt(self, cache: TreeCache, tokens: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor | None]:
        """Fill an empty cache with prompts tokens [B, T], right padded. Commits them.

        Returns the logits [B, 1, V] behind each row's last token and features [B, T, F] (None without layers).
        """
        last = sorted({length - 1 for length in lengths})
        depths = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        logits, features = self(cache, tokens, depths, None, torch.tensor(last, device=self.device))
        cache.commit(depths, lengths, moved=False)
        which = torch.tensor([last.index(length - 1) for length in lengths], device=self.device)
        return logits.gather(1, which[:, None, None].expand(-1, 1, logits.shape[-1])), features

    def __call__(
        self, cache: TreeCache, tokens: Tensor, depths: Tensor, ancestors: Tensor | None, keep: int | Tensor = 0
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [B, m], the last m of the nodes described by depths [B, n] and ancestors [B, m, n]; see `Visibility`.

        Returns logits [B, m, V] float32 (or those of the positions `keep`) and features [B, m, F].
        """
        m, n = tokens.shape[1], depths.shape[1]
        start, end = cache.open(m, n - m)
        visibility = Visibility(cache.lengths, depths, ancestors, start, end)
        positions = cache.lengths[:, None] + depths[:, n - m :]
        if self.context is not None and end > self.context:
            # Only guesses behind the end of a reply lie past the context; they are never kept.
            positions = positions.clamp(max=self.context - 1)
        logits, features = self._run(cache, tokens, positions, visibility, keep)
        if logits.device.type == "cpu" and math.isnan(float(logits.sum())):
            # An invisible slot may hold NaN, and SDPA multiplies it with 0; the kernels for a GPU never read it.
            visibility.guarded = True
            logits, features = self._run(cache, tokens, positions, visibility, keep)
        return logits, features

    def _run(
        self, cache: TreeCache, tokens: Tensor, positions: Tensor, visibility: Visibility, keep: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        arguments = {self.cache_name: cache, "use_cache": True, "logits_to_keep": keep, "tree": visibility}
        with tree_attention(self.model), self.fast_linears():
            if self.capture is None:
                return self.model(input_ids=tokens, position_ids=positions, **arguments).logits.float(), None
            with self.capture:
                logits = self.model(input_ids=tokens, position_ids=positions, **arguments).logits.float()
                return logits, self.capture.take()
