"""Evaluate over several heads, rules, temperatures, batch sizes, contexts and tree sizes, a file a point.

A point that is measured is saved at once as `points/NAME.json`; a sweep that was stopped goes on with the points it lacks.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decode.calibrate import frontier
from decode.draft import Draft
from decode.errors import UserError
from decode.tree import MAX_NODES, Chain, Dynamic, Plan
from decode.verify import RULES, check_rule
from headtrain.checkpoint import write_text
from headtrain.conversations import Message
from headtrain.plots import SERIES, Draw, line_plot
from headtrain.predict import Profile
from headtrain.target import Target

AXES = ("rule", "temperature", "batch", "context", "tree")
SUMMARY = "sweep.json"
TYPICAL = ((0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.02, 0.01),) * 8  # acceptance of a head that was never profiled


@dataclass(frozen=True)
class Point:
    """One setting. context: tokens of each prompt, None as they are; tree: nodes, root included, None the tuned tree."""

    head: str
    rule: str | None = None
    temperature: float = 0.0
    batch: int = 1
    context: int | None = None
    tree: int | None = None

    @property
    def file(self) -> str:
        """Names every field; heads of one name in different folders are told apart by a digest."""
        digest = hashlib.sha256(self.head.encode()).hexdigest()[:6]
        parts = [
            re.sub(r"[^\w.-]", "_", Path(self.head).name),
            digest,
            self.rule or "default",
            f"t{self.temperature:g}",
        ]
        parts += [f"b{self.batch}", f"c{self.context or 'own'}", f"n{self.tree or 'tuned'}"]
        return "-".join(parts) + ".json"


def parse_numbers(text: str, name: str) -> list[float]:
    """`1,2,4`, `256,1k` (k: 1,024), `1..64` (doubling) or `1..5+1` (in steps): ascending within a range, none twice."""
    found: list[float] = []
    for part in text.split(","):
        match = re.fullmatch(r"([\d.]+k?)\.\.([\d.]+k?)(?:\+([\d.]+k?))?", part.strip())
        if match is None:
            found.append(_number(part.strip(), name))
            continue
        at, end = _number(match[1], name), _number(match[2], name)
        step = _number(match[3], name) if match[3] else None
        if not 0 < at <= end or step == 0:
            raise UserError(f"{name}: {part} is no range; write it as 1..64 or 1..5+1")
        while at < end:
            found.append(at)
            at = at + step if step else 2 * at
        found += [end] if step is None or at == end else []
    return list(dict.fromkeys(found))


def _number(text: str, name: str) -> float:
    try:
        number = float(text[:-1]) * 1024 if text.endswith("k") else float(text)
    except ValueError:
        raise UserError(f"{name}: {text!r} is no number; write 1,2,4 or 1k or 1..64") from None
    if not 0 <= number < float("inf"):
        raise UserError(f"{name}: {text} is below 0 or not finite")
    return number


def parse_whole(text: str, name: str, most: int | None = None) -> list[int]:
    numbers = parse_numbers(text, name)
    for number in numbers:
        if number != int(number) or number < 1:
            raise UserError(f"{name}: {number:g} must be a whole number of at least 1")
        if most is not None and number > most:
            raise UserError(f"{name}: {number:g} is more than {most}")
    return [int(number) for number in numbers]


def parse_axes(words: Sequence[str]) -> dict[str, list[Any]]:
    """The axes of words such as `batch=1,2,4`. Raises UserError for one that is unknown, empty or given twice."""
    axes: dict[str, list[Any]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in AXES or not equals:
            near = difflib.get_close_matches(name, AXES, n=1)
            mend = f"did you mean {near[0]}?" if near else f"use {', '.join(AXES)}"
            raise UserError(f"--sweep: {word} is no axis; {mend}; an axis is written batch=1,2,4")
        if name in axes:
            raise UserError(f"--sweep: {name} is given twice; list its values after one another: {name}=1,2")
        if name == "rule":
            axes[name] = [rule.strip() for rule in text.split(",")]
        elif name == "temperature":
            axes[name] = parse_numbers(text, "--sweep: temperature")
        else:
            axes[name] = parse_whole(text, f"--sweep: {name}", MAX_NODES if name == "tree" else None)
    return axes


def make_points(heads: Sequence[str], axes: Mapping[str, Sequence[Any]], usual: Mapping[str, Any]) -> list[Point]:
    """All settings, the head outermost. At temperature 0 every rule is greedy; greedy above it has no meaning.

    Raises UserError for a rule that is unknown or serves none of the temperatures.
    """
    values = {name: list(axes.get(name, [usual.get(name)])) for name in AXES}
    for rule in values["rule"]:
        check_rule(rule, True, 0.0 if rule == "greedy" else 1.0)
    greedy, temperatures = "greedy" in values["rule"], values["temperature"]
    if "rule" not in axes:
        for temperature in temperatures:
            check_rule(values["rule"][0], True, temperature)
    points = []
    for head, *rest in itertools.product(heads, *(values[name] for name in AXES)):
        point = Point(head, *rest)
        if "rule" in axes and point.temperature == 0:
            point = Point(head, "greedy", *rest[1:])
        elif "rule" in axes and point.rule == "greedy":
            continue
        points.append(point)
    if not points:
        raise UserError("--sweep: rule greedy needs temperature 0" if greedy else "--sweep: no points")
    return list(dict.fromkeys(points))


def plan_of_size(size: int, draft: Draft, rule: str | None, tuned: Plan, profile: Profile | None) -> Plan | None:
    """A tree of `size` nodes of the kind that was tuned and fits the rule; static ones are the best for the profile.
    None: plain decoding."""
    if size == 1:
        return None
    deepest = min(draft.max_depth or MAX_NODES, size - 1)
    if rule is not None and RULES[rule].shape == "chain":
        return Chain(deepest)
    if isinstance(tuned, Dynamic):
        depth, width = min(tuned.depth, deepest), tuned.width
        while size > 1 + width + (depth - 1) * width**2:
            width += 1
        return Dynamic(depth, width, size, tuned.noise_weight, tuned.sharpness)
    return frontier((profile.ranks if profile else TYPICAL)[:deepest], size)


def fill_context(target: Target, prompts: Sequence[list[Message]], context: int) -> list[list[Message]]:
    """The prompts of at most `context` tokens, each brought close to it by text of the other prompts before its own.

    Raises UserError where every prompt is longer.
    """
    texts = "\n\n".join(str(messages[-1]["content"]) for messages in prompts)
    filler: list[int] = target.tokenizer(texts, add_special_tokens=False)["input_ids"] or [0]
    filler = filler * (1 + context // len(filler))
    found = []
    for messages in prompts:
        room = context - len(target.prompt_ids(messages))
        if room < 0:
            continue
        while room > 0:
            text = f"{target.tokenizer.decode(filler[:room])}\n\n{messages[-1]['content']}"
            longer = [*messages[:-1], {**messages[-1], "content": text}]
            over = len(target.prompt_ids(longer)) - context
            if over <= 0:
                messages = longer
                break
            room -= over
        found.append(messages)
    if not found:
        raise UserError(f"--sweep: context {context}: every prompt is longer; raise it")
    return found


def run_sweep(
    points: Sequence[Point],
    out: Path,
    run: Mapping[str, Any],
    measure: Callable[[Point], dict[str, Any]],
    note: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Measure what `out` lacks; returns {point, run, report} of all points and writes their summary.

    `run` says what else the figures depend on (prompts, lengths, dtype, ..). Raises UserError if `out` holds points of
    another run.
    """
    found = []
    for number, point in enumerate(points, 1):
        path = out / "points" / point.file
        saved = _read(path, point, run, note)
        if saved is None:
            note(f"point {number} of {len(points)}: {path.stem}")
            saved = {"point": asdict(point), "run": dict(run), "report": measure(point)}
            write_text(path, json.dumps(saved, indent=2) + "\n")
        else:
            note(f"point {number} of {len(points)}: {path.stem}, measured before")
        found.append(saved)
        write_text(out / SUMMARY, json.dumps({"run": dict(run), "points": summary(found)}, indent=2) + "\n")
    return found


