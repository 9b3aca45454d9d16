"""An evaluation or a sweep of them, from names on the command line to report.json, plots and report.html."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from decode.draft import Draft
from decode.errors import UserError
from decode.settings import Settings
from decode.tree import Plan
from decode.verify import RULES
from headtrain.checkpoint import read_config
from headtrain.evaluate import NGRAM, check_options, evaluate, load_plan, open_draft, write_report
from headtrain.heads.base import Head
from headtrain.predict import beside, load_profiles, step_costs
from headtrain.prompt_sets import load_sets
from headtrain.report import write_page
from headtrain.sweep import (
    Point,
    fill_context,
    make_points,
    parse_axes,
    plan_of_size,
    run_sweep,
    summary,
    sweep_plots,
)
from headtrain.target import Target
from headtrain.trace import trace_replies

Note = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What to evaluate. `axes` are words such as batch=1,2; with any, or with several heads, the job is a sweep."""

    heads: Sequence[Path]
    prompts: Sequence[str]
    out: Path
    settings: Settings
    limit: int | None = None
    batch_size: int = 1
    target: str | None = None
    dtype: str = "bfloat16"
    axes: Sequence[str] = ()
    shown: int = 1
    """Replies of each set in the token view."""

    def points(self) -> list[Point]:
        """The settings of a sweep. Raises UserError, as `check` does, before any model is loaded."""
        settings = self.settings
        usual = {"rule": settings.rule, "temperature": settings.temperature, "batch": self.batch_size}
        points = make_points([str(head) for head in self.heads], parse_axes(self.axes), usual)
        for temperature in {point.temperature for point in points}:
            replace(settings, temperature=temperature, rule=None)  # checks it
        return points

    def check(self) -> None:
        check_options(self.out, self.batch_size, self.dtype)
        if not self.heads:
            raise UserError("evaluate: no head is named; give its folder, a model's folder or ngram")
        if self.shown < 0:
            raise UserError(f"--tokens: {self.shown} must be at least 0")
        for head in self.heads:
            if str(head) != NGRAM and not (head / "config.json").is_file():
                read_config(head)  # says what is wrong with it


def run_one(job: Job, note: Note = lambda text: None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Evaluate one head in one setting; returns the report and what `beside` predicts, and writes all files."""
    job.check()
    check_options(job.out, rule=job.settings.rule, temperature=job.settings.temperature)
    sets = load_sets(job.prompts, job.limit)
    (head,) = job.heads
    draft, target = open_draft(head, job.target, job.dtype)
    plan, settings = load_plan(head, draft, job.settings)
    report = evaluate(head, draft, target, sets, job.limit, settings, plan, job.batch_size, note)
    predicted = []
    if isinstance(draft, Head):
        note("measuring step times")
        prompts = sorted((target.prompt_ids(m) for rows in sets.values() for m in rows), key=len)
        predicted = beside(report, step_costs(draft, target, prompts[len(prompts) // 2], plan, job.batch_size))
    write_report(report, job.out)
    replies = trace_replies(draft, target, sets, settings, plan, job.shown)
    write_page(report, job.out, replies, predicted)
    return report, predicted


def run_points(job: Job, note: Note = lambda text: None) -> list[dict[str, Any]]:
    """Evaluate all points of a sweep that are not yet measured; returns their summary and writes all files."""
    job.check()
    points = job.points()
    sets = load_sets(job.prompts, job.limit)
    opened: dict[str, tuple[Draft, Target]] = {}

    def measure(point: Point) -> dict[str, Any]:
        if point.head not in opened:
            opened.clear()  # one at a time in memory
            opened[point.head] = open_draft(Path(point.head), job.target, job.dtype)
        draft, target = opened[point.head]
        plan, settings = _plan(job, point, draft)
        prompts = sets
        if point.context is not None:
            prompts = {name: fill_context(target, rows, point.context) for name, rows in sets.items()}
            left_out = sum(len(rows) - len(prompts[name]) for name, rows in sets.items())
            if left_out:
                note(f"context {point.context}: {left_out} longer prompts are left out")
        used = draft if plan is not None else None
        return evaluate(Path(point.head), used, target, prompts, job.limit, settings, plan, point.batch)

    run = {
        "prompts": list(job.prompts),
        "limit": job.limit,
        "max_new_tokens": job.settings.max_new_tokens,
        "seed": job.settings.seed,
        "target": job.target,
        "dtype": job.dtype,
    }
    saved = run_sweep(points, job.out, run, measure, note)
    rows = summary(saved)
    first = {**saved[0]["report"], "head": ", ".join(dict.fromkeys(row["point"]["head"] for row in rows))}
    write_page(first, job.out, points=rows, plots=sweep_plots(rows))
    return rows


def _plan(job: Job, point: Point, draft: Draft) -> tuple[Plan | None, Settings]:
    folder = Path(point.head)
    settings = replace(job.settings, temperature=point.temperature, rule=point.rule)
    plan, settings = load_plan(folder, draft, settings)
    if point.rule is not None and RULES[point.rule].shape == "chain" and point.tree is None:
        point = Point(**{**asdict(point), "tree": plan.depth + 1})
    if point.tree is None:
        return plan, settings
    profiles = load_profiles(folder)
    same = [p for p in profiles if (p.temperature > 0) == (point.temperature > 0)]
    profile = next(iter(same or profiles), None)
    return plan_of_size(point.tree, draft, point.rule, plan, profile), settings
