"""Plain decoding of many prompts in a fixed number of rows: a row whose reply ends takes the next prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.engine import Engine, Output, _Run
from decode.noise import Noise
from decode.settings import Settings


class Pool(Engine):
    """An engine without a draft that decodes at most `rows` prompts at once. `tick` is called with each whole reply."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tick: Callable[[Output], None] = lambda output: None,
    ):
        assert rows >= 1, f"rows: {rows}, expected at least 1"
        super().__init__(model, tokenizer=tokenizer)
        self.rows, self.tick = rows, tick
        self._waiting: deque[tuple[list[int], int]] = deque()

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: Settings | None = None, sequences: Sequence[int] | None = None
    ) -> list[Output]:
        """Replies in the order of the prompts; the same as `Engine.generate` gives, but for rounding."""
        settings = settings or Settings()
        names = list(range(len(prompts)) if sequences is None else sequences)
        self._check_prompts([list(prompt) for prompt in prompts], settings.max_new_tokens)
        self._waiting = deque(zip(map(list, prompts), names, strict=True))
        outputs: list[Output] = []
        while self._waiting:
            run = self._enter(self.rows, settings)
            while run.rows:
                self._step(run)
            outputs += run.outputs
        return outputs

    def _enter(self, count: int, settings: Settings) -> _Run:
        """The next prompts, at most `count`, as a run of their own with the first token of each reply."""
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        run = self._begin([prompt for prompt, _ in taken], settings, [name for _, name in taken])
        for output in run.outputs:
            if output.finish:
                self.tick(output)
        return run

    def _commit(
        self, run: _Run, path: Tensor, following: list[list[int]], counts: list[int], features: Tensor | None
    ) -> None:
        """As in `Engine`, but the rows of replies that ended go to the next prompts where they stand: dropping a row
        copies the cache of all others."""
        run.cache.commit(path[:, :1], counts, moved=False)
        run.root = torch.tensor([tokens[0] for tokens in following], device=self.device)
        free = []
        for b, tokens in enumerate(following):
            output = run.outputs[run.rows[b]]
            output.accepted.append(0)
            if not self._take(run, b, tokens):
                self.tick(output)
                free.append(b)
        run.timing.lap("other")
        while free and self._waiting:
            self._place(run, self._enter(len(free), run.settings), free)
        run.timing.lap()
        if free:
            self._select(run, torch.tensor([b for b in range(len(run.rows)) if b not in free], dtype=torch.int64))

    def _place(self, run: _Run, new: _Run, free: list[int]) -> None:
        """Move the rows of `new` into rows of `run` listed in `free`, which loses them."""
        first = len(run.outputs)
        run.prompts += new.prompts
        run.outputs += new.outputs
        run.timing.prefill += new.timing.prefill
        for output in new.outputs:
            output.timing = run.timing
        names = run.noise.sequences.tolist()
        cache, source = run.cache, new.cache
        for i, row in enumerate(new.rows):
            b, length = free.pop(0), source.host_lengths[i]
            if length > cache.capacity:
                cache._grow(length)
            assert cache.store is not None and source.store is not None
            # What the row held behind `length` stays there: nobody sees it before it is overwritten.
            cache.store[:, :, b, :, :length] = source.store[:, :, i, :, :length]
            cache.host_lengths[b] = length
            run.root[b], run.rows[b] = new.root[i], first + row
            names[b] = int(new.noise.sequences[i])
        cache.lengths = torch.tensor(cache.host_lengths, device=self.device)
        run.noise = Noise(run.settings.seed, names, self.device)
