"""Every family of draft heads on equal data and in equal training time: acceptance length in its own tuned trees,
speed over plain decoding, parity.

    python scripts/compare_families.py --target TARGET --data FILE --prompts FILE [--prompts FILE ...] --out FOLDER

Each recipe `recipes/smollm2-135m-FAMILY.yaml` trains on the same conversations for the same number of seconds, which the
speed of its first steps turns into a number of steps; when all are trained, trees are tuned and prompt sets decoded at
temperatures 0 and 1. What is done is kept in the folder, so a comparison that was stopped goes on. Prints a table and writes
`compare_families.json`. A family may carry overrides of its recipe: `--families eagle3 eagle3,head.preset=speculators`.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decode.settings import Settings
from headtrain.checkpoint import write_text
from headtrain.data import build_dataset
from headtrain.estimate import measure_run
from headtrain.evaluate import device_name, evaluate, load_plan, open_head
from headtrain.inspect import load_tokenizer
from headtrain.recipe import load_recipe
from headtrain.tune import PROMPTS, save_plan, tune

ROOT = Path(__file__).parents[1]
PREFIX = "smollm2-135m-"
TEMPERATURES = (0.0, 1.0)
TIMED = 6  # steps that tell how many fit


def train(args: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """Trains a recipe for about `args.seconds`; returns what it took."""
    family, *changes = name.split(",")
    path = ROOT / "recipes" / f"{PREFIX}{family}.yaml"
    words = [*changes, f"target.model={args.target}", f"data.train={args.data}", f"data.limit={args.conversations}"]
    words += ["eval.prompts=null", "eval.every=null", f"output={folder}"]
    recipe = load_recipe(path, words)
    dataset = build_dataset(recipe.data, load_tokenizer(recipe.target), progress=False)
    estimate = measure_run(recipe, dataset, TIMED)
    steps = max(1, round(args.seconds * estimate.steps / estimate.seconds))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", str(ROOT / "train.py"), str(path), *words]
    start = time.perf_counter()
    subprocess.run([*launch, "train.epochs=null", f"train.steps={steps}"], check=True)
    return {
        "tokens": len(dataset.ids),
        "epochs": steps / estimate.steps * (recipe.train.epochs or 1),
        "steps": steps,
        "seconds": time.perf_counter() - start,
        "parameters": estimate.trained_parameters,
    }


def decode(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tunes the head's trees; returns the report of each temperature."""
    head, target = open_head(folder, args.target, "bfloat16")
    reports: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        save_plan(folder, tune(head, target, temperature, PROMPTS[::2]))
        plan, settings = load_plan(folder, head, Settings(args.max_new_tokens, temperature))
        reports[f"T={temperature:g}"] = evaluate(folder, head, target, args.prompts, args.limit, settings, plan)
    return reports


def once(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file holds; if there is none, it is measured and kept."""
    if not path.exists():
        write_text(path, json.dumps(measure(), indent=2) + "\n")
    return json.loads(path.read_text())


def table(rows: dict[str, dict[str, Any]]) -> str:
    columns = ["family", "trained", "epochs"]
    for t in TEMPERATURES:
        columns += [f"T={t:g}: {s['name']}" for s in next(iter(rows.values()))[f"T={t:g}"]["sets"]] + [
            "mean",
            "x plain",
        ]
    lines = ["| " + " | ".join([*columns, "parity"]) + " |", "|---|" + "---:|" * len(columns)]
    for name, row in rows.items():
        cells = [name, f"{row['parameters'] / 1e6:.1f} M", f"{row['epochs']:.1f}"]
        parity = Counter()
        for t in TEMPERATURES:
            report = row[f"T={t:g}"]
            cells += [f"{s['acceptance_length']:.2f}" for s in (*report["sets"], report["mean"])]
            cells.append(f"{report['mean']['speedup']['engine']:.2f}")
            for s in report["sets"]:
                parity.update(s["parity"])
        cells.append(f"{parity['identical']} same, {parity['near_ties']} near ties, {parity['mismatches']} wrong")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True, help="JSONL of conversations")
    parser.add_argument("--conversations", type=int, default=720, help="drawn from it")
    parser.add_argument("--seconds", type=float, default=120, help="of training, each family")
    parser.add_argument("--prompts", action="append", required=True)
    parser.add_argument("--limit", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--families", nargs="+", help="recipes without their prefix; default: all")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    all_of_them = sorted(path.stem.removeprefix(PREFIX) for path in (ROOT / "recipes").glob(f"{PREFIX}*.yaml"))
    rows: dict[str, dict[str, Any]] = {}
    names = args.families or all_of_them
    trained = {
        name: once(args.out / name / "training.json", partial(train, args, name, args.out / name)) for name in names
    }
    for name in names:
        rows[name] = trained[name] | once(
            args.out / name / "reports.json", partial(decode, args, args.out / name / "head")
        )
        print(table(rows), flush=True)
    settings = {key: getattr(args, key) for key in ("conversations", "seconds", "prompts", "limit", "max_new_tokens")}
    report = {
        "device": device_name(torch.device("cpu")),
        "date": time.strftime("%Y-%m-%d"),
        "settings": settings,
        "rows": rows,
    }
    write_text(args.out / "compare_families.json", json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
