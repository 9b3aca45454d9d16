"""The step of `Engine` with shapes and addresses that never change: captured once as a CUDA graph, then replayed.

One graph holds the whole step: grow the tree, run the target, walk, keep the path, let the draft read the new features.
Lengths, ends of replies and the tokens of a step live on the device. A row whose reply has ended is frozen there, so
the host may read one step late: it starts step t + 1 before it looks at the tokens of step t.

With `capture=False` the same step runs eagerly on any device, which is how its exactness is tested.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.cache import TreeCache
from decode.draft import Draft, NgramDraft
from decode.engine import Engine, Output, _Run
from decode.guesses import Guesses
from decode.noise import Noise
from decode.settings import Settings
from decode.tree import Chain, Plan

SMALLEST_TIER = 512  # slots; the tiers double from here, one graph each
MAX_STEPS = 4  # captured steps kept, each with a cache of its own
WARM_UP = 2  # eager steps before a capture: they compile kernels and fill lasting tables
LIVE = ("root", "guesses", "state")  # what a step hands to the next, besides the caches


class FixedCache(TreeCache):
    """A cache that never grows, with lengths on the device alone. Rows marked in `frozen` [B] keep their length."""

    def __init__(self, like: TreeCache, capacity: int, frozen: Tensor):
        assert like.store is not None, "like.store: None received, a cache that holds a prompt expected"
        super().__init__(len(like.layers), len(like.lengths), capacity, like.store.device)
        shape = *like.store.shape[:4], self.capacity, like.store.shape[5]
        self.store = like.store.new_zeros(shape)
        self.frozen = frozen

    def load(self, other: TreeCache) -> None:
        assert self.store is not None and other.store is not None
        used = max(other.host_lengths)
        assert used <= self.capacity, f"other: {used} slots received, at most {self.capacity} expected"
        self.store.narrow(4, 0, used).copy_(other.store.narrow(4, 0, used))
        self.lengths.copy_(other.lengths)

    def open(self, nodes: int, written: int = 0) -> tuple[int | None, int]:
        self.start, self.end, self.nodes, self.written = None, self.capacity, nodes, written
        self._aim()
        return None, self.capacity

    def commit(self, path: Tensor, counts: Sequence[int] | Tensor, moved: bool = True) -> None:
        assert isinstance(counts, Tensor), f"counts: {type(counts).__name__} received, a tensor [B] expected"
        if moved:
            self._keep(path)
        self.lengths.add_(counts.masked_fill(self.frozen, 0))

    def select(self, rows: Tensor) -> None:
        raise AssertionError("the rows of a fixed step cannot be dropped")


@dataclass
class Report:
    """The tokens of one step on their way to the host: [B, 1 + D + 1], how many there are and the tokens."""

    rows: Tensor
    ready: torch.cuda.Event | None

    def read(self) -> list[list[int]]:
        if self.ready is not None:
            self.ready.synchronize()
        return [row[1 : 1 + row[0]] for row in self.rows.tolist()]


class FixedStep:
    """One step of `engine` for runs like `run`: the same rows, settings and tree, up to `capacity` slots a row."""

    def __init__(self, engine: Engine, run: _Run, capacity: int, capture: bool):
        self.engine, device, batch = engine, engine.device, len(run.rows)
        self.depth = engine.plan.depth if engine.draft is not None and engine.plan is not None else 0
        self.moves = self.depth > 0 and not isinstance(engine.plan, Chain)
        self.frozen = torch.zeros(batch, dtype=torch.bool, device=device)
        self.left = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens until the limit
        self.stops = torch.tensor(sorted(run.stops), dtype=torch.int64, device=device)
        self.report = torch.zeros(batch, self.depth + 2, dtype=torch.int64, device=device)
        self.cache = FixedCache(run.cache, capacity, self.frozen)
        noise = Noise(run.noise.seed, run.noise.sequences.clone(), device)
        noise.seed_on_device = torch.zeros(1, dtype=torch.int64, device=device)
        live = {name: _twin(getattr(run, name), capacity, self.frozen) for name in LIVE}
        self.run = replace(run, cache=self.cache, noise=noise, **live)
        self.home = dict(_leaves(self.run))
        self.load(run)
        self.graph = self._capture(run) if capture else None
        self.turn = 0
        cuda = device.type == "cuda"
        self.landing = [torch.empty_like(self.report, device="cpu").pin_memory() for _ in range(2)] if cuda else []
        self.events = [torch.cuda.Event() for _ in range(2)] if cuda else []

    @torch.no_grad()
    def load(self, run: _Run) -> None:
        """Go on from `run`, whose own tensors stay as they are."""
        self.frozen.zero_()
        limit = run.settings.max_new_tokens
        left = [limit - len(run.outputs[row].tokens) for row in run.rows]
        self.left.copy_(torch.tensor(left))
        self.cache.load(run.cache)
        for path, value in _leaves(run):
            home = self.home[path]
            if isinstance(home, FixedCache):
                home.load(value)
            elif home is not value:
                home.copy_(value)
            _put(self.run, path, home)
        _load_noise(self.run.noise, run.noise)

    def launch(self) -> Report:
        """Start a step. Its report may be read after the next launch, but before the one behind that."""
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        if not self.events:
            return Report(self.report.clone(), None)
        rows, ready = self.landing[self.turn], self.events[self.turn]
        rows.copy_(self.report, non_blocking=True)
        ready.record()
        self.turn = 1 - self.turn
        return Report(rows, ready)

    @torch.no_grad()
    def _step(self) -> None:
        """`Engine._step` and `Engine._commit` without a host: nothing here may wait for the device."""
        engine, run, cache = self.engine, self.run, self.cache
        positions = cache.lengths + 1
        tree = engine._propose(run)
        logits, features = engine.forward(cache, tree.tokens, tree.depths, tree.ancestors)
        if run.settings.ignore_eos:
            logits.index_fill_(-1, self.stops, -torch.inf)
        logits = logits if run.processors.idle else run.processors.warp(logits)
        vocabulary = engine.draft.vocabulary if engine.draft is not None and tree.num_nodes > 1 else None
        verdict = run.rule.verify(tree, logits, run.noise, positions, vocabulary)

        nodes = verdict.path.clamp(min=0)  # [B, D + 1]
        last = verdict.count[:, None]
        following = torch.cat([tree.tokens.gather(1, nodes)[:, 1:], verdict.token[:, None]], 1)
        following = following.scatter(1, last, verdict.token[:, None])  # [B, D + 1], valid up to the count
        counts = verdict.count + 1
        self.report.copy_(torch.cat([counts[:, None], following], 1))
        ends = (following[:, :, None] == self.stops).any(-1)
        inside = torch.arange(self.depth + 1, device=ends.device) <= last
        self.left.sub_(counts)
        self.frozen.logical_or_((ends & inside).any(1) | (self.left <= 0))

        cache.commit(verdict.path, counts, self.moves)
        run.root = following.gather(1, last)[:, 0]
        if engine.draft is not None:
            if features is not None:
                features = features.gather(1, nodes[:, :, None].expand(-1, -1, features.shape[2]))
            run.guesses = engine.draft.commit(run.state, features, following, counts)
        self._carry()

    def _carry(self) -> None:
        """Put what the step made anew where the next one reads it; frozen rows keep what they had."""
        for path, value in _leaves(self.run):
            home = self.home[path]
            if value is home:
                continue
            assert isinstance(home, Tensor) and value.shape == home.shape, (
                f"{'.'.join(path)}: shape {tuple(value.shape)} received, {tuple(home.shape)} expected: the draft's state"
                " must have one shape in all steps"
            )
            if value.numel():
                frozen = self.frozen.view(-1, *(1 for _ in value.shape[1:]))
                home.copy_(torch.where(frozen, home, value) if len(value) == len(frozen) else value)
            _put(self.run, path, home)

    def _capture(self, run: _Run) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.load(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph


class GraphEngine(Engine):
    """An `Engine` whose steps are captured where they can be; `eager_because` says why those of the last call were not.

    The replies are those of `Engine`. `timing.verify` holds whole steps, for a graph has no parts. `capture` is for
    tests: False runs the fixed step without a graph. By default a CUDA device captures, and others decode as `Engine`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        draft: Draft | None = None,
        plan: Plan | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        capture: bool | None = None,
    ):
        super().__init__(model, draft, plan, tokenizer)
        self.capture = self.device.type == "cuda" if capture is None else capture
        self.fixed = self.capture or capture is False
        self.eager_because: str | None = None
        self._steps: OrderedDict[tuple, FixedStep] = OrderedDict()
        self._failure: str | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: Settings | None = None, sequences: Sequence[int] | None = None
    ) -> list[Output]:
        run = self._begin(prompts, settings or Settings(), sequences)
        for _ in self._decode(run):
            pass
        return run.outputs

    def stream(self, prompt: Sequence[int], settings: Settings | None = None, sequence: int = 0) -> Iterator[list[int]]:
        run = self._begin([prompt], settings or Settings(), [sequence])
        tokens = run.outputs[0].tokens
        yield tokens[:]
        seen = len(tokens)
        for _ in self._decode(run):
            yield tokens[seen:]
            seen = len(tokens)

    def obstacle(self, settings: Settings) -> str | None:
        """Why a step with these settings cannot have fixed shapes and no host; None: it can."""
        if not self.fixed:
            return f"{self.device.type} has no graphs"
        rule = self._rule(settings)
        if rule.name not in ("greedy", "gumbel"):
            return f"rule {rule.name!r} reads the device between the nodes of a walk"
        if settings.processors(sorted(self._stop_tokens(settings))).needs_ids:
            return "penalties, bad words, min_new_tokens and logits_processors read each row's tokens"
        if isinstance(self.draft, NgramDraft):
            return "prompt lookup keeps the prompt itself, so the shapes differ between prompts"
        return self._failure

    def _decode(self, run: _Run) -> Iterator[None]:
        """Steps until all rows have ended; yields when the tokens of one have arrived."""
        step = self._prepare(run) if run.rows else None
        if step is None:
            while run.rows:
                self._step(run)
                yield
            return
        waiting: Report | None = None
        going = set(range(len(run.rows)))
        run.timing.lap()
        while going:
            report = step.launch()
            if waiting is not None:
                self._receive(run, step, waiting, going)
                yield
            waiting = report

    def _receive(self, run: _Run, step: FixedStep, report: Report, going: set[int]) -> None:
        rows = report.read()
        run.timing.lap("verify")
        for b in sorted(going):
            run.outputs[run.rows[b]].accepted.append(len(rows[b]) - 1)
            if not self._take(run, b, rows[b]):
                going.discard(b)
                step.frozen[b] = True  # a stop string ends a reply on the host alone
        run.timing.steps += 1
        run.timing.lap("other")

    def _prepare(self, run: _Run) -> FixedStep | None:
        """A step that has loaded this run, or None with the reason in `eager_because`."""
        self.eager_because = self.obstacle(run.settings)
        if self.eager_because is not None:
            return None
        nodes = self.plan.num_nodes if self.draft is not None and self.plan is not None else 1
        need = max(run.prompt_lengths()) + run.settings.max_new_tokens + 2 * nodes
        capacity = max(SMALLEST_TIER, 1 << (need - 1).bit_length())
        key = self._key(run, capacity)
        try:
            if key in self._steps:
                self._steps.move_to_end(key)
                self._steps[key].load(run)
            else:
                while len(self._steps) >= MAX_STEPS:
                    self._steps.popitem(last=False)
                self._steps[key] = FixedStep(self, run, capacity, self.capture)
        except RuntimeError as error:
            if not self.capture or isinstance(error, torch.OutOfMemoryError):
                raise
            self._failure = self.eager_because = f"the step cannot be captured: {str(error).splitlines()[0]}"
            warnings.warn(f"decoding without a CUDA graph: {self._failure}", stacklevel=2)
            return None
        return self._steps[key]

    def _key(self, run: _Run, capacity: int) -> tuple:
        """Equal for runs that one captured step serves."""
        s = run.settings
        sampling = (s.temperature, s.draft_temperature, s.top_k, s.top_p, s.min_p, s.ignore_eos)
        shapes = [(path, value.shape, value.dtype) for path, value in _leaves(run) if isinstance(value, Tensor)]
        return len(run.rows), capacity, self.plan, run.rule.name, run.stops, sampling, tuple(shapes)


