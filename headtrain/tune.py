"""Choose the tree for a head on this device: measured step times against the head's own acceptance.

Two kinds of tree are predicted. *Dynamic*: a wide and deep tree is decoded once; because reranking keeps the
best-scored nodes, a smaller tree is a subset of it, so one run tells what every smaller size and depth would have
accepted. *Static*: the rank of each right token along the replies gives the best tree of every size. The few that
promise most are then decoded for real, and the fastest wins. Speeds that a noisy clock cannot tell apart count as equal;
the tree that accepts most is then the better one, because it leans least on the forward being cheap.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.calibrate import expected_length, frontier, rank_counts, rates
from decode.engine import Engine
from decode.graphs import GraphEngine
from decode.metrics import acceptance_length
from decode.noise import Noise
from decode.settings import Settings
from decode.tree import Dynamic, Plan, Tree
from decode.verify import Verdict
from headtrain.checkpoint import write_text
from headtrain.evaluate import PLAN, device_name, draft_settings, fit_plan, plan_key, read_plans
from headtrain.heads.base import Head
from headtrain.target import Target

SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
WIDTHS = (1, 2, 4, 8, 16)
BEAMS = (2, 4, 8)
RANKS = 16
DRAFT_RATIOS = (0.7, 1.0, 1.4)  # draft temperature by the target's
REPEATS = 9
NEW_TOKENS = 64
EQUAL = 0.03  # difference of two speeds that is noise
PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a Python function that counts the vowels in a string.",
    "A shop sells 3 apples for 2 dollars. How much do 12 apples cost? Explain your steps.",
    "Write a short email that asks a colleague to move a meeting.",
    "List five tips for learning a new language.",
    "Summarise the story of Romeo and Juliet in four sentences.",
)


@dataclass
class Costs:
    """Median seconds on this device: target forward of n nodes, draft commit, one more draft level of w nodes."""

    verify: dict[int, float]
    commit: float
    extend: dict[int, float]

    def step(self, nodes: int, levels: Sequence[int]) -> float:
        """A step that verifies `nodes` nodes, whose drafted levels behind the first extend `levels[i]` nodes each."""
        widths = [min((w for w in self.extend if w >= level), default=max(self.extend)) for level in levels]
        return self.verify[nodes] + self.commit + sum(self.extend[width] for width in widths)


@dataclass
class Candidate:
    plan: Plan
    draft_ratio: float  # draft temperature by the target's
    acceptance_length: float  # predicted
    seconds: float  # predicted, of a step

    @property
    def speed(self) -> float:
        return self.acceptance_length / self.seconds


class Recorder(Engine):
    """An engine that keeps, for each step, how the accepted path ranked in its tree."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.steps: list[list[tuple[int, int]]] = []

    def _verify(self, run: Any, tree: Tree, logits: Tensor, positions: Tensor) -> Verdict:
        verdict = super()._verify(run, tree, logits, positions)
        if tree.scores is not None:
            order = tree.scores[0].argsort(descending=True, stable=True).argsort()  # rank of each node, the root first
            path = verdict.path[0][: int(verdict.count[0]) + 1].tolist()
            # size that a tree must have to hold each node of the path
            self.steps.append([(int(order[node]) + 1, int(tree.depths[0, node])) for node in path[1:]])
        return verdict


