"""One `log(numbers, step)` for all trackers: JSON lines in the run's folder always, others when the recipe asks."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decode.errors import UserError


class Tracker:
    """Writes `log.jsonl`, and to the accelerate trackers that were started. Only the main process logs."""

    def __init__(self, run: Path, accelerator: Any, first_step: int):
        self.accelerator = accelerator
        self.path = run / "log.jsonl"
        if accelerator.is_main_process:
            with self._writing():
                self._forget(first_step)
                self.file = self.path.open("a")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); free some space or change `output`"
            ) from error

    def _forget(self, first_step: int) -> None:
        """Drop lines that a killed run wrote behind the checkpoint from which this one goes on."""
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines()
        kept = [line for line in lines if _step(line) <= first_step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(self.path)

    def log(self, numbers: dict[str, Any], step: int) -> None:
        if not self.accelerator.is_main_process:
            return
        with self._writing():
            self.file.write(json.dumps({"step": step, **numbers}) + "\n")
            self.file.flush()
        self.accelerator.log(flatten(numbers), step=step)

    def close(self) -> None:
        if self.accelerator.is_main_process:
            self.file.close()
        self.accelerator.end_training()


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut short


def flatten(numbers: dict[str, Any]) -> dict[str, float]:
    """Lists become `name/0`, `name/1`, ...: trackers want scalars."""
    flat: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, list):
            flat |= {f"{name}/{index}": item for index, item in enumerate(value)}
        else:
            flat[name] = value
    return flat


def tracker_names(config: Any) -> list[str]:
    """The accelerate trackers that a recipe's tracking section asks for; a missing package is a UserError."""
    names = [name for name in ("wandb", "tensorboard", "trackio") if getattr(config, name)]
    for name in names:
        try:
            __import__(name)
        except ImportError:
            raise UserError(f"tracking.{name}: the package {name} is not installed; run: pip install {name}") from None
    if config.wandb and int(os.environ.get("RANK", "0")) == 0:  # the only process that logs
        require_login()
    return names


def require_login() -> None:
    """Raises UserError where wandb would ask for an account: it is neither logged in nor offline."""
    import wandb

    if os.environ.get("WANDB_MODE", "online") in ("online", "shared") and not (
        wandb.api.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    ):
        raise UserError("tracking.wandb: no account is logged in; run `wandb login`, or set WANDB_MODE=offline")
