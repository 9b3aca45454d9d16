"""What a run will need: memory and time, from a few of its own steps on this device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Event, Thread

import torch
from torch import Tensor

from headtrain.data import Dataset, places
from headtrain.features import MANIFEST, bytes_per_token
from headtrain.recipe import Recipe, TrackingConfig
from headtrain.trainer import MicroBatches, Trainer, Window, prepare

SAMPLING = 0.005  # seconds between two looks at the memory of the process


@dataclass(frozen=True)
class Estimate:
    """Of one device. Memory in bytes."""

    device: str
    measured: int
    """Steps that were timed."""
    steps: int
    """Of the whole run."""
    target_parameters: int
    trained_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """The rest of the most that the steps took: hidden states, activations, chunks of logits."""
    cache: int
    """On disk, where `headtrain cache` writes all hidden states."""
    tokens_per_second: float
    """Padding included."""
    seconds: float
    """Of all steps, without evaluations."""

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def measure_run(recipe: Recipe, dataset: Dataset, steps: int) -> Estimate:
    """Takes a step to warm up and `steps` that count, of a run in a temporary folder, and extends them to all.

    Hidden states come from the recipe's cache if it is there, else from the target.
    """
    cache = recipe.data.cache
    cached = cache is not None and (Path(cache) / MANIFEST).exists()
    data = recipe.data.model_copy(update={"eval": None, "cache": cache if cached else None})
    with tempfile.TemporaryDirectory(prefix="headtrain-") as folder:
        changed = {"output": folder, "data": data, "tracking": TrackingConfig()}
        trainer = prepare(recipe.model_copy(update=changed), dataset)
        trainer.model.train()
        plan = list(islice(trainer.steps(), trainer.num_steps))
        with PeakMemory(trainer.target.device) as memory:
            taken, seconds = _time(trainer, plan[: steps + 1])
        trainer.tracker.close()
    head, target, pack = trainer.head, trainer.target, recipe.data.pack
    trained = [p for p in head.parameters() if p.requires_grad]
    moments = [x for state in trainer.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    gradients, optimizer = _bytes(trained), _bytes(moments)
    tokens = _places(dataset, taken, pack)
    return Estimate(
        device=str(target.device),
        measured=len(taken),
        steps=len(plan),
        target_parameters=sum(p.numel() for p in target.model.parameters()),
        trained_parameters=sum(p.numel() for p in trained),
        weights=_bytes(set(target.model.parameters()) | set(head.parameters())),
        gradients=gradients,
        optimizer=optimizer,
        activations=max(0, memory.bytes - gradients - optimizer),
        cache=bytes_per_token(target, head.target_layers, recipe.data.cache_dtype) * len(dataset.ids),
        tokens_per_second=tokens / seconds,
        seconds=_places(dataset, plan, pack) * seconds / tokens,
    )


def _time(trainer: Trainer, plan: list[MicroBatches]) -> tuple[list[MicroBatches], float]:
    """Takes the steps; returns those behind the first, which is slower, or that one where it is alone, and seconds."""
    seconds = []
    for step, micro_batches in enumerate(plan, start=1):
        start = time.perf_counter()
        trainer.step(step, micro_batches, Window())
        if trainer.target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return (plan[1:], sum(seconds[1:])) if len(plan) > 1 else (plan, sum(seconds))


def _places(dataset: Dataset, steps: list[MicroBatches], pack: bool) -> int:
    return sum(places(dataset, rows, pack) for micro_batches in steps for rows in micro_batches)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class PeakMemory:
    """The most memory taken while entered, above what was taken before: of the GPU, or of the process."""

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, 0

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        else:
            import psutil

            self.process, self.over = psutil.Process(), Event()
            self.before = self.process.memory_info().rss
            self.watcher = Thread(target=self._watch, daemon=True)
            self.watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self.before
        else:
            self.over.set()
            self.watcher.join()

    def _watch(self) -> None:
        while not self.over.wait(SAMPLING):
            self.bytes = max(self.bytes, self.process.memory_info().rss - self.before)
