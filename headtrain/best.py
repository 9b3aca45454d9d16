"""Which checkpoint of a run to publish: the one that measured the greatest acceptance length by decoding for real.

The loss goes on falling long after the acceptance length has turned (deepseek-ai/DeepSpec#84), so it does not choose.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decode.errors import UserError
from headtrain.checkpoint import write_folder

FIGURE = "acceptance_length"
CHOSEN = "best.json"


@dataclass
class Best:
    """The evaluations so far: the step that won, its acceptance length, and how many have passed since."""

    step: int | None = None
    acceptance_length: float | None = None
    misses: int = 0
    evaluations: int = 0

    def judge(self, step: int, acceptance_length: float) -> bool:
        """Count an evaluation; True where it is the best so far. The earlier of two equals stays the best."""
        self.evaluations += 1
        record = -math.inf if self.acceptance_length is None else self.acceptance_length
        if acceptance_length > record:
            self.step, self.acceptance_length, self.misses = step, acceptance_length, 0
            return True
        self.misses += 1
        return False

    def exhausted(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row brought nothing better."""
        return patience is not None and self.misses >= patience

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; `Best(**state)` goes on from there."""
        return asdict(self)


def save_best(folder: Path, best: Best, fill: Callable[[Path], None]) -> None:
    """Put the head that `fill` writes into the place of an earlier best one, with the step and its figure beside it."""

    def complete(staging: Path) -> None:
        fill(staging)
        chosen = {"step": best.step, FIGURE: best.acceptance_length}
        (staging / CHOSEN).write_text(json.dumps(chosen, indent=2) + "\n")

    write_folder(folder, complete)


def read_best(folder: Path) -> tuple[int, float]:
    """Step and acceptance length of a saved best head. Raises UserError where there is none."""
    try:
        chosen = json.loads((folder / CHOSEN).read_text())
        return int(chosen["step"]), float(chosen[FIGURE])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}: the best head of this run is missing or damaged; give eval.choose=last, or another `output`"
        ) from error


def resume_best(folder: Path, state: dict[str, Any], saved: bool) -> Best:
    """The evaluations that a checkpoint knew of; `saved` says that the run keeps the best head.

    A run killed behind its checkpoint may have left a later best head there. It stays until the repeated steps win
    again: it beat all that the checkpoint knew of.
    """
    best = Best(**state)
    if best.step is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif saved:
        read_best(folder)
    return best


def publish_best(best: Path, folder: Path) -> tuple[int, float]:
    """Copy the best head to `folder`; returns its step and acceptance length."""
    chosen = read_best(best)

    def copy(staging: Path) -> None:
        shutil.copytree(best, staging, dirs_exist_ok=True)

    write_folder(folder, copy)
    return chosen
