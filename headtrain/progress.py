"""What a long run shows: a live bar on a terminal, a line per log step elsewhere."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Context manager; does nothing where `show` is false."""

    def __init__(self, show: bool, num_steps: int, first_step: int, title: str = "training", unit: str = "step"):
        self.show, self.num_steps, self.first_step, self.unit = show, num_steps, first_step, unit
        self.console = Console(file=sys.stderr)
        self.live = show and self.console.is_terminal
        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.bar = Bar(*columns, console=self.console, disable=not self.live)
        self.task = self.bar.add_task("", total=num_steps, completed=first_step)
        self.start = time.perf_counter()

    def __enter__(self) -> "Progress":
        self.bar.start()
        if self.show and self.first_step:
            self.console.print(f"resumed behind {self.unit} {self.first_step} of {self.num_steps}")
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def update(self, step: int, numbers: dict[str, Any]) -> None:
        acceptance = " ".join(f"{value:.3f}" for value in numbers["acceptance"])
        text = f"loss {numbers['loss']:.3f}  acceptance {acceptance}  {numbers['tokens_per_second']:.0f} tokens/s"
        self.advance(step, text)

    def advance(self, step: int, text: str) -> None:
        self.bar.update(self.task, completed=step, description=text)
        if self.show and not self.live:
            left = (time.perf_counter() - self.start) / max(1, step - self.first_step) * (self.num_steps - step)
            line = f"{self.unit} {step}/{self.num_steps}  {text}  {left / 60:.1f} min left"
            print(line, file=sys.stderr, flush=True)

    def describe(self, text: str) -> None:
        """Between two steps."""
        self.bar.update(self.task, description=text)

    def note(self, step: int, numbers: dict[str, Any]) -> None:
        text = "  ".join(f"{name} {value:.3f}" for name, value in numbers.items() if isinstance(value, float))
        self.say(f"step {step}  measured: {text}")

    def say(self, text: str) -> None:
        if self.show:
            self.console.print(text, soft_wrap=True)
