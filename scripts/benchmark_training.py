"""Tokens per second and peak memory of the EAGLE-3 training step, against the loop as the paper writes it.

    python scripts/benchmark_training.py [--target FOLDER] [--context 1024] [--scaling] [--out FOLDER]

The loop of the paper keeps the logits of every draft step over the whole vocabulary and attends densely. Both take the
same batch and must agree on the loss. Ours takes the precision that training would choose on this machine, the loop is
run in both. They are timed in turn in one process; peak memory is that of a process each.
`--scaling` shows our step alone: memory against tokens for a small and a great vocabulary, time a token against context.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import headtrain.recurrent
from headtrain.checkpoint import write_text
from headtrain.estimate import PeakMemory
from headtrain.evaluate import device_name
from headtrain.heads.base import Batch, load_family
from headtrain.processes import choose_precision
from headtrain.target import Target
from headtrain.ttt_attention import ttt_attention_reference

STEPS = 4
SHORT, LONG = 512, 2048  # contexts that are compared


def naive_loss(head, batch: Batch, target: Target) -> Tensor:
    """Dense attention, and logits [B, T, V] of the target and of every draft step, all kept for the backward pass."""
    with mock.patch.object(headtrain.recurrent, "ttt_attention", lambda *parts: ttt_attention_reference(*parts[:4])):
        states = head.unroll(batch, STEPS)
    rows = target.lm_head_weight if head.vocabulary is None else target.lm_head_weight[head.vocabulary]
    p = torch.softmax(target.logits(batch.hidden, rows).float(), -1)  # [B, T, V]
    total = torch.zeros(())
    for k, state in enumerate(states):
        log_q = torch.log_softmax(head.logits(state), -1)  # [B, T - 1, V]; slot t is taught by position t + 1 + k
        length = log_q.shape[1] - k
        nats = -(p[:, 1 + k :] * log_q[:, :length]).sum(-1)
        # The last position teaches a token behind the text.
        total = total + head.config.decay**k * (nats[:, :-1] * batch.loss_mask[:, 2 + k :]).sum()
    return total


def fused_loss(head, batch: Batch, target: Target) -> Tensor:
    return head.loss(batch, target).total


LOSSES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "ours": (fused_loss, choose_precision("auto")),
    "naive bf16": (naive_loss, "bf16"),
    "naive fp32": (naive_loss, "no"),
}


def step(name: str, head, batch: Batch, target: Target) -> float:
    loss_of, precision = LOSSES[name]
    head.zero_grad(set_to_none=True)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = loss_of(head, batch, target)
    loss.backward()
    return float(loss)


def prepare(args: argparse.Namespace):
    target = random_target(args.random) if args.random else Target.load(args.target, "bfloat16")
    family = load_family("eagle3")
    config = family.Config(vocabulary=args.vocabulary, steps=STEPS)
    vocabulary = None if args.vocabulary is None else torch.arange(args.vocabulary)
    head = family.build(config, target, vocabulary).float().train()
    torch.manual_seed(0)
    shape = (args.rows, args.context)
    batch = Batch(
        torch.randint(target.vocab_size, shape),
        torch.ones(shape, dtype=torch.int64),
        torch.randn(*shape, len(head.target_layers) * target.hidden_size, dtype=target.dtype),
        torch.randn(*shape, target.hidden_size, dtype=target.dtype),
    )
    return head, batch, target


def random_target(vocab_size: int) -> Target:
    """Of SmolLM2's width, with a vocabulary of that size and three layers: the step never runs them."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def peak_bytes(args: argparse.Namespace, name: str, **changes: int) -> int:
    """Memory that a step needs beyond model and batch, in a process of its own."""
    values = {key: getattr(args, key) for key in ("target", "rows", "context", "vocabulary", "random")} | changes
    options = [f"--{key}={value}" for key, value in values.items() if value is not None]
    command = [sys.executable, __file__, "--child", name, *options]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_child(args: argparse.Namespace) -> None:
    head, batch, target = prepare(args)
    with PeakMemory(target.device) as memory:
        step(args.child, head, batch, target)
    print(memory.bytes)


def measure_scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes by vocabulary and tokens, and seconds a token by context, of as many tokens each."""
    peaks = {
        vocab_size: {
            rows * SHORT: peak_bytes(args, "ours", random=vocab_size, rows=rows, context=SHORT) for rows in (1, 2, 4, 8)
        }
        for vocab_size in (8192, 262_144)
    }
    for vocab_size, by_tokens in peaks.items():
        few, many = min(by_tokens), max(by_tokens)
        slope = (by_tokens[many] - by_tokens[few]) / (many - few)
        shown = ", ".join(f"{tokens}: {peak / 1e6:.0f} MB" for tokens, peak in by_tokens.items())
        print(
            f"vocabulary {vocab_size}: {shown}; {slope / 1e3:.0f} kB a token (logits alone: {vocab_size * 4 / 1e3:.0f})"
        )
    parts = {}
    for context in (SHORT, LONG):
        args.context, args.rows = context, LONG // context
        parts[context] = prepare(args)
    seconds: dict[int, list[float]] = {context: [] for context in parts}
    for _ in range(args.repeats + 1):
        for context, (head, batch, target) in parts.items():
            start = time.perf_counter()
            step("ours", head, batch, target)
            seconds[context].append((time.perf_counter() - start) / LONG)
    best = {context: min(times) for context, times in seconds.items()}
    print(f"a token at context {LONG} takes {best[LONG] / best[SHORT]:.2f} times the time of one at {SHORT}")
    return {"peak_bytes": peaks, "seconds_per_token": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, help="draft vocabulary; default: the target's whole")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--random", type=int, metavar="V", help="a random target with V tokens instead of --target")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=LOSSES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure_child(args)
        return
    if args.scaling:
        save(args, measure_scaling(args), "benchmark_scaling.json")
        return
    memory = {name: peak_bytes(args, name) for name in LOSSES}
    head, batch, target = prepare(args)
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    losses: dict[str, float] = {}
    for _ in range(args.repeats):
        for name in LOSSES:
            start = time.perf_counter()
            losses[name] = step(name, head, batch, target)
            seconds[name].append(time.perf_counter() - start)
    assert max(losses.values()) < 1.01 * min(losses.values()), f"the losses differ: {losses}"
    tokens = args.rows * args.context
    rows = {name: {"tokens_per_second": tokens / min(seconds[name]), "peak_bytes": memory[name]} for name in LOSSES}
    for name, row in rows.items():
        speed = rows["ours"]["tokens_per_second"] / row["tokens_per_second"]
        print(
            f"{name:10} {row['tokens_per_second']:8.0f} tokens/s {row['peak_bytes'] / 1e6:8.0f} MB;"
            f" ours: {speed:.2f} times the speed, {memory['ours'] / memory[name]:.2f} of the memory"
        )
    save(args, rows, "benchmark_training.json")


def save(args: argparse.Namespace, figures: dict[str, Any], name: str) -> None:
    if args.out:
        settings = {key: getattr(args, key) for key in ("context", "rows", "vocabulary", "random")}
        settings |= {"steps": STEPS, "precision": LOSSES["ours"][1]}
        report = {"device": device_name(torch.device("cpu")), "date": time.strftime("%Y-%m-%d"), "settings": settings}
        write_text(args.out / name, json.dumps(report | figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
