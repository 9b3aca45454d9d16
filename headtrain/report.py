"""`report.html`: tables, plots and token view of an evaluation in one file that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headtrain.checkpoint import write_text
from headtrain.plots import DARK, LIGHT, Draw, figure, report_plots, write_plots

TEMPLATES = Path(__file__).parent / "templates"
PAGE = "report.html"
DEEPEST = 6  # depths beyond share its colour


def write_page(
    report: Mapping[str, Any],
    out: Path,
    replies: Sequence[Mapping[str, Any]] = (),
    predicted: Sequence[Mapping[str, Any]] = (),
    points: Sequence[Mapping[str, Any]] = (),
    plots: Mapping[str, tuple[Draw, float]] | None = None,
) -> Path:
    """Write `report.html`, and each plot as PNG beside it.

    Args:
        report: of a single run; of a sweep, that of its first point.
        replies: `name`, `prompt`, `acceptance_length` and `rows` (see `trace.to_rows`) of each reply of the token view.
        predicted: rows of `predict.beside`.
        points: of a sweep, as `sweep.summary` gives them; they take the place of the table of sets.
        plots: default those of a single run.
    """
    drawn = report_plots(report) if plots is None else plots
    write_plots(drawn, out)
    write_text(out / PAGE, render(report, replies, predicted, points, drawn))
    return out / PAGE


def render(
    report: Mapping[str, Any],
    replies: Sequence[Mapping[str, Any]],
    predicted: Sequence[Mapping[str, Any]],
    points: Sequence[Mapping[str, Any]],
    plots: Mapping[str, tuple[Draw, float]],
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    images = [
        {
            "name": name.replace("_", " "),
            "light": data_url(figure(draw, LIGHT, height)),
            "dark": data_url(figure(draw, DARK, height)),
        }
        for name, (draw, height) in plots.items()
    ]
    return environment.get_template("report.html.j2").render(
        report=report,
        settings=report["settings"],
        tree=tree_name(report["settings"]["plan"]),
        totals=totals(report),
        replies=[{**reply, "shares": shares(reply["rows"]), "compact": compact(reply["rows"])} for reply in replies],
        predicted=predicted,
        points=points,
        axes=[axis for axis in (points[0]["point"] if points else {}) if len({p["point"][axis] for p in points}) > 1],
        plots=images,
        deepest=DEEPEST,
    )


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def tree_name(plan: Mapping[str, Any]) -> str:
    """A plan in a few words."""
    if plan["kind"] == "plain":
        return "no tree"
    if plan["kind"] == "chain":
        return f"chain of {plan['depth']}"
    if plan["kind"] == "static":
        return f"static tree of {len(plan['paths']) + 1} nodes, depth {max(map(len, plan['paths']))}"
    return f"dynamic tree of {plan['size']} nodes, depth {plan['depth']}, width {plan['width']}"


def totals(report: Mapping[str, Any]) -> dict[str, float]:
    """Parity and counts over all sets."""
    keys = ("compared", "identical", "near_ties", "mismatches")
    found = {key: sum(row["parity"][key] for row in report["sets"]) for key in keys}
    found["widest_gap"] = max(row["parity"]["widest_gap"] for row in report["sets"])
    return {**found, **{key: sum(row[key] for row in report["sets"]) for key in ("prompts", "new_tokens")}}


def shares(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(depth, tokens) of a reply; depth 0: written by the target."""
    depths = [row["depth"] for row in rows]
    return [(depth, depths.count(depth)) for depth in sorted(set(depths))]


def compact(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """[depth, rank, draft, target, refused guess, its draft, its target probability] a token, cut after nulls."""
    found = []
    for row in rows:
        refused = row["refused"] or {}
        values = [row["depth"], row["rank"], row["draft"], row["target"]]
        values += [refused.get("text"), refused.get("draft"), refused.get("target")]
        values = [round(value, 5) if isinstance(value, float) else value for value in values]
        while values[-1] is None:
            values.pop()
        found.append(values)
    return found
