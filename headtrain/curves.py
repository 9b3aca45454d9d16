"""The summary plot of a run, drawn from its JSON lines: loss, acceptance by depth, measured acceptance length."""

import json
import os
from pathlib import Path
from typing import Any

PLOT = "curves.png"


def draw_curves(run: Path) -> Path | None:
    """Write `curves.png` into the run's folder; None where nothing was logged or matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    log = run / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    panels = [(title, curves) for title, curves in collect(lines).items() if curves]
    if not panels:
        return None
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 30 else "")
        axes.set(title=title, xlabel="step")
        axes.legend()
    partial = run / f".{PLOT}.{os.getpid()}"
    figure.savefig(partial, format="png", dpi=120)
    partial.replace(run / PLOT)
    return run / PLOT


def collect(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Panel -> label -> points (step, value)."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {
        "loss, nats a token": {},
        "acceptance by depth": {},
        "measured acceptance length": {},
    }
    loss, depth, length = panels.values()
    for line in lines:
        step = line["step"]
        for key, label in (("loss", "training"), ("eval_loss", "held out")):
            if key in line:
                loss.setdefault(label, []).append((step, line[key]))
        for index, value in enumerate(line.get("acceptance", ())):
            depth.setdefault(f"depth {index + 1}", []).append((step, value))
        if "acceptance_length" in line:
            length.setdefault("decoded", []).append((step, line["acceptance_length"]))
    return panels
