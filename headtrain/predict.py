"""What a head is worth before it is run: tokens per step from its acceptance, seconds per step from sizes or measurement.

Chains follow Leviathan et al. (arXiv 2211.17192): with acceptance a at every depth, K drafted tokens and a draft that
costs c of a target forward, a step commits (1 - a^(K+1)) / (1 - a) tokens and lasts c K + 1 forwards. A tree adds the
probability of each of its paths.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from decode.calibrate import expected_length, frontier
from decode.engine import Engine
from decode.errors import UserError
from decode.settings import Settings
from decode.tree import MAX_NODES, Chain, Dynamic, Plan, Static, Tree, from_dict, grow
from decode.verify import Verdict
from headtrain.checkpoint import write_text
from headtrain.heads.base import Head
from headtrain.target import Target

PROFILE = "profile.json"
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}
PAYS = 1.05  # a speedup below it is within the noise of most machines


@dataclass(frozen=True)
class Profile:
    """Acceptance of a head at one temperature. ranks[d][k]: of the steps whose first d drafted tokens were right, the
    share in which the next token of the target is the draft's choice number k."""

    ranks: tuple[tuple[float, ...], ...]
    temperature: float = 0.0
    steps: int = 0

    @property
    def depth(self) -> int:
        return len(self.ranks)

    @property
    def chain(self) -> list[float]:
        """[K] acceptance by depth of a chain of first choices."""
        return [row[0] for row in self.ranks]

    @staticmethod
    def constant(a: float, depth: int, temperature: float = 0.0) -> Profile:
        """The same acceptance `a` at each depth, nothing known of other choices."""
        return Profile(((a,),) * depth, temperature)

    def tree(self, size: int, depth: int | None = None) -> Static:
        """The best tree of `size` nodes no deeper than `depth` that does not look at its tokens."""
        return frontier(self.ranks[:depth], size)


@dataclass(frozen=True)
class Device:
    """Peaks of the data sheet: bytes per second, FLOP per second (dense, half precision), bytes of memory."""

    name: str
    bandwidth: float
    flops: float
    memory: float


DEVICES = {
    "a100": Device("A100 80 GB", 2039e9, 312e12, 80e9),
    "h100": Device("H100 SXM", 3350e9, 989e12, 80e9),
    "h200": Device("H200", 4800e9, 989e12, 141e9),
    "l40s": Device("L40S", 864e9, 362e12, 48e9),
    "rtx4090": Device("RTX 4090", 1008e9, 165e12, 24e9),
}


class Costs(Protocol):
    """Seconds on a device. `nodes` and `width` count tokens of one sequence; `batch` sequences go together."""

    @property
    def knows_context(self) -> bool: ...

    @property
    def largest(self) -> int | None:
        """Tokens of the largest forward that was measured; None: nothing was."""

    def verify(self, nodes: int, batch: int, context: int) -> float:
        """One target forward."""

    def draft(self, levels: Sequence[int], batch: int) -> float:
        """The draft's share of a step; levels[i] nodes are extended for the level i + 2. The first comes with the commit."""

    def excess(self, nodes: int, batch: int, context: int) -> tuple[float, float] | None:
        """Bytes needed and there, where they do not fit."""


@dataclass(frozen=True)
class Roofline:
    """Step times from sizes: each forward reads the weights and the cache once, and computes 2 FLOP a weight and token.

    A lower bound: it leaves out launches, softmax and everything that is not a matrix product.
    """

    device: Device
    parameters: float
    draft_parameters: float
    """Those read for one drafted level, the output layer included."""
    dtype: str = "bfloat16"
    cache_bytes: float = 0.0
    """Keys and values of one token of context, all layers."""
    parallel: bool = False
    """The draft gives all levels in one forward."""
    knows_context: bool = True
    largest: int | None = None

    def verify(self, nodes: int, batch: int, context: int) -> float:
        return self._forward(self.parameters, nodes * batch, batch * context * self.cache_bytes)

    def draft(self, levels: Sequence[int], batch: int) -> float:
        widths = [1] if self.parallel else [1, *levels]
        return sum(self._forward(self.draft_parameters, width * batch, 0.0) for width in widths)

    def excess(self, nodes: int, batch: int, context: int) -> tuple[float, float] | None:
        weights = (self.parameters + self.draft_parameters) * BYTES[self.dtype]
        needed = weights + batch * (context + nodes) * self.cache_bytes
        return (needed, self.device.memory) if needed > self.device.memory else None

    def _forward(self, parameters: float, tokens: int, cache: float) -> float:
        read = (parameters * BYTES[self.dtype] + cache) / self.device.bandwidth
        return max(read, 2 * parameters * tokens / self.device.flops)


