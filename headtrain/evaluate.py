"""Acceptance, speed and parity of a head on prompt sets, by decoding for real.

Each prompt is decoded three times in turn: with the head, plainly by the same engine, and by transformers' `generate`;
same dtype, threads, prompts and lengths (the end token is masked, so all replies have the same length).
"""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from decode.draft import Draft, ModelDraft, NgramDraft, require_same_tokenizer
from decode.engine import Engine, Output
from decode.errors import UserError
from decode.graphs import GraphEngine
from decode.metrics import Parity, acceptance_by_depth, acceptance_length, compare
from decode.noise import Noise
from decode.settings import Settings
from decode.tree import Chain, Dynamic, Plan, from_dict
from decode.verify import check_rule
from headtrain.checkpoint import load_head, read_config, write_text
from headtrain.conversations import Message, load_prompts
from headtrain.data import Dataset, batches
from headtrain.features import OnlineFeatures
from headtrain.heads.base import Head
from headtrain.prompt_sets import load_sets
from headtrain.recipe import EvalConfig
from headtrain.target import DTYPES, Target

PLAN = "tree.json"
DEFINITIONS = {
    "acceptance_length": "tokens committed per target forward, bonus token included, prompt forward excluded",
    "acceptance_by_depth": "share of the steps that accepted depth d among those that accepted depth d - 1",
    "tokens_per_second": "with the head, prompt forward excluded",
    "baseline.engine": "tokens per second of this engine's plain decoding, prompt forward excluded",
    "baseline.transformers": "tokens per second of transformers' generate, whole call",
    "speedup.engine": "tokens_per_second / baseline.engine",
    "speedup.transformers": "whole-call tokens per second with the head / baseline.transformers",
    "parity": "replies against plain decoding; one that parts counts as near tie where its token lay no further behind the"
    " best, in logits, than two roundings of the dtype, else as mismatch",
}


def check_options(
    out: Path, batch_size: int = 1, dtype: str = "auto", rule: str | None = None, temperature: float = 0.0
) -> None:
    """Raise UserError for what would fail only after a model has been loaded."""
    check_rule(rule, True, temperature)
    if batch_size < 1:
        raise UserError(f"--batch-size: {batch_size} must be at least 1")
    if dtype not in DTYPES:
        raise UserError(f"--dtype: {dtype} is unknown; use one of {', '.join(DTYPES)}")
    if next((path for path in (out, *out.parents) if path.exists()), out).is_file():
        raise UserError(f"--out: {out} is or lies below a file; give a folder")


def default_plan(draft: Draft) -> Plan:
    """The tree of a draft that was never tuned."""
    return Dynamic(depth=min(4, draft.max_depth or 4), width=4, size=12)


def plan_key(temperature: float) -> str:
    return "greedy" if temperature == 0 else "sampled"


def read_plans(folder: Path) -> dict[str, Any]:
    """What `headtrain tune` saved with the head, by `plan_key`; empty for a head that was never tuned."""
    path = folder / PLAN
    if not path.exists():
        return {}
    try:
        plans = json.loads(path.read_text())
        return {key: plans[key] for key in ("greedy", "sampled") if key in plans}
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: is not a saved tree ({error}); delete it and run `headtrain tune`") from error


def load_plan(folder: Path, draft: Draft, settings: Settings) -> tuple[Plan, Settings]:
    """The tuned tree for these settings, and the settings with the tuned draft temperature.

    A head that was tuned for the other kind of decoding only lends that tree; one that was never tuned gets the default.
    """
    plans = read_plans(folder)
    saved = plans.get(plan_key(settings.temperature)) or next(iter(plans.values()), None)
    if saved is None:
        return fit_plan(default_plan(draft), settings), settings
    try:
        plan, ratio = from_dict(saved["plan"]), float(saved["draft_ratio"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / PLAN}: is not a saved tree ({error}); delete it and run `headtrain tune`"
        ) from error
    tuned = plan_key(settings.temperature) in plans and settings.draft_temperature is None
    return fit_plan(plan, settings), draft_settings(settings, ratio) if tuned else settings


def draft_settings(settings: Settings, ratio: float) -> Settings:
    """The settings with a draft temperature of `ratio` times the target's, where the target samples."""
    return replace(settings, draft_temperature=ratio * settings.temperature) if settings.temperature > 0 else settings


def fit_plan(plan: Plan, settings: Settings) -> Plan:
    """The plan as the rule can use it. Rules that choose children by score take a dynamic tree, ordered by log q + g
    under shared noise, which accepts most (decode/README.md); the others draw children, so they get a chain."""
    rule = check_rule(settings.rule, True, settings.temperature)
    if not isinstance(plan, Dynamic):
        return plan
    return replace(plan, noise_weight=float(rule.propose == "shared")) if rule.shape == "any" else Chain(plan.depth)


