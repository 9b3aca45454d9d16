"""Choose the tree for a head on this device: measured step times against the head's own acceptance.

A wide and deep tree is decoded once. Because reranking keeps the best-scored nodes, the tree of a smaller size is a
subset of it, so that one run tells what every smaller size and depth would have accepted.
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

from decode.engine import Engine
from decode.settings import Settings
from decode.tree import Dynamic, Tree
from decode.verify import Verdict
from headtrain.checkpoint import write_text
from headtrain.evaluate import PLAN, device_name
from headtrain.heads.base import Head
from headtrain.target import Target

SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
WIDTHS = (2, 4, 8)
REPEATS = 9
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


class Recorder(Engine):
    """An engine that keeps, for each step, how the accepted path ranked in its tree."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.steps: list[list[tuple[int, int]]] = []

    def _verify(self, run: Any, tree: Tree, logits: Tensor, positions: Tensor) -> Verdict:
        verdict = super()._verify(run, tree, logits, positions)
        if tree.num_nodes > 1:
            score = (tree.ancestors.float() * tree.log_q[:, None]).sum(-1)[0]  # [n] cumulative log q
            order = score.argsort(descending=True, stable=True).argsort()  # rank of each node, the root first
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
    """The plan of the highest predicted tokens per second, with what it was chosen from."""
    ids = [target.prompt_ids([{"role": "user", "content": text}]) for text in prompts]
    depth = min(6, head.max_depth or 6)
    note("measuring step times")
    costs = measure_costs(head, target, ids[0], depth)
    plain = costs.verify[1]
    table = []
    for width in WIDTHS:
        note(f"measuring acceptance, width {width}")
        most = 1 + width + (depth - 1) * width**2
        widest = Dynamic(depth=depth, width=width, size=min(max(SIZES), most))
        engine = Recorder(target.model, head, widest, target.tokenizer)
        for prompt in ids:
            engine.generate([prompt], Settings(max_new_tokens=64, temperature=temperature, ignore_eos=True))
        for d in range(1, depth + 1):
            for size in SIZES:
                if d < size <= min(widest.size, 1 + width + (d - 1) * width**2):
                    length = accepted_length(engine.steps, size, d)
                    seconds = costs.verify[size] + costs.commit + (d - 1) * costs.extend[width]
                    table.append(
                        {
                            "depth": d,
                            "width": width,
                            "size": size,
                            "acceptance_length": length,
                            "speedup": length * plain / seconds,
                        }
                    )
    best = max(table, key=lambda row: row["speedup"])
    plan = Dynamic(int(best["depth"]), int(best["width"]), int(best["size"]))
    return {
        "plan": plan.to_dict(),
        "predicted": {key: best[key] for key in ("acceptance_length", "speedup")},
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "temperature": temperature,
        "step_ms": {
            "verify": {str(n): 1e3 * t for n, t in costs.verify.items()},
            "commit": 1e3 * costs.commit,
            "extend": {str(w): 1e3 * t for w, t in costs.extend.items()},
        },
    }


def accepted_length(steps: list[list[tuple[int, int]]], size: int, depth: int) -> float:
    """Tokens per step had the tree held only its best `size` nodes down to `depth`."""
    total = sum(1 + sum(need <= size and d <= depth for need, d in path) for path in steps)
    return total / max(1, len(steps))


@torch.no_grad()
def measure_costs(head: Head, target: Target, ids: list[int], depth: int) -> Costs:
    """Times all sizes in turn, several rounds, so that a slow moment of the machine touches all alike."""
    engine = Engine(target.model, head, Dynamic(depth=2, width=2, size=3), target.tokenizer)
    run = engine._begin([ids], Settings(max_new_tokens=64, ignore_eos=True), [0])
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

    features = torch.zeros(1, 2, len(head.target_layers) * target.hidden_size, device=device, dtype=target.dtype)
    one = torch.ones(1, dtype=torch.int64, device=device)
    for _ in range(REPEATS):
        for n in (1, *SIZES):
            tokens = torch.full((1, n), ids[-1], device=device)
            chain = torch.arange(n, device=device)[None]
            causal = torch.ones(1, n, n, dtype=torch.bool, device=device).tril()
            clock(("verify", n), partial(forward, cache, tokens, chain, causal))
        pair = torch.full((1, 2), ids[-1], device=device)
        clock("commit", partial(head.commit, run.state, features, pair, one))
        for width in WIDTHS:
            nodes = torch.full((1, width), ids[-1], device=device)
            clock(("extend", width), partial(head.extend, run.state, nodes, torch.zeros_like(nodes)))
            head.commit(run.state, features, pair, one)
    median = {key: sorted(values)[len(values) // 2] for key, values in times.items()}
    return Costs(
        {n: median["verify", n] for n in (1, *SIZES)}, median["commit"], {w: median["extend", w] for w in WIDTHS}
    )


def save_plan(folder: Path, result: dict[str, Any]) -> Path:
    """Write the tuned tree beside the head."""
    write_text(folder / PLAN, json.dumps(result, indent=2) + "\n")
    return folder / PLAN
