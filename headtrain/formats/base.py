"""What a public layout of draft heads must define. A layout is one file in this folder that defines `FORMAT`."""

import difflib
import importlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from decode.errors import UserError
from headtrain.target import Target

# More specific layouts first: the first that recognises a checkpoint names it.
NAMES = (
    "speculators",
    "modelopt",
    "sglang",
    "specforge",
    "eagle3",
    "eagle1",
    "vllm-medusa",
    "medusa",
    "hydra",
    "dflash",
)


@dataclass
class Checkpoint:
    """A head in a public layout: the content of its config.json and its tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    where: Path = Path()
    warnings: list[str] = field(default_factory=list)
    """What the user should know of this conversion, a line each."""


@dataclass
class Portable:
    """A head of ours as data: its family, the settings and boundaries of config.json, and its state dict."""

    family: str
    settings: dict[str, Any]
    layers: list[int]
    tensors: dict[str, Tensor]


class Format(ABC):
    """One public layout. Converts between its conventions and ours; names and shapes are checked by the caller."""

    name: ClassVar[str]
    families: ClassVar[tuple[str, ...]]
    """Families of heads that the layout can hold."""
    weights: ClassVar[str] = "model.safetensors"
    """File of the tensors in an export."""

    @abstractmethod
    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        """Whether tensors of these names with this config are in this layout."""

    @abstractmethod
    def rename(self, name: str, settings: dict[str, Any]) -> str:
        """The layout's name of one of our tensors, in a head of these settings."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        """Settings and boundaries from keys and config; tensors in our conventions but still under the layout's names.

        Raises UserError for what our families cannot represent and for a config that contradicts the tensors.
        """

    def check(self, head: Portable, num_layers: int) -> None:  # noqa: B027 - most layouts have no such limit
        """Raises UserError with the reason for settings and boundaries that the layout cannot express.

        Looks at no tensor and no more of the target than its depth, so a card can ask without both.
        """

    @abstractmethod
    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        """A head that passed `check` in this layout, its tensors already renamed.

        `embedding`: save the target's embedding with it. Raises UserError for what only tensors and target tell.
        """

    def target_name(self, config: dict[str, Any]) -> str | None:
        """The target that the config names."""
        return None


def load_format(name: str) -> Format:
    """The layout of this name. Raises UserError with the nearest name for an unknown one."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0)
        raise UserError(f"--format: unknown format {name!r}; did you mean {near[0]!r}? (known: {', '.join(NAMES)})")
    return importlib.import_module(f"headtrain.formats.{name.replace('-', '_')}").FORMAT


def detect(names: set[str], config: dict[str, Any], where: Path) -> Format:
    """The layout of a checkpoint, from the names of its tensors and its config."""
    for name in NAMES:
        layout = load_format(name)
        if layout.matches(names, config):
            return layout
    some = ", ".join(sorted(names)[:4])
    raise UserError(f"{where}: its layout is unknown (tensors such as {some}); known: {', '.join(NAMES)}")


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]], where: Path) -> None:
    """Raises UserError that lists every missing, unexpected and misshaped tensor. `expected`: shapes by name."""
    problems = [f"missing {name} {list(expected[name])}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & tensors.keys())
        if tuple(tensors[name].shape) != expected[name]
    ]
    if problems:
        raise UserError(f"{where}: {'; '.join(problems)}; is it whole, and of this target?")


def require(condition: bool, where: Path | str, reason: str) -> None:
    """Raises UserError unless the condition holds."""
    if not condition:
        raise UserError(f"{where}: {reason}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: is not readable JSON ({' '.join(str(error).split())}); copy it again") from error
    require(isinstance(config, dict), path, "is no JSON object; copy it again")
    return config
