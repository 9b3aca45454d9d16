"""Real tokens per second of an EAGLE-3 training step: conversations packed into a row, against rows that are padded.

    python scripts/benchmark_packing.py --data FILE.jsonl [--target FOLDER] [--batch-tokens 8192] [--out FOLDER]

All layouts fill micro-batches of at most the same number of places, padding included, so they need the same memory:
`random` pads rows in shuffled order to the longest of the micro-batch, `sorted` pads rows of similar length (what
`data.pack: false` does), `packed` pads nothing. They are timed in turn; a step is the target's forward, the loss of
four draft steps, its backward pass and AdamW. Peak memory is that of a process each.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from headtrain.checkpoint import write_text
from headtrain.data import Dataset, batches, build_dataset
from headtrain.evaluate import device_name
from headtrain.features import OnlineFeatures
from headtrain.heads.base import load_family
from headtrain.recipe import DataConfig
from headtrain.target import Target

STEPS = 4


def shuffled(dataset: Dataset, batch_tokens: int) -> list[list[int]]:
    """Rows in any order, as many as fit where each is padded to the longest."""
    lengths = dataset.lengths
    groups: list[list[int]] = [[]]
    for row in np.random.default_rng(0).permutation(len(dataset)).tolist():
        longest = max(lengths[other] for other in [*groups[-1], row])
        if groups[-1] and (len(groups[-1]) + 1) * longest > batch_tokens:
            groups.append([])
        groups[-1].append(row)
    return groups[:-1]


def layouts(dataset: Dataset, batch_tokens: int) -> dict[str, list[list[int]]]:
    """Micro-batches of each layout; of equal number, full ones first."""
    return {
        "random": shuffled(dataset, batch_tokens),
        "sorted": batches(dataset, batch_tokens, 0, 0),
        "packed": batches(dataset, batch_tokens, 0, 0, pack=True),
    }


class Step:
    """One optimizer step of a fresh head."""

    def __init__(self, args: argparse.Namespace):
        self.target = Target.load(args.target, "bfloat16")
        config = DataConfig(train=(args.data,), max_length=1024, limit=args.limit)
        self.dataset = build_dataset(config, self.target.tokenizer)
        family = load_family("eagle3")
        vocabulary = torch.arange(args.vocabulary)
        self.head = family.build(family.Config(vocabulary=args.vocabulary, steps=STEPS), self.target, vocabulary)
        self.head.float().train()
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-4)
        self.features = {
            name: OnlineFeatures(self.dataset, self.target, self.head.target_layers, pack=name == "packed")
            for name in ("random", "sorted", "packed")
        }

    def __call__(self, name: str, rows: list[int]) -> float:
        """Loss per trained token."""
        batch = self.features[name].batch(rows)
        with torch.autocast(self.target.device.type, torch.bfloat16):
            out = self.head.loss(batch, self.target)
        (out.total / out.counts[0]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(out.total.detach() / out.counts[0])


def peak_bytes(name: str) -> int:
    """Memory that the largest micro-batch needs beyond model and data, in a process of its own."""
    command = [sys.executable, *sys.argv, "--child", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--number", type=int, default=4, help="micro-batches of each layout")
    parser.add_argument("--limit", type=int, help="conversations drawn from the data")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time: for a machine with other work")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    step = Step(args)
    plans = layouts(step.dataset, args.batch_tokens)
    lengths = step.dataset.lengths
    if args.child:
        plan = plans[args.child]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step(args.child, max(plan, key=lambda rows: lengths[rows].sum()))
        print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
        return
    fill = {
        name: float(lengths.sum() / sum(len(rows) * lengths[rows].max() for rows in plan))
        if name != "packed"
        else float(lengths.sum() / (len(plan) * args.batch_tokens))
        for name, plan in plans.items()
    }
    memory = {name: peak_bytes(name) for name in plans}
    clock = time.process_time if args.cpu_time else time.perf_counter
    seconds, tokens = dict.fromkeys(plans, 0.0), dict.fromkeys(plans, 0)
    for index in range(args.number):
        for name, plan in plans.items():
            start = clock()
            step(name, plan[index])
            seconds[name] += clock() - start
            tokens[name] += int(lengths[plan[index]].sum())
    rows = {
        name: {"tokens_per_second": tokens[name] / seconds[name], "fill": fill[name], "peak_bytes": memory[name]}
        for name in plans
    }
    for name, row in rows.items():
        speed, share, peak = row["tokens_per_second"], row["fill"], row["peak_bytes"] / 1e6
        times = rows["packed"]["tokens_per_second"] / speed
        print(
            f"{name:7} {speed:7.0f} real tokens/s  {share:.1%} filled  {peak:6.0f} MB  packed is {times:.2f} times it"
        )
    if args.out:
        settings = {"batch_tokens": args.batch_tokens, "vocabulary": args.vocabulary, "steps": STEPS, "data": args.data}
        settings |= {"micro_batches": args.number, "limit": args.limit, "cpu_time": args.cpu_time}
        report = {"device": device_name(step.target.device), "date": time.strftime("%Y-%m-%d"), "settings": settings}
        write_text(args.out / "benchmark_packing.json", json.dumps({**report, **rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