@dataclass(frozen=True)
class Measured:
    """Step times that `headtrain tune` measured (`step_ms` of tree.json), between and beyond them straight lines.

    A batch is taken as one sequence with as many tokens.
    """

    step_ms: dict[str, Any]
    knows_context: bool = False

    @property
    def largest(self) -> int:
        return max(map(int, self.step_ms["verify"]))

    def verify(self, nodes: int, batch: int, context: int) -> float:
        return _line(self.step_ms["verify"], nodes * batch) / 1e3

    def draft(self, levels: Sequence[int], batch: int) -> float:
        return (self.step_ms["commit"] + sum(_line(self.step_ms["extend"], width * batch) for width in levels)) / 1e3

    def excess(self, nodes: int, batch: int, context: int) -> tuple[float, float] | None:
        return None


@dataclass(frozen=True)
class Prediction:
    """One setting. `speedup`: over plain decoding of the same batch on the same device."""

    plan: str
    depth: int
    nodes: int
    batch: int
    context: int
    temperature: float
    tokens_per_step: float
    step_ms: float
    plain_ms: float
    speedup: float
    tokens_per_second: float
    """All sequences of the batch together."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def closed_form(a: float, k: int, c: float) -> float:
    """Speedup of a chain of k tokens, each accepted with probability a, each drafted for c target forwards."""
    return closed_tokens(a, k) / (c * k + 1)


def closed_tokens(a: float, k: int) -> float:
    """(1 - a^(k+1)) / (1 - a): tokens per step of that chain, the target's own included."""
    return k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)


def expected_tokens(profile: Profile, plan: Chain | Static) -> float:
    """Tokens per step of a tree of fixed shape: 1 and the probability of each of its paths.

    Choices beside the first are taken to be followed by the same acceptance as the first; they do a little worse.
    """
    return expected_length(Static(plan.paths), profile.ranks)


def drafted_levels(plan: Plan) -> list[int]:
    """Nodes that the draft extends for each level behind the first."""
    if isinstance(plan, Dynamic):
        return [plan.width] * (plan.depth - 1)
    return [len({path[:-1] for path in plan.paths if len(path) == level}) for level in range(2, plan.depth + 1)]


def predict(
    profiles: Profile | Sequence[Profile],
    costs: Costs,
    depths: Sequence[int] = (),
    sizes: Sequence[int] = (),
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (1024,),
) -> tuple[list[Prediction], list[str]]:
    """Predictions for chains of `depths` tokens and best trees of `sizes` nodes (root included), and what to beware of.

    One profile a temperature. `contexts` in tokens; measured costs hold for the context of their measurement alone.
    Raises UserError for settings that the profile or the costs say nothing about.
    """
    profiles = [profiles] if isinstance(profiles, Profile) else list(profiles)
    if not costs.knows_context and len(contexts) > 1:
        raise UserError("context: measured step times know one context only; give bandwidth and FLOP/s to compare more")
    for profile in profiles:
        _check(profile, depths, sizes)
    _positive(depth=depths, size=[n - 1 for n in sizes], batch=batches, context=contexts)
    rows, warnings = [], []
    for profile in profiles:
        trees: list[tuple[str, Chain | Static]] = [(f"chain {k}", Chain(k)) for k in depths]
        trees += [(f"tree {n}", profile.tree(n)) for n in sizes]
        for batch in batches:
            for context in contexts:
                group = [_predict_one(profile, costs, name, plan, batch, context) for name, plan in trees]
                rows += group
                warnings += _warnings(group, costs, batch, context, profile.temperature)
    return rows, list(dict.fromkeys(warnings))


def _predict_one(
    profile: Profile, costs: Costs, name: str, plan: Chain | Static, batch: int, context: int
) -> Prediction:
    plain = costs.verify(1, batch, context)
    step = costs.verify(plan.num_nodes, batch, context) + costs.draft(drafted_levels(plan), batch)
    tokens = expected_tokens(profile, plan)
    return Prediction(
        name,
        plan.depth,
        plan.num_nodes,
        batch,
        context,
        profile.temperature,
        tokens,
        1e3 * step,
        1e3 * plain,
        tokens * plain / step,
        batch * tokens / step,
    )


