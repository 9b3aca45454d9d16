"""`headtrain inspect`: what a recipe would train on, before anything is trained."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from decode.errors import UserError
from headtrain.conversations import load_rows
from headtrain.data import Dataset, batches, encode_rows, places, require_trained
from headtrain.recipe import Recipe, TargetConfig

if TYPE_CHECKING:
    from headtrain.estimate import Estimate

TRAINED, CONTEXT, ID = "bold green", "white", "bright_black"


def inspect_recipe(
    recipe: Recipe, console: Console, tokenizer=None, num_rows: int = 3, num_tokens: int = 160, steps: int = 0
) -> None:
    """Prints tokens under the loss mask, the account of all rows, lengths and the size of an epoch.

    With `steps` it runs so many of them and prints the memory and time that the whole run will need; else the target's
    weights are not loaded. `num_tokens` is shown of each of `num_rows` rows. Raises UserError, behind what it could
    show, when nothing is trained.
    """
    tokenizer = tokenizer or load_tokenizer(recipe.target)
    for split, sources in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        if not sources:
            continue
        rows = load_rows(sources, recipe.data.limit, recipe.data.seed)
        dataset = encode_rows(recipe.data, tokenizer, rows, progress=console.is_terminal)
        if split == "train":
            for row in _spread(len(dataset), num_rows):
                console.print(_tokens(dataset, row, tokenizer, num_tokens))
        console.print(_account(dataset, f"data.{split}: {', '.join(sources)}"))
        require_trained(dataset, rows[0], recipe.data, tokenizer, f"data.{split}")
        console.print(_lengths(dataset))
        if split == "train":
            console.print(_epoch(dataset, recipe))
            if steps:
                from headtrain.estimate import measure_run

                console.print(_needs(measure_run(recipe, dataset, steps)))


def load_tokenizer(target: TargetConfig):
    """The target's tokenizer. Raises UserError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            os.path.expanduser(target.model), revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"target.model: no tokenizer in {target.model} ({reason}); save one there") from error


def _spread(num_rows: int, shown: int) -> list[int]:
    return sorted({int(row) for row in np.linspace(0, max(0, num_rows - 1), shown)}) if num_rows else []


def _tokens(dataset: Dataset, row: int, tokenizer, limit: int) -> Text:
    """Token texts, each with its id, in runs of equal mask; the middle of a long run is left out."""
    ids, mask = dataset[row]
    text = Text(f"row {row} of {dataset.origins[row]}: {len(ids)} tokens, {int(mask.sum())} trained\n", style="bold")
    runs = [
        (trained, [int(i) for i, _ in run]) for trained, run in groupby(zip(ids, mask, strict=True), lambda x: x[1])
    ]
    share = max(8, limit // len(runs))
    for trained, run in runs:
        style = TRAINED if trained else CONTEXT
        text.append(f"  {'trained' if trained else 'context'} ({len(run)}) ", style=f"{style} reverse")
        hidden = max(0, len(run) - share)
        parts = [run] if not hidden else [run[: share // 2], run[len(run) - share // 2 :]]
        for number, part in enumerate(parts):
            if number:
                text.append(f" ... {len(run) - 2 * (share // 2)} more ... ", style=ID)
            for token in part:
                text.append(" ")
                text.append(_visible(tokenizer.decode([token])), style=style)
                text.append(f":{token}", style=ID)
        text.append("\n")
    return text


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"


def _account(dataset: Dataset, title: str) -> Table:
    counts = dataset.counts
    table = Table("rows", "number", "first at", title=title, title_justify="left")
    table.add_row("conversations read", f"{counts.read:,}")
    if counts.split:
        table.add_row("+ one row per reply (the template rewrites history)", f"{counts.split:,}")
    for reason, number in counts.dropped.most_common():
        table.add_row(Text(f"- dropped: {reason}"), f"{number:,}", Text(counts.first[reason]))
    table.add_row("= kept", f"{counts.kept:,}")
    table.add_row("  of these cut at data.max_length", f"{counts.truncated:,}")
    if counts.altered:
        table.add_row("  of these whose text the tokenizer changes", f"{counts.altered:,}")
    return table


def _lengths(dataset: Dataset) -> Table:
    ends = dataset.offsets
    trained = np.add.reduceat(dataset.masks, ends[:-1], dtype=np.int64)
    shares = (0, 25, 50, 75, 95, 100)
    table = Table("tokens of a row", "min", "25 %", "median", "75 %", "95 %", "max", "total")
    for name, values in (("all", dataset.lengths), ("trained", trained)):
        marks = np.percentile(values, shares, method="nearest")
        table.add_row(name, *(f"{int(mark):,}" for mark in marks), f"{int(values.sum()):,}")
    return table


def _epoch(dataset: Dataset, recipe: Recipe) -> Table:
    train = recipe.train
    plan = [_plan(dataset, recipe, epoch) for epoch in range(train.epochs or 1)]
    steps = [len(micro_batches) // train.accumulation for micro_batches in plan]
    area = sum(places(dataset, rows, recipe.data.pack) for rows in plan[0])
    table = Table("on one device", "", show_header=False, title_justify="left")
    table.add_row("tokens per epoch", f"{len(dataset.ids):,}, {int(dataset.masks.sum()):,} trained")
    table.add_row("padding", f"{1 - len(dataset.ids) / area:.1%} of {area:,} places")
    table.add_row("micro-batches per epoch", f"{len(plan[0]):,} of at most {train.batch_tokens:,} tokens")
    table.add_row("micro-batches per step", f"{train.accumulation:,}")
    table.add_row("optimizer steps per epoch", f"{steps[0]:,}")
    total = train.steps or sum(steps)
    table.add_row("optimizer steps in all", f"{total:,} ({total / steps[0]:.3g} epochs)")
    table.add_row("fingerprint", dataset.fingerprint[:16])
    return table


def _plan(dataset: Dataset, recipe: Recipe, epoch: int) -> list[list[int]]:
    train = recipe.train
    share = train.accumulation
    return batches(dataset, train.batch_tokens, train.seed, epoch, accumulation=share, pack=recipe.data.pack)


def _needs(estimate: Estimate) -> Table:
    title = f"measured with {estimate.measured} steps on {estimate.device}"
    table = Table("", "", title=title, show_header=False, title_justify="left")
    table.add_row("parameters of the target", f"{estimate.target_parameters:,}")
    table.add_row("parameters that are trained", f"{estimate.trained_parameters:,}")
    for part in ("weights", "gradients", "optimizer", "activations"):
        table.add_row(f"memory: {part}", f"{getattr(estimate, part) / 1e9:.3f} GB")
    table.add_row("memory in all", f"{estimate.memory / 1e9:.3f} GB")
    table.add_row("hidden states, if cached on disk", f"{estimate.cache / 1e9:.3f} GB")
    table.add_row("speed", f"{estimate.tokens_per_second:,.0f} tokens/s, padding included")
    table.add_row("time of all steps", f"{timedelta(seconds=round(estimate.seconds))}, evaluations not counted")
    return table
