"""What a head family must define. A family is one file in this folder; its file name is its name in recipes."""

import difflib
import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from decode.errors import UserError
from headtrain.target import Target


class HeadConfig(BaseModel):
    """The recipe section of a family, without `family` itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass
class Batch:
    """Rows of token ids, right padded, with what the target said about them."""

    input_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T]: 1 where the assistant produced the token
    features: Tensor  # [B, T, F]
    hidden: Tensor  # [B, T, H], after the final norm
    documents: tuple[int, ...] | None = None  # lengths of conversations packed into the one row; None: one a row

    def to(self, *args, **kwargs) -> "Batch":
        tensors = {name: getattr(self, name) for name in ("input_ids", "loss_mask", "features", "hidden")}
        return replace(self, **{name: x.to(*args, **kwargs) for name, x in tensors.items()})


@dataclass
class HeadLoss:
    """`total` in nats, summed over the trained tokens and draft depths; the trainer divides by `Head.tokens`."""

    total: Tensor  # scalar
    acceptance: Tensor  # [K]: sum over tokens of sum_v min(p, q) at each depth
    counts: Tensor  # [K]: tokens behind each sum


class Head(nn.Module, ABC):
    """A draft head: trainable module, loss, and drafting (the protocol of `decode.draft.Draft`)."""

    Config: ClassVar[Any]  # the family's HeadConfig
    config: Any
    target_layers: tuple[int, ...]  # boundaries that it reads, see decode.capture
    max_depth: int | None = None
    progress: float = 1.0  # share of the training that is done, told by the trainer; 1 outside of it
    shards: bool = True  # may its parameters be spread over processes?

    @property
    def vocabulary(self) -> Tensor | None:
        """[Vd] ascending target ids of the draft's columns; None: the target's own."""
        return None

    @classmethod
    @abstractmethod
    def build(cls, config: Any, target: Target, vocabulary: Tensor | None = None) -> "Head":
        """A fresh head for this target. `vocabulary`: draft ids from `choose_vocabulary`, for families that reduce it."""

    @classmethod
    @abstractmethod
    def restore(cls, config: Any, layers: list[int], target: Target, shapes: dict[str, tuple[int, ...]]) -> "Head":
        """A head whose tensors are about to be loaded; `shapes` are those of the saved tensors by name."""

    @classmethod
    def vocabulary_size(cls, config: Any) -> int | None:
        """How many tokens the draft vocabulary shall hold; None keeps the target's."""
        return None

    def packs(self) -> bool:
        """Whether `loss` keeps conversations apart that are packed into one row (`Batch.documents`)."""
        return False

    @abstractmethod
    def loss(self, batch: Batch, target: Target) -> HeadLoss: ...

    def tokens(self, loss_mask: Tensor) -> Tensor:
        """The divisor of `HeadLoss.total`: how many tokens of a batch are trained. `loss_mask` [B, T]."""
        return loss_mask[:, 2:].sum()

    def save_beside(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write into the head's folder what it adds to the target; nothing here. Floating tensors become `dtype`."""

    def merge(self, folder: Path) -> None:
        """Write a target with what the head adds to it built in, and a head for that target."""
        raise UserError("merge: this head leaves its target as it is; there is nothing to merge")

    @abstractmethod
    def begin(self, features, tokens, lengths, capacity): ...

    @abstractmethod
    def extend(self, state, tokens, parents): ...

    @abstractmethod
    def commit(self, state, features, tokens, counts): ...

    @abstractmethod
    def select(self, state, rows) -> None: ...


def families() -> list[str]:
    package = importlib.import_module("headtrain.heads")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "base")


def load_family(name: str) -> type[Head]:
    """The class of a family. Raises UserError with the nearest name for an unknown one."""
    if name not in families():
        near = difflib.get_close_matches(name, families(), n=1, cutoff=0)
        raise UserError(
            f"head.family: unknown family {name!r}; did you mean {near[0]!r}? (known: {', '.join(families())})"
        )
    module = importlib.import_module(f"headtrain.heads.{name}")
    (family,) = (
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Head) and item.__module__ == module.__name__
    )
    return family