def _warnings(group: Sequence[Prediction], costs: Costs, batch: int, context: int, temperature: float) -> list[str]:
    """What does not pay or fit at one batch, context and temperature, with the numbers."""
    found = []
    where = f"batch {batch}, context {context}, temperature {temperature:g}"
    largest = max(group, key=lambda row: row.nodes)
    if (excess := costs.excess(largest.nodes, batch, context)) is not None:
        found.append(
            f"{where}: memory is too small: weights, head and cache need {excess[0] / 1e9:.1f} GB of"
            f" {excess[1] / 1e9:.1f} GB; lower the batch or the context"
        )
    if costs.largest is not None and batch * largest.nodes > costs.largest:
        found.append(
            f"batch {batch}: {batch * largest.nodes} tokens go through the target, but no forward above {costs.largest}"
            " was measured: its time is drawn on as a straight line"
        )
    best = max(group, key=lambda row: row.speedup)
    if best.speedup < PAYS:
        ratio = best.step_ms / best.plain_ms
        found.append(
            f"{where}: speculation does not pay: the best, {best.plan}, commits {best.tokens_per_step:.2f} tokens a step"
            f" that lasts {ratio:.2f} plain steps, speedup {best.speedup:.2f}; {_cause(best, costs, batch, context)}"
        )
    return found


def _cause(best: Prediction, costs: Costs, batch: int, context: int) -> str:
    verify = 1e3 * costs.verify(best.nodes, batch, context)
    growth, share = verify / best.plain_ms, (best.step_ms - verify) / best.plain_ms
    alone = 1e3 * (costs.verify(best.nodes, 1, context)) / (1e3 * costs.verify(1, 1, context))
    if growth - 1 >= max(share, 0.1) and batch > 1 and alone < growth:
        return f"checking {best.nodes} tokens costs {growth:.2f} forwards at this batch, {alone:.2f} at batch 1"
    if share > max(growth - 1, 0.25):
        return f"drafting alone costs {share:.2f} plain steps: draft fewer levels or train a smaller head"
    hint = "lower the temperature or " if best.temperature > 0 else ""
    return f"too few guesses are accepted: {hint}train the head longer"