NGRAM = "ngram"


def open_draft(name: Path, model: str | None, dtype: str, device: str | None = None) -> tuple[Draft, Target]:
    """What guesses, with its target: a head's folder, the folder of a smaller model, or `ngram` for prompt lookup.

    The last two know no target of their own, so `model` must name it.
    """
    small = name / "config.json"
    is_model = small.is_file() and "model_type" in json.loads(small.read_text())
    if str(name) != NGRAM and not is_model:
        return open_head(name, model, dtype, device)
    if model is None:
        raise UserError(f"--target: {name} is no head and knows no target; name the target's folder")
    target = Target.load(model, dtype, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not is_model:
        return NgramDraft(target.vocab_size), target
    draft = Target.load(str(name), dtype, device=target.device)
    require_same_tokenizer(target.tokenizer, draft.tokenizer)
    return ModelDraft(draft.model, target.vocab_size), target


def open_head(folder: Path, model: str | None, dtype: str, device: str | None = None) -> tuple[Head, Target]:
    """A saved head with its target: the folder or Hub name it was trained on, unless `model` names another place."""
    config = read_config(folder)
    name = model or config["target"]["name"]
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.load(name, dtype, device=device)
    target.template_kwargs = config.get("template_kwargs", {})
    return load_head(folder, target), target


def quick_acceptance(head: Head, target: Target, config: EvalConfig) -> dict[str, Any]:
    """Acceptance length on held-out prompts, while training."""
    assert config.prompts is not None
    settings = Settings(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    engine = Engine(target.model, head, fit_plan(default_plan(head), settings), target.tokenizer)
    prompts = [target.prompt_ids(messages) for messages in load_prompts(config.prompts, config.limit)]
    outputs = [engine.generate([ids], settings)[0] for ids in prompts]
    return {
        "acceptance_length": acceptance_length(outputs),
        "acceptance_by_depth": acceptance_by_depth(outputs),
    }


@torch.no_grad()
def held_out_loss(head: Head, target: Target, dataset: Dataset, batch_tokens: int) -> dict[str, Any]:
    """Mean loss in nats per trained token, and acceptance by depth as in training, over a held-out data set."""
    features = OnlineFeatures(dataset, target, head.target_layers)
    total, tokens, acceptance, counts = 0.0, 0.0, torch.zeros(()), torch.zeros(())
    for rows in batches(dataset, batch_tokens, seed=0, epoch=0):
        batch = features.batch(rows)
        out = head.loss(batch, target)
        total, tokens = total + float(out.total), tokens + float(head.tokens(batch.loss_mask))
        acceptance, counts = acceptance + out.acceptance.cpu(), counts + out.counts.cpu()
    return {"eval_loss": total / max(1.0, tokens), "eval_acceptance": (acceptance / counts.clamp(min=1)).tolist()}


def evaluate(
    name: Path,
    draft: Draft | None,
    target: Target,
    sets: Sequence[str] | Mapping[str, list[list[Message]]],
    limit: int | None,
    settings: Settings,
    plan: Plan | None,
    batch_size: int = 1,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The report (see README) of a draft over prompt sets: sources of `load_sets`, or what it returned.

    Without draft and plan plain decoding stands in their place: the report of a tree of one node.
    """
    settings = replace(settings, ignore_eos=True)
    loaded = sets if isinstance(sets, Mapping) else load_sets(sets, limit)
    prompts = {source: [target.prompt_ids(messages) for messages in rows] for source, rows in loaded.items()}
    for source, rows in prompts.items():
        if not rows:
            raise UserError(f"--prompts: {source} has no prompts")
    engines = (
        GraphEngine(target.model, draft, plan, target.tokenizer),
        GraphEngine(target.model, tokenizer=target.tokenizer),
    )
    warm = next(iter(prompts.values()))[0]
    run_three(engines, target, [warm], replace(settings, max_new_tokens=min(16, settings.max_new_tokens)))
    results = []
    for source, rows in prompts.items():
        results.append(evaluate_set(source, rows, engines, target, settings, batch_size))
        note(f"{results[-1]['name']}: acceptance length {results[-1]['acceptance_length']:.2f}")
    keys = ("acceptance_length", "tokens_per_second")
    mean: dict[str, Any] = {key: sum(r[key] for r in results) / len(results) for key in keys}
    mean["speedup"] = {k: sum(r["speedup"][k] for r in results) / len(results) for k in ("engine", "transformers")}
    return {
        "head": str(name),
        "target": target.name,
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "versions": {name: version(name) for name in ("headtrain", "torch", "transformers")},
        "date": time.strftime("%Y-%m-%d"),
        "settings": {
            "rule": check_rule(settings.rule, True, settings.temperature).name,
            "temperature": settings.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "limit": limit,
            "draft_temperature": settings.draft_temperature,
            "seed": settings.seed,
            "threads": torch.get_num_threads(),
            "batch_size": batch_size,
            "plan": plan.to_dict() if plan else {"kind": "plain"},
        },
        "definitions": DEFINITIONS,
        "sets": results,
        "mean": mean,
    }


def run_three(
    engines: tuple[Engine, Engine], target: Target, prompts: list[list[int]], settings: Settings
) -> tuple[list[Output], list[Output], float]:
    """A batch of prompts with the head, plainly, and with `generate`; the last as seconds.

    All rows go by one name for the noise, so that a prompt's reply does not depend on its batch.
    """
    names = [0] * len(prompts)
    fast = engines[0].generate(prompts, settings, names)
    plain = engines[1].generate(prompts, settings, names)
    return fast, plain, generate_seconds(target, prompts, settings)


def generate_seconds(target: Target, prompts: list[list[int]], settings: Settings) -> float:
    """Seconds of transformers' `generate` for the same number of tokens; prompts are padded on the left."""
    sampling = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=target.device)
    start = time.perf_counter()
    with torch.inference_mode():
        target.model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=settings.max_new_tokens,
            suppress_tokens=stop_tokens(target),
            **(sampling if settings.temperature > 0 else {"do_sample": False}),
        )
    return time.perf_counter() - start


def stop_tokens(target: Target) -> list[int]:
    stops = target.model.generation_config.eos_token_id
    return [stops] if isinstance(stops, int) else list(stops or [])


def evaluate_set(
    name: str,
    prompts: list[list[int]],
    engines: tuple[Engine, Engine],
    target: Target,
    settings: Settings,
    batch_size: int = 1,
) -> dict[str, Any]:
    fast, plain, seconds, parity = [], [], 0.0, Parity()
    for start in range(0, len(prompts), batch_size):
        group = prompts[start : start + batch_size]
        replies, plain_replies, generated = run_three(engines, target, group, settings)
        seconds += generated
        fast.append(replies)
        plain.append(plain_replies)
        for ids, a, b in zip(group, replies, plain_replies, strict=True):
            parity += compare(b.tokens, a.tokens, partial(choice_gap, target, ids, b.tokens, settings), target.dtype)
    outputs = [output for group in fast for output in group]
    tokens = sum(len(output.tokens) for output in outputs)

    def rate(groups: list[list[Output]], whole: bool) -> float:
        times = [group[0].timing for group in groups]  # a batch shares its clock
        decoding = sum(t.draft + t.verify + t.other + whole * t.prefill for t in times)
        # The prompt's forward gives each reply's first token.
        return (tokens - (0 if whole else len(outputs))) / decoding

    timings = [group[0].timing for group in fast]
    steps = sum(timing.steps for timing in timings)
    transformers = tokens / seconds
    return {
        "name": name,
        "prompts": len(prompts),
        "new_tokens": tokens,
        "acceptance_length": acceptance_length(outputs),
        "acceptance_by_depth": acceptance_by_depth(outputs),
        "tokens_per_second": rate(fast, whole=False),
        "baseline": {"engine": rate(plain, whole=False), "transformers": transformers},
        "speedup": {
            "engine": rate(fast, whole=False) / rate(plain, whole=False),
            "transformers": rate(fast, whole=True) / transformers,
        },
        "step_ms": {
            part: 1e3 * sum(getattr(t, part) for t in timings) / steps for part in ("draft", "verify", "other")
        },
        "parity": parity.to_dict(),
    }


@torch.no_grad()
def choice_gap(
    target: Target, ids: list[int], reply: list[int], settings: Settings, at: int, token: int
) -> tuple[float, float]:
    """How far `token` lay behind the best, in logits, where plain decoding chose reply[at]; and the best logit.

    Above temperature 0 the choice is the argmax of logits / T + noise; its gap times T is that in logits.
    """
    row = torch.tensor([ids + reply[:at]], device=target.device)
    scores = target.model(row, logits_to_keep=1).logits[0, -1].float()
    scores[stop_tokens(target)] = -torch.inf
    best = float(scores.max())
    if settings.temperature > 0:
        noise = Noise(settings.seed, [0], target.device)
        position = torch.tensor([[row.shape[1]]], device=target.device)
        scores = scores + settings.temperature * noise.gumbel(position, len(scores))[0, 0]
    return float(scores.max() - scores[token]), best


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def write_report(report: dict[str, Any], out: Path) -> Path:
    """`report.json` in the folder `out`, complete or absent."""
    write_text(out / "report.json", json.dumps(report, indent=2) + "\n")
    return out / "report.json"
