"""Acceptance length and speed of every lossless rule on one head, at equal node counts.

    python scripts/compare_rules.py HEAD --target TARGET --prompts FILE [--prompts FILE ...] --out FOLDER

Trees: a chain, and static trees of width 2 and 4, all with the same number of nodes. Then, under shared noise, dynamic
trees of that many nodes whose nodes are ordered by log q, by log q + g or by a mix. Prints a table, writes
`compare_rules.json`, `compare_rules.md` and `compare_rules.png`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from decode.engine import Engine, Output
from decode.metrics import acceptance_length
from decode.settings import Settings
from decode.tree import Chain, Dynamic, Plan, Static
from headtrain.checkpoint import write_text
from headtrain.conversations import load_prompts
from headtrain.evaluate import device_name, open_head
from headtrain.heads.base import Head
from headtrain.target import Target

NODES = 8  # drafted, the same for every shape
SHAPES: dict[str, Plan] = {
    "chain": Chain(NODES),
    "width 2": Static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]),
    "width 4": Static([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
}
DYNAMIC: dict[str, Plan] = {  # the score that orders the nodes
    "log q": Dynamic(4, 4, NODES + 1),
    "log q + g / 2": Dynamic(4, 4, NODES + 1, noise_weight=0.5),
    "log q + g": Dynamic(4, 4, NODES + 1, noise_weight=1.0),
    "2 log q": Dynamic(4, 4, NODES + 1, sharpness=2.0),
}
RULES = ("gumbel", "rejection", "specinfer", "block", "deterministic")
TEMPERATURES = (0.3, 0.7, 1.0)


def seconds(batch: list[Output]) -> float:
    """Of decoding; a batch shares its clock."""
    timing = batch[0].timing
    return timing.draft + timing.verify + timing.other


def compare(head: Head, target: Target, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a (temperature, shape, rule); the rules take turns on each batch, so a slow moment touches all alike."""
    sets = {Path(name).stem: [target.prompt_ids(m) for m in load_prompts(name, args.limit)] for name in args.prompts}
    rows = []
    for temperature in TEMPERATURES:
        for shape, plan in (SHAPES | DYNAMIC).items():
            rules = ["gumbel"] if shape in DYNAMIC else [r for r in RULES if r != "block" or shape == "chain"]
            engine = Engine(target.model, head, plan, target.tokenizer)
            outputs: dict[str, dict[str, list[Output]]] = {rule: {name: [] for name in sets} for rule in rules}
            clock = dict.fromkeys(rules, 0.0)
            for name, prompts in track(sets.items(), f"T={temperature} {shape}", transient=True):
                for start in range(0, len(prompts), args.batch_size):
                    group = prompts[start : start + args.batch_size]
                    for rule in rules:
                        settings = Settings(args.max_new_tokens, temperature, rule=rule, seed=start, ignore_eos=True)
                        replies = engine.generate(group, settings)
                        outputs[rule][name] += replies
                        clock[rule] += seconds(replies)
            for rule, of_rule in outputs.items():
                together = [output for group in of_rule.values() for output in group]
                tokens = sum(len(output.tokens) - 1 for output in together)
                rows.append(
                    {
                        "temperature": temperature,
                        "shape": shape,
                        "rule": rule,
                        "acceptance_length": acceptance_length(together),
                        "tokens_per_second": tokens / clock[rule],
                        "sets": {name: acceptance_length(group) for name, group in of_rule.items()},
                    }
                )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table("temperature", "shape", "rule", "acceptance length", "tokens/s")
    for row in rows:
        figures = f"{row['acceptance_length']:.3f}", f"{row['tokens_per_second']:.1f}"
        table.add_row(str(row["temperature"]), row["shape"], row["rule"], *figures)
    Console().print(table)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Acceptance lengths by shape, rule and temperature; then of every set for trees at the last temperature."""
    figures = {(row["shape"], row["rule"], row["temperature"]): row for row in rows}
    lines = ["| tree | rule |" + "".join(f" T={t:g} |" for t in TEMPERATURES) + " tokens/s |"]
    lines += ["|---|---|" + "---:|" * (len(TEMPERATURES) + 1)]
    for shape, rule in dict.fromkeys((shape, rule) for shape, rule, _ in figures):
        of = [figures[shape, rule, t] for t in TEMPERATURES]
        speed = sum(row["tokens_per_second"] for row in of) / len(of)
        lines.append(
            f"| {shape} | {rule} |" + "".join(f" {row['acceptance_length']:.2f} |" for row in of) + f" {speed:.1f} |"
        )
    last, sets = TEMPERATURES[-1], list(rows[0]["sets"])
    lines += ["", f"| T={last:g}: tree | rule |" + "".join(f" {name} |" for name in sets)]
    lines += ["|---|---|" + "---:|" * len(sets)]
    for row in rows:
        if row["temperature"] == last and row["shape"] != "chain" and row["shape"] in SHAPES:
            cells = "".join(f" {row['sets'][name]:.2f} |" for name in sets)
            lines.append(f"| {row['shape']} | {row['rule']} |{cells}")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SHAPES), figsize=(4 * len(SHAPES), 3.4), sharey=True)
    for axis, shape in zip(axes, SHAPES, strict=True):
        for number, rule in enumerate(RULES):
            line = [
                (r["temperature"], r["acceptance_length"]) for r in rows if (r["shape"], r["rule"]) == (shape, rule)
            ]
            if line:
                axis.plot(*zip(*line, strict=True), marker="o", color=f"C{number}", label=rule)
        axis.set_title(f"{shape}, {NODES} drafted nodes")
        axis.set_xlabel("temperature")
    axes[0].set_ylabel("acceptance length")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--prompts", action="append", required=True)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head, target = open_head(args.head, args.target, args.dtype)
    rows = compare(head, target, args)
    print_table(rows)
    settings = {key: getattr(args, key) for key in ("limit", "batch_size", "max_new_tokens", "dtype")}
    settings |= {"nodes": NODES, "threads": torch.get_num_threads()}
    report = {"head": args.head.name, "device": device_name(target.device), "date": time.strftime("%Y-%m-%d")}
    report |= {"settings": settings, "rows": rows}
    write_text(args.out / "compare_rules.json", json.dumps(report, indent=2) + "\n")
    write_text(args.out / "compare_rules.md", markdown(rows))
    plot(rows, args.out / "compare_rules.png")


if __name__ == "__main__":
    main()