def beside(report: dict[str, Any], step_ms: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted and measured speedup over plain decoding of each set of a report, from step times (see `step_costs`).

    The prediction takes the acceptance length of the report, so that what it tests is the model of costs.
    """
    costs, plan = Measured(step_ms), from_dict(report["settings"]["plan"])
    batch = report["settings"].get("batch_size", 1)
    step = costs.verify(plan.num_nodes, batch, 0) + costs.draft(drafted_levels(plan), batch)
    rows = []
    for row in report["sets"]:
        predicted = row["acceptance_length"] * costs.verify(1, batch, 0) / step
        measured = row["speedup"]["engine"]
        rows.append(
            {"name": row["name"], "predicted": predicted, "measured": measured, "error": predicted / measured - 1}
        )
    return rows


def step_costs(draft: Any, target: Target, ids: list[int], plan: Plan, batch: int = 1) -> dict[str, Any]:
    """Step times in ms behind the prompt `ids`, of what a step with this plan needs: {verify, commit, extend} by tokens.

    Keys count the tokens of the whole batch, as `Measured` reads them.
    """
    from headtrain.tune import measure_costs

    widths = sorted(set(drafted_levels(plan))) or [1]
    costs = measure_costs(draft, target, ids, sorted({1, plan.num_nodes}), widths, batch)
    return {
        "verify": {str(batch * n): 1e3 * seconds for n, seconds in costs.verify.items()},
        "commit": 1e3 * costs.commit,
        "extend": {str(batch * width): 1e3 * seconds for width, seconds in costs.extend.items()},
    }


class Profiler(Engine):
    """Decodes with a chain and counts, at each depth that it reaches, which choice of the draft the target took."""

    def __init__(self, model: Any, draft: Head, depth: int, width: int, tokenizer: Any = None):
        super().__init__(model, draft, Chain(depth), tokenizer)
        self.width = width
        self.hits = [[0] * width for _ in range(depth)]
        self.reached = [0] * depth
        self._ranked: list[list[int]] = []

    def _propose(self, run: Any) -> Tree:
        assert self.draft is not None and isinstance(self.plan, Chain) and len(run.rows) == 1
        proposer, draft = self._proposer(run), self.draft
        self._ranked = []

        def rank(logits: Tensor) -> Tensor:  # logits [1, 1, Vd] behind the chain so far
            count, depth = min(self.width, logits.shape[-1]), len(self._ranked) + 1
            columns, _ = proposer.choose(proposer.log_q(logits), depth, logits.new_zeros(1).long(), count)
            self._ranked.append(proposer.tokens(columns)[0, 0].tolist())
            return logits

        guesses = rank(run.guesses)
        return grow(
            self.plan, run.root, guesses, lambda tokens, above: rank(draft.extend(run.state, tokens, above)), proposer
        )

    def _verify(self, run: Any, tree: Tree, logits: Tensor, positions: Tensor) -> Verdict:
        verdict = super()._verify(run, tree, logits, positions)
        if tree.num_nodes > 1:
            count = int(verdict.count[0])
            taken = tree.tokens[0, 1 : 1 + count].tolist() + [int(verdict.token[0])]
            for depth, token in enumerate(taken[: len(self.reached)]):
                self.reached[depth] += 1
                if token in self._ranked[depth]:
                    self.hits[depth][self._ranked[depth].index(token)] += 1
        return verdict

    def profile(self, temperature: float) -> Profile:
        """What was counted; ends at the deepest depth that any step reached."""
        rows = [
            tuple(hit / seen for hit in hits) for hits, seen in zip(self.hits, self.reached, strict=True) if seen > 0
        ]
        return Profile(tuple(rows), temperature, self.reached[0])


def measure_profile(
    head: Head,
    target: Target,
    prompts: Sequence[list[int]],
    temperature: float = 0.0,
    depth: int = 6,
    width: int = 8,
    max_new_tokens: int = 64,
    note: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Acceptance by depth and rank over replies to prompts of token ids, one at a time."""
    depth = min(depth, head.max_depth or depth)
    engine = Profiler(target.model, head, depth, width, target.tokenizer)
    settings = Settings(max_new_tokens=max_new_tokens, temperature=temperature, ignore_eos=True)
    for number, ids in enumerate(prompts, 1):
        note(f"measuring acceptance, prompt {number} of {len(prompts)}")
        engine.generate([ids], settings)
    if not engine.reached[0]:
        raise UserError("prompts: no step was decoded; give prompts and at least 2 new tokens")
    return engine.profile(temperature)


def save_profiles(folder: Path, profiles: Sequence[Profile]) -> Path:
    write_text(folder / PROFILE, json.dumps([asdict(profile) for profile in profiles], indent=2) + "\n")
    return folder / PROFILE


def load_profiles(folder: Path) -> list[Profile]:
    """Profiles saved with the head; none if there are none."""
    path = folder / PROFILE
    if not path.is_file():
        return []
    try:
        saved = json.loads(path.read_text())
        return [Profile(tuple(tuple(row) for row in p["ranks"]), p["temperature"], p["steps"]) for p in saved]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no saved profile ({error}); delete it and measure again") from error


def _check(profile: Profile, depths: Sequence[int], sizes: Sequence[int]) -> None:
    if not depths and not sizes:
        raise UserError("predict: neither a depth nor a tree size is given")
    if not all(0 <= share <= 1 for row in profile.ranks for share in row):
        raise UserError(f"acceptance: {profile.chain} has shares outside 0 to 1")
    if depths and max(depths) > profile.depth:
        raise UserError(
            f"depth {max(depths)}: acceptance is known to depth {profile.depth} only; lower it, or measure deeper"
        )
    if max((*sizes, *(k + 1 for k in depths))) > MAX_NODES:
        raise UserError(f"tree of {max((*sizes, *(k + 1 for k in depths)))} nodes: a step holds at most {MAX_NODES}")
    known, level = 0, 1
    for row in profile.ranks:
        level *= len(row)
        known += level
    if sizes and max(sizes) - 1 > known:
        raise UserError(
            f"tree of {max(sizes)} nodes: only {known} paths have a known acceptance; measure with more ranks"
        )


def _positive(**values: Sequence[int]) -> None:
    for name, numbers in values.items():
        if any(number < 1 for number in numbers):
            raise UserError(f"{name}: {min(numbers)} is too small; give whole numbers above {int(name == 'size')}")


def _line(points: dict[str, float], x: float) -> float:
    """Piecewise linear through the points, constant below them, beyond them with the slope of the whole upper half."""
    xs = sorted(float(key) for key in points)
    ys = [points[key] for key in sorted(points, key=float)]
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    if x > xs[-1]:
        middle = len(xs) // 2 if len(xs) > 2 else 0
        slope = max(0.0, (ys[-1] - ys[middle]) / (xs[-1] - xs[middle]))
        return ys[-1] + slope * (x - xs[-1])
    i = bisect_left(xs, x)
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])
