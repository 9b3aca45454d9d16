"""Tokens per second and peak memory of the EAGLE-3 training step, against the loop as the paper writes it.

    python scripts/benchmark_training.py [--target FOLDER] [--context 1024] [--out FOLDER]

The loop of the paper keeps the logits of every draft step over the whole vocabulary and attends densely. Both take the
same batch and must agree on the loss. Ours takes the precision that training would choose on this machine, the loop is
run in both. They are timed in turn in one process; peak memory is that of a process each.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import headtrain.recurrent
from headtrain.checkpoint import write_text
from headtrain.evaluate import device_name
from headtrain.heads.base import Batch, load_family
from headtrain.processes import choose_precision
from headtrain.target import Target
from headtrain.ttt_attention import ttt_attention_reference

STEPS = 4


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
    target = Target.load(args.target, "bfloat16")
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


def peak_bytes(args: argparse.Namespace, name: str) -> int:
    """Memory that a step needs beyond model and batch, in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--target", args.target, "--rows", str(args.rows)]
    command += ["--context", str(args.context)]
    command += [] if args.vocabulary is None else ["--vocabulary", str(args.vocabulary)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_child(args: argparse.Namespace) -> None:
    head, batch, target = prepare(args)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(args.child, head, batch, target)
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, help="draft vocabulary; default: the target's whole")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=LOSSES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure_child(args)
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
    if args.out:
        settings = {"context": args.context, "rows": args.rows, "steps": STEPS, "vocabulary": args.vocabulary}
        settings["precision"] = LOSSES["ours"][1]
        report = {"device": device_name(target.device), "date": time.strftime("%Y-%m-%d"), "settings": settings, **rows}
        write_text(args.out / "benchmark_training.json", json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