def _twin(value: Any, capacity: int, frozen: Tensor) -> Any:
    """A copy of a draft's state with fixed caches; weights are shared."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, TreeCache):
        return FixedCache(value, capacity, frozen)
    if not _is_record(value):
        return value
    twin = copy.copy(value)
    for name, item in vars(value).items():
        setattr(twin, name, _twin(item, capacity, frozen))
    return twin


def _is_record(value: Any) -> bool:
    return isinstance(value, Guesses) or (is_dataclass(value) and not isinstance(value, type))


def _leaves(run: _Run) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Tensors and caches that live from step to step, by the names that lead to them."""

    def walk(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        if isinstance(value, (Tensor, TreeCache)):
            yield path, value
        elif _is_record(value):
            for name, item in vars(value).items():
                yield from walk((*path, name), item)

    for name in LIVE:
        yield from walk((name,), getattr(run, name))


def _put(run: _Run, path: tuple[str, ...], value: Any) -> None:
    setattr(reduce(getattr, path[:-1], run), path[-1], value)


def _load_noise(noise: Noise, other: Noise) -> None:
    """Make `noise` draw what `other` draws; its tensors stay where they are."""
    assert isinstance(noise.seed_on_device, Tensor)
    noise.seed_on_device.fill_(other.seed)
    noise.sequences.copy_(other.sequences)
    noise._shared_keys.copy_(other._shared_keys)
    noise.seed, noise._seed_key = other.seed, other._seed_key
    noise._names, noise._vectors = other._names, other._vectors