def _read(path: Path, point: Point, run: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        saved = json.loads(path.read_text())
        before, _, _ = saved["run"], saved["report"]["mean"], saved["point"]
    except (ValueError, KeyError, TypeError, OSError):
        note(f"{path}: is damaged, measured again")
        return None
    if before != dict(run):
        other = next(key for key in {**before, **run} if before.get(key) != run.get(key))
        raise UserError(
            f"{path}: was measured with {other} {before.get(other)}, not {run.get(other)}; choose another --out"
        )
    return saved if saved["point"] == asdict(point) else None


def summary(saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line a point: means over its sets."""
    rows = []
    for entry in saved:
        report = entry["report"]
        baseline = sum(row["baseline"]["engine"] for row in report["sets"]) / len(report["sets"])
        point = {**entry["point"], "head": Path(entry["point"]["head"]).name or entry["point"]["head"]}
        point["rule"] = point["rule"] or "default"
        mismatches = sum(row["parity"]["mismatches"] for row in report["sets"])
        rows.append({"point": point, **report["mean"], "plain": baseline, "mismatches": mismatches})
    return rows


def sweep_plots(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Draw, float]]:
    """Speedup and tokens per second over each axis that has several values.

    A line for each setting of the other axes; where these are more than `SERIES` has colours, they stay at their first.
    """
    varied = [axis for axis in ("head", *AXES) if len({row["point"][axis] for row in rows}) > 1]
    plots: dict[str, tuple[Draw, float]] = {}
    for axis in varied:
        others = [name for name in varied if name != axis]
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            label = ", ".join(_setting(name, row["point"][name]) for name in others)
            groups.setdefault(label, []).append(row)
        groups = {label: group for label, group in groups.items() if len(group) > 1} or groups
        if len(groups) > len(SERIES):
            groups = dict(itertools.islice(groups.items(), 1))
        speed = {
            label: [(row["point"][axis], row["speedup"]["engine"]) for row in rows] for label, rows in groups.items()
        }
        rate = {
            label: [(row["point"][axis], row["tokens_per_second"]) for row in rows] for label, rows in groups.items()
        }
        if len(rate) == 1:
            label, group = next(iter(groups.items()))
            rate = {"with the head": rate[label], "plain": [(row["point"][axis], row["plain"]) for row in group]}
        note = f" ({next(iter(groups))})" if others and len(groups) == 1 else ""
        plots[f"speedup_by_{axis}"] = line_plot(speed, axis, "speedup over plain", f"Speedup by {axis}{note}", 1.0)
        plots[f"tokens_per_second_by_{axis}"] = line_plot(rate, axis, "tokens/s", f"Tokens/s by {axis}{note}")
    return plots


def _setting(name: str, value: Any) -> str:
    """One field of a point in a legend; heads and rules speak for themselves."""
    if name in ("head", "rule"):
        return str(value)
    return f"{name} {value:g}" if isinstance(value, (int, float)) else f"{name} {value}"
