"""Figures of a report as PNG, each in a light and a dark version."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headtrain.checkpoint import write_bytes

SERIES = ("#2f6fde", "#d9792b", "#2a9d6f", "#a052c8", "#c8384f", "#8a7a21", "#3aa6b9", "#7c7f88")
PARTS = {"draft": "#d9792b", "verify": "#2f6fde", "other": "#7c7f88"}


@dataclass(frozen=True)
class Theme:
    background: str
    text: str
    grid: str


LIGHT = Theme("#ffffff", "#1d2430", "#dde1e7")
DARK = Theme("#171b22", "#dfe4ec", "#333a45")
Draw = Callable[[Any, Theme], None]  # (axes, theme)


def figure(draw: Draw, theme: Theme = LIGHT, height: float = 3.2) -> bytes:
    """PNG of one pair of axes, 4.8 by `height` inches: small, so that its words are legible on a telephone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(4.8, height), dpi=190, facecolor=theme.background, layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots()
    axes.set_facecolor(theme.background)
    axes.grid(True, color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(theme.grid)
    axes.tick_params(colors=theme.text, length=0)
    draw(axes, theme)
    for item in (axes.title, axes.xaxis.label, axes.yaxis.label):
        item.set_color(theme.text)
    handles, labels = axes.get_legend_handles_labels()
    if any(labels):
        columns = 2 if max(map(len, labels)) > 12 else 3
        drawn.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=9,
            labelcolor=theme.text,
            handlelength=1.4,
        )
    out = io.BytesIO()
    drawn.savefig(out, format="png")
    return out.getvalue()


def report_plots(report: Mapping[str, Any]) -> dict[str, tuple[Draw, float]]:
    """What a single run can show: how to draw it and its height, by name."""
    sets = report["sets"]
    bars = 1.4 + 0.36 * len(sets)
    plots = {
        "acceptance_by_depth": (lambda axes, theme: _acceptance(axes, sets), 3.2 + 0.11 * len(sets)),
        "speedup_by_set": (lambda axes, theme: _speedup(axes, theme, sets), max(2.4, bars + 0.2)),
        "step_time": (lambda axes, theme: _step_time(axes, theme, sets), max(2.4, bars)),
    }
    return {name: plot for name, plot in plots.items() if name != "acceptance_by_depth" or _deepest(sets)}


def _deepest(sets: Sequence[Mapping[str, Any]]) -> int:
    return max(len(row["acceptance_by_depth"]) for row in sets)


def _acceptance(axes: Any, sets: Sequence[Mapping[str, Any]]) -> None:
    for number, row in enumerate(sets):
        shares = row["acceptance_by_depth"]
        color, style = SERIES[number % len(SERIES)], "-" if number < len(SERIES) else "--"
        axes.plot(range(1, len(shares) + 1), shares, style, marker="o", markersize=4, color=color, label=row["name"])
    axes.set(xlabel="depth", ylabel="accepted, given depth - 1 was", ylim=(0, 1.02), title="Acceptance by depth")
    axes.set_xticks(range(1, _deepest(sets) + 1))


def _speedup(axes: Any, theme: Theme, sets: Sequence[Mapping[str, Any]]) -> None:
    names = [row["name"] for row in sets]
    rows = range(len(sets))
    for offset, key, label in ((-0.19, "engine", "over plain decoding"), (0.19, "transformers", "over generate")):
        color = SERIES[0] if key == "engine" else SERIES[1]
        values = [row["speedup"][key] for row in sets]
        bars = axes.barh([y + offset for y in rows], values, 0.36, color=color, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9, color=theme.text)
    axes.axvline(1.0, color=theme.text, linewidth=1, linestyle=":")
    axes.set_yticks(list(rows), names)
    axes.invert_yaxis()
    axes.set(xlabel="speedup (dotted: 1, no gain)", title="Speedup by set")
    axes.margins(x=0.12)
    axes.grid(False, axis="y")


def _step_time(axes: Any, theme: Theme, sets: Sequence[Mapping[str, Any]]) -> None:
    left = [0.0] * len(sets)
    for part, color in PARTS.items():
        values = [row["step_ms"][part] for row in sets]
        axes.barh(range(len(sets)), values, 0.6, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for y, total in enumerate(left):
        axes.text(total, y, f" {total:.1f}", va="center", fontsize=9, color=theme.text)
    axes.set_yticks(range(len(sets)), [row["name"] for row in sets])
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds a step", title="Where a step's time goes")
    axes.margins(x=0.1)
    axes.grid(False, axis="y")


Lines = Mapping[str, Sequence[tuple[Any, float]]]  # (x, y) of each line, by its label


def line_plot(lines: Lines, axis: str, ylabel: str, title: str, reference: float | None = None) -> tuple[Draw, float]:
    """Values over one axis of a sweep. Numbers that double are spread evenly; words are placed in their order."""
    numbers = all(isinstance(x, (int, float)) for line in lines.values() for x, _ in line)

    def draw(axes: Any, theme: Theme) -> None:
        xs = list(dict.fromkeys(x for line in lines.values() for x, _ in line))
        xs = sorted(xs) if numbers else xs
        spread = numbers and axis != "temperature" and min(xs) > 0
        for number, (label, line) in enumerate(lines.items()):
            style = "-" if number < len(SERIES) else "--"
            line = sorted(line) if numbers else line
            at = [x if numbers else xs.index(x) for x, _ in line]
            color = SERIES[number % len(SERIES)]
            axes.plot(at, [y for _, y in line], style, marker="o", markersize=4, color=color, label=label)
        if spread:
            axes.set_xscale("log", base=2)
            axes.minorticks_off()
        axes.set_xticks(xs if numbers else range(len(xs)), [f"{x:g}" if numbers else str(x) for x in xs])
        if reference is not None:
            axes.axhline(reference, color=theme.text, linewidth=1, linestyle=":")
        axes.set_ylim(bottom=0)
        axes.set(xlabel=axis, ylabel=ylabel, title=title)

    return draw, 3.2 + 0.11 * len(lines)


def write_plots(plots: Mapping[str, tuple[Draw, float]], folder: Path) -> list[Path]:
    """Each plot as `NAME.png` in the folder, in the light version."""
    paths = []
    for name, (draw, height) in plots.items():
        write_bytes(folder / f"{name}.png", figure(draw, LIGHT, height))
        paths.append(folder / f"{name}.png")
    return paths