def tune(
    head: Head,
    target: Target,
    temperature: float = 0.0,
    prompts: Sequence[str] = PROMPTS,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The fastest plan, with what it was chosen from."""
    ids = [target.prompt_ids([{"role": "user", "content": text}]) for text in prompts]
    settings = Settings(max_new_tokens=NEW_TOKENS, temperature=temperature, ignore_eos=True)
    depth = min(6, head.max_depth or 6)
    note("measuring step times")
    costs = measure_costs(head, target, ids[0])
    note("measuring the draft's ranks")
    static = static_candidates(head, target, ids, settings, depth, costs)
    note("measuring acceptance in wide trees")
    dynamic = dynamic_candidates(head, target, ids, settings, depth, costs)
    finalists = [c for kind in (static, dynamic) for c in promising(kind)]
    note(f"decoding with the {len(finalists)} most promising trees")
    measured = race(head, target, ids, settings, finalists)
    best = choose([m["tokens_per_second"] for m in measured], [m["acceptance_length"] for m in measured])
    chosen = finalists[best]
    return {
        "plan": chosen.plan.to_dict(),
        "draft_ratio": chosen.draft_ratio,
        "predicted": {"acceptance_length": chosen.acceptance_length, "speedup": chosen.speed * costs.verify[1]},
        "measured": measured[best],
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "temperature": temperature,
        "step_ms": {
            "verify": {str(n): 1e3 * t for n, t in costs.verify.items()},
            "commit": 1e3 * costs.commit,
            "extend": {str(w): 1e3 * t for w, t in costs.extend.items()},
        },
    }


def choose(speeds: Sequence[float], lengths: Sequence[float]) -> int:
    """Index of the greatest acceptance length among those whose speed is that of the fastest but for noise."""
    fast = [i for i, speed in enumerate(speeds) if speed >= (1 - EQUAL) * max(speeds)]
    return max(fast, key=lambda i: lengths[i])


def promising(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest, and the one that accepts most at the same speed but for noise."""
    speeds, lengths = [c.speed for c in candidates], [c.acceptance_length for c in candidates]
    both = dict.fromkeys((speeds.index(max(speeds)), choose(speeds, lengths)))
    return [candidates[i] for i in both]


def dynamic_candidates(
    head: Head, target: Target, prompts: list[list[int]], settings: Settings, depth: int, costs: Costs
) -> list[Candidate]:
    found = []
    for width in BEAMS:
        most = 1 + width + (depth - 1) * width**2
        widest = Dynamic(depth=depth, width=width, size=min(max(SIZES), most))
        engine = Recorder(target.model, head, fit_plan(widest, settings), target.tokenizer)
        for prompt in prompts:
            engine.generate([prompt], settings)
        for d in range(1, depth + 1):
            for size in SIZES:
                if d < size <= min(widest.size, 1 + width + (d - 1) * width**2):
                    length = accepted_length(engine.steps, size, d)
                    plan = fit_plan(Dynamic(d, width, size), settings)
                    found.append(Candidate(plan, 1.0, length, costs.step(size, [width] * (d - 1))))
    return found


def accepted_length(steps: list[list[tuple[int, int]]], size: int, depth: int) -> float:
    """Tokens per step had the tree held only its best `size` nodes down to `depth`."""
    total = sum(1 + sum(need <= size and d <= depth for need, d in path) for path in steps)
    return total / max(1, len(steps))


def static_candidates(
    head: Head, target: Target, prompts: list[list[int]], settings: Settings, depth: int, costs: Costs
) -> list[Candidate]:
    plain = Engine(target.model, tokenizer=target.tokenizer)
    texts = [(ids, ids + plain.generate([ids], settings)[0].tokens) for ids in prompts]
    found = []
    for ratio in DRAFT_RATIOS if settings.temperature > 0 else (1.0,):
        acceptance = measure_ranks(head, target, texts, settings, depth, ratio * (settings.temperature or 1.0))
        for d in range(1, depth + 1):
            for size in SIZES:
                if d < size <= 1 + sum(RANKS**level for level in range(1, d + 1)):
                    plan = frontier(acceptance[:d], size)
                    levels = [
                        len({path[:-1] for path in plan.paths if len(path) == n}) for n in range(2, plan.depth + 1)
                    ]
                    length = expected_length(plan, acceptance)
                    found.append(Candidate(plan, ratio, length, costs.step(size, levels)))
    return found


@torch.no_grad()
def measure_ranks(
    head: Head,
    target: Target,
    texts: list[tuple[list[int], list[int]]],
    settings: Settings,
    depth: int,
    temperature: float,
) -> list[list[float]]:
    """[depth][RANKS] share of each rank over (prompt, prompt and plain reply) pairs."""
    engine = Engine(target.model, head, tokenizer=target.tokenizer)
    counts = torch.zeros(depth, RANKS + 1, dtype=torch.int64)
    for prompt, text in texts:
        tokens = torch.tensor([text], device=target.device)
        cache = engine.forward.new_cache(1, len(text))
        _, features = engine.forward.prompt(cache, tokens, [len(text)])
        noise = None
        if settings.temperature > 0:
            positions = torch.arange(len(text), device=target.device)[None]
            drawn = Noise(settings.seed, [0], target.device)
            noise = drawn.gumbel(positions, target.vocab_size, vocabulary=head.vocabulary)[0]
        counts += rank_counts(head, features, tokens, len(prompt), depth, RANKS, temperature, noise)
    return rates(counts)


def race(
    head: Head, target: Target, prompts: list[list[int]], settings: Settings, candidates: list[Candidate]
) -> list[dict[str, float]]:
    """Acceptance length and tokens per second of each candidate; they take turns on each prompt."""
    engines = [GraphEngine(target.model, head, candidate.plan, target.tokenizer) for candidate in candidates]
    outputs: list[list[Any]] = [[] for _ in candidates]
    for prompt in prompts:
        for i, candidate in enumerate(candidates):
            outputs[i] += engines[i].generate([prompt], draft_settings(settings, candidate.draft_ratio), [0])
    found = []
    for group in outputs:
        seconds = sum(o.timing.draft + o.timing.verify + o.timing.other for o in group)
        tokens = sum(len(o.tokens) - 1 for o in group)
        found.append({"acceptance_length": acceptance_length(group), "tokens_per_second": tokens / seconds})
    return found


@torch.no_grad()
def measure_costs(
    head: Head,
    target: Target,
    ids: list[int],
    sizes: Sequence[int] = (1, *SIZES),
    widths: Sequence[int] = WIDTHS,
    batch: int = 1,
) -> Costs:
    """Times all sizes in turn, several rounds, so that a slow moment of the machine touches all alike.

    Sizes and widths count nodes of one sequence, of which `batch` alike go together.
    """
    engine = Engine(target.model, head, Dynamic(depth=2, width=2, size=3), target.tokenizer)
    run = engine._begin([ids] * batch, Settings(max_new_tokens=64, ignore_eos=True), [0] * batch)
    forward, cache = engine.forward, run.cache
    device = target.device
    times: dict[Any, list[float]] = {}

    def clock(key: Any, call: Callable[[], Any]) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.setdefault(key, []).append(time.perf_counter() - start)

    features = torch.zeros(batch, 2, len(head.target_layers) * target.hidden_size, device=device, dtype=target.dtype)
    pair = torch.full((batch, 2), ids[-1], device=device)
    one = torch.ones(batch, dtype=torch.int64, device=device)
    for _ in range(REPEATS):
        for n in sizes:
            tokens = torch.full((batch, n), ids[-1], device=device)
            chain = torch.arange(n, device=device).expand(batch, n)
            causal = torch.ones(batch, n, n, dtype=torch.bool, device=device).tril()
            clock(("verify", n), partial(forward, cache, tokens, chain, causal))
        clock("commit", partial(head.commit, run.state, features, pair, one))
        for width in widths:
            nodes = torch.full((batch, width), ids[-1], device=device)
            clock(("extend", width), partial(head.extend, run.state, nodes, torch.zeros_like(nodes)))
            head.commit(run.state, features, pair, one)
    median = {key: sorted(values)[len(values) // 2] for key, values in times.items()}
    return Costs({n: median["verify", n] for n in sizes}, median["commit"], {w: median["extend", w] for w in widths})


def save_plan(folder: Path, result: dict[str, Any]) -> Path:
    """Write the tuned tree beside the head; the one for greedy decoding and the one for sampling are kept apart."""
    plans = {**read_plans(folder), plan_key(result["temperature"]): result}
    write_text(folder / PLAN, json.dumps(plans, indent=2) + "\n")
    return folder / PLAN
