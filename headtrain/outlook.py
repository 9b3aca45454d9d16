"""What `headtrain predict` needs, from the words of the command line: a head's acceptance and the costs of a step."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from decode.errors import UserError, one_line
from headtrain.checkpoint import read_config
from headtrain.evaluate import open_head, plan_key, read_plans
from headtrain.predict import (
    BYTES,
    DEVICES,
    Costs,
    Device,
    Measured,
    Profile,
    Roofline,
    load_profiles,
    measure_profile,
    save_profiles,
)
from headtrain.prompt_sets import load_sets
from headtrain.tune import PROMPTS

SCALE = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Question:
    """What is known about a head and a device; None where it is to be found out."""

    head: Path | None = None
    target: str | None = None
    acceptance: str | None = None
    """Shares by depth, `0.7,0.6`; of one number the same for all depths."""
    depth: int = 5
    temperatures: Sequence[float] = (0.0,)
    prompts: Sequence[str] = ()
    limit: int | None = None
    device: str | None = None
    bandwidth: float | None = None
    """GB/s."""
    tflops: float | None = None
    memory: float | None = None
    """GB."""
    parameters: str | None = None
    """Of the target, such as 8B."""
    draft_parameters: str | None = None
    cache_bytes: float | None = None
    """A token of context."""
    dtype: str = "bfloat16"

    @property
    def on_paper(self) -> bool:
        return self.device is not None or self.bandwidth is not None


def parse_count(text: str, name: str) -> float:
    """`8B`, `135M`, `7e9`: a positive number."""
    scale = SCALE.get(text[-1:].upper(), 1.0)
    try:
        number = float(text if scale == 1.0 else text[:-1]) * scale
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"{name}: {text!r} is no positive number; write it as 8B, 135M or 8e9")
    return number


def find_profiles(question: Question, note: Callable[[str], None]) -> list[Profile]:
    """A profile for each temperature: as given, as saved with the head, or measured now and saved."""
    if question.acceptance is not None:
        return [replace(_given(question), temperature=temperature) for temperature in question.temperatures]
    if question.head is None:
        raise UserError("predict: name a head, or give --acceptance, such as 0.8 or 0.7,0.6,0.5")
    saved = {profile.temperature: profile for profile in load_profiles(question.head)}
    missing = [temperature for temperature in question.temperatures if temperature not in saved]
    if missing:
        texts = [[{"role": "user", "content": text}] for text in PROMPTS]
        sets = load_sets(question.prompts, question.limit) if question.prompts else {"": texts}
        head, target = open_head(question.head, question.target, question.dtype)
        ids = [target.prompt_ids(messages) for rows in sets.values() for messages in rows]
        for temperature in missing:
            saved[temperature] = measure_profile(head, target, ids, temperature, max(6, question.depth), note=note)
        save_profiles(question.head, [saved[temperature] for temperature in sorted(saved)])
    return [saved[temperature] for temperature in question.temperatures]


def _given(question: Question) -> Profile:
    text = question.acceptance or ""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--acceptance: {text!r} is no list of shares; write 0.8 or 0.7,0.6,0.5") from None
    if not all(0 <= share <= 1 for share in shares):
        raise UserError(f"--acceptance: {text} has shares outside 0 to 1")
    return Profile.constant(shares[0], question.depth) if len(shares) == 1 else Profile(tuple((a,) for a in shares))


def find_costs(question: Question) -> Costs:
    """On paper where a device is named, else what `headtrain tune` measured for the head."""
    if question.on_paper:
        return _roofline(question)
    if question.head is None:
        raise UserError(f"predict: name a device (--device {', '.join(DEVICES)}) or give --bandwidth and --tflops")
    plans = read_plans(question.head)
    plan = plans.get(plan_key(question.temperatures[0])) or next(iter(plans.values()), None)
    if plan is None or "step_ms" not in plan:
        raise UserError(
            f"{question.head}: no step times; run `headtrain tune {question.head}` on the device, or name one: --device"
            f" {', '.join(DEVICES)}"
        )
    return Measured(plan["step_ms"])


def _roofline(question: Question) -> Roofline:
    if question.device is not None and question.device.lower() not in DEVICES:
        raise UserError(
            f"--device: {question.device} is unknown; use {', '.join(DEVICES)}, or --bandwidth and --tflops"
        )
    if question.dtype not in BYTES:
        raise UserError(f"--dtype: {question.dtype} is unknown; use one of {', '.join(BYTES)}")
    device = DEVICES[question.device.lower()] if question.device else Device("given", 0.0, float("inf"), float("inf"))
    if question.device is None and question.tflops is None:
        raise UserError("--tflops: is missing; with --bandwidth alone no batch and no tree would ever cost anything")
    changes = {"bandwidth": question.bandwidth, "flops": question.tflops, "memory": question.memory}
    scales = {"bandwidth": 1e9, "flops": 1e12, "memory": 1e9}
    for name, value in changes.items():
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{'tflops' if name == 'flops' else name}: {value:g} must be a positive number")
    given: dict[str, Any] = {name: scales[name] * value for name, value in changes.items() if value is not None}
    device = replace(device, **given)
    parameters = parse_count(question.parameters, "--parameters") if question.parameters else None
    draft = parse_count(question.draft_parameters, "--draft-parameters") if question.draft_parameters else None
    cache = question.cache_bytes
    if parameters is None or (cache is None and question.head is not None):
        known, known_cache = target_sizes(_target(question), BYTES[question.dtype])
        parameters, cache = parameters or known, known_cache if cache is None else cache
    if draft is None:
        draft = _draft_size(question)
    return Roofline(device, parameters, draft, question.dtype, cache or 0.0)


def _target(question: Question) -> str:
    if question.target is not None:
        return question.target
    if question.head is None:
        raise UserError("predict: give --parameters, such as 8B, or a --target whose size can be read")
    return str(read_config(question.head)["target"]["name"])


def target_sizes(name: str, bytes_each: float) -> tuple[float, float]:
    """Parameters that a forward reads, and bytes of cache a token, from the config alone: no weights are loaded.

    An input embedding that is not also the output layer is looked up, not read.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"target: no size of {name} ({one_line(error)}); give --parameters and --cache-bytes"
        ) from error
    text = config.get_text_config()
    parameters = float(sum(p.numel() for p in model.parameters()))
    if not getattr(config, "tie_word_embeddings", False):
        parameters -= model.get_input_embeddings().weight.numel()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return parameters, 2.0 * text.num_hidden_layers * heads * width * bytes_each


def _draft_size(question: Question) -> float:
    if question.head is None:
        raise UserError("predict: give --draft-parameters, such as 250M: what the draft reads for one level")
    path = question.head / "model.safetensors"
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); give --draft-parameters") from error
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    read = sum(prod(shape) for name, shape in shapes.items() if len(shape) > 1 and "embed" not in name)
    if not any("lm_head" in name for name in shapes):  # then each level reads the target's output layer
        described = read_config(question.head)["target"]
        read += described["vocab_size"] * described["hidden_size"]
    return float(read)
