"""The Accelerate loop: micro-batches -> hidden states -> loss -> optimizer, with evaluation by real decoding.

Everything random in a step is drawn from (seed, step, rank), so a run that resumes from a checkpoint repeats the
losses of an unbroken one.
"""

import math
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from headtrain.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    require_same_head,
    save_checkpoint,
    save_head,
)
from headtrain.data import Dataset, batches, build_dataset
from headtrain.evaluate import held_out_loss, quick_acceptance
from headtrain.features import open_features
from headtrain.heads.base import Batch, Head, HeadLoss, load_family
from headtrain.progress import Progress
from headtrain.recipe import Recipe, TrainConfig
from headtrain.target import Target
from headtrain.tracking import Tracker, tracker_names
from headtrain.vocabulary import choose_vocabulary

MicroBatches = list[list[int]]  # one optimizer step of one rank: row numbers of each micro-batch


def train(recipe: Recipe) -> Path:
    """Train the recipe's head; returns the folder of the finished head. A run that was cut off goes on where it was."""
    run = Path(recipe.output)
    accelerator = make_accelerator(recipe, run)
    spec = recipe.target
    target = Target.load(spec.model, spec.dtype, spec.revision, spec.trust_remote_code, accelerator.device)
    dataset = build_dataset(recipe.data, target.tokenizer, progress=accelerator.is_main_process)
    torch.manual_seed(recipe.train.seed)
    head = build_head(recipe, target, dataset).to(accelerator.device)
    target.template_kwargs = dict(recipe.data.template_kwargs)
    return Trainer(recipe, run, accelerator, target, dataset, head).train()


def make_accelerator(recipe: Recipe, run: Path) -> Any:
    """One process or several, with the trackers that the recipe asks for."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration

    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / ".writable").touch()
        (run / ".writable").unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"output: cannot write into {run} ({error.strerror}); choose another folder") from error
    trackers = tracker_names(recipe.tracking)
    # Without a backend by name each process of a machine without GPU believes that it is alone.
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    accelerator = Accelerator(
        mixed_precision=recipe.train.precision,
        log_with=trackers or None,
        project_config=ProjectConfiguration(project_dir=str(run), logging_dir=str(run)),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if several and not torch.cuda.is_available() else [],
    )
    if trackers:
        options = {"wandb": {"name": recipe.tracking.name or run.name, "dir": str(run)}}
        accelerator.init_trackers(recipe.tracking.project, init_kwargs=options)
    return accelerator


def build_head(recipe: Recipe, target: Target, dataset: Dataset) -> Head:
    """A fresh head of the recipe's family, with a draft vocabulary chosen from the data where the family reduces it."""
    family = load_family(recipe.head.family)
    config: Any = recipe.head.config
    size = family.vocabulary_size(config)
    vocabulary = choose_vocabulary(dataset, size, target.vocab_size) if size else None
    return family.build(config, target, vocabulary)


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Of 1-based `step`: linear warm-up, then a decay that would reach zero one step behind the last."""
    warmup = round(config.warmup * num_steps) if config.warmup < 1 else int(config.warmup)
    if step <= warmup:
        return config.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(1, num_steps - warmup)
    share = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
    return config.learning_rate * share[config.decay]


class LossModule(torch.nn.Module):
    """The head with its loss as forward, so that a distributed wrapper sees each use of the parameters."""

    target: Target

    def __init__(self, head: Head, target: Target):
        super().__init__()
        self.head = head
        object.__setattr__(self, "target", target)  # frozen: not a part of what is trained, wrapped or saved

    def forward(self, batch: Batch) -> HeadLoss:
        return self.head.loss(batch, self.target)


class Trainer:
    """One run. `train` is the loop over steps, `step` one optimizer step."""

    def __init__(self, recipe: Recipe, run: Path, accelerator: Any, target: Target, dataset: Dataset, head: Head):
        self.recipe, self.run, self.accelerator = recipe, run, accelerator
        self.target, self.dataset, self.head = target, dataset, head
        config = recipe.train
        self.held_out = (
            build_dataset(recipe.data, target.tokenizer, "eval", progress=False) if recipe.data.eval else None
        )
        self.features = open_features(dataset, target, head.target_layers, recipe.data.cache)
        optimizer = torch.optim.AdamW(_parameter_groups(head, config), lr=config.learning_rate, betas=config.betas)
        self.model, self.optimizer = accelerator.prepare(LossModule(head, target), optimizer)
        self.steps_per_epoch = len(self._epoch(0))
        epochs = range(config.epochs or 0)
        self.num_steps = config.steps or sum(len(self._epoch(epoch)) for epoch in epochs)
        self.first_step = self._resume()
        self.tracker = Tracker(run, accelerator, self.first_step)

    def train(self) -> Path:
        config = self.recipe.train
        self.model.train()
        steps = islice(self._steps(), self.first_step, self.num_steps)
        window = Window()
        with Progress(self.accelerator.is_main_process, self.num_steps, self.first_step) as progress:
            for step, micro_batches in enumerate(steps, start=self.first_step + 1):
                self.step(step, micro_batches, window)
                if self._due(config.log_every, step):
                    numbers = self._summarise(step, window)
                    self.tracker.log(numbers, step)
                    progress.update(step, numbers)
                    window = Window()
                if self._due(self.recipe.eval.every, step) and (numbers := self._measure()):
                    self.tracker.log(numbers, step)
                    progress.note(step, numbers)
                    window.start = time.perf_counter()
                if self._due(config.save_every, step):
                    self._save(step)
        if self.accelerator.is_main_process:
            save_head(
                self.run / "head", self.head, self.recipe.head.family, self.target, self.recipe, self.target.dtype
            )
        self.accelerator.wait_for_everyone()
        self.tracker.close()  # ends the process group too
        return self.run / "head"

    def step(self, step: int, micro_batches: MicroBatches, window: "Window") -> None:
        """One optimizer step; the loss is the mean over the trained tokens of all micro-batches and ranks."""
        accelerator, config = self.accelerator, self.recipe.train
        torch.manual_seed(config.seed * 1_000_003 + step * accelerator.num_processes + accelerator.process_index)
        tokens = self._trained_tokens(micro_batches)
        for index, rows in enumerate(micro_batches):
            batch = self.features.batch(rows)
            waits = index < len(micro_batches) - 1
            with accelerator.no_sync(self.model) if waits else accelerator.accumulate(self.model):
                with accelerator.autocast():
                    out = self.model(batch)
                loss = out.total / tokens
                # A distributed wrapper averages gradients over ranks, but the mean over all tokens is their sum.
                accelerator.backward(loss * accelerator.num_processes)
            self._require_finite(loss, step, micro_batches)
            window.add(loss, out, batch)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), config.clip_norm or math.inf)
        if norm is not None:
            self._require_finite(norm, step, micro_batches)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step, self.num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        window.steps += 1

    def _trained_tokens(self, micro_batches: MicroBatches) -> Tensor:
        """Trained tokens of the whole step, all ranks together."""
        counts = torch.zeros((), device=self.accelerator.device)
        for rows in micro_batches:
            masks = [torch.from_numpy(self.dataset[row][1]) for row in rows]
            counts += sum(self.head.tokens(mask[None]) for mask in masks)
        return self.accelerator.reduce(counts).clamp(min=1)

    def _epoch(self, epoch: int) -> list[MicroBatches]:
        """This rank's micro-batches of an epoch, a list a step."""
        config, share = self.recipe.train, self.recipe.train.accumulation
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        rows = batches(self.dataset, config.batch_tokens, config.seed, epoch, rank, world, share)
        return [rows[i : i + share] for i in range(0, len(rows), share)]

    def _steps(self) -> Iterator[MicroBatches]:
        epoch = 0
        while True:
            yield from self._epoch(epoch)
            epoch += 1

    def _due(self, every: int | None, step: int) -> bool:
        return step == self.num_steps or (every is not None and step % every == 0)

    def _require_finite(self, value: Tensor, step: int, micro_batches: MicroBatches) -> None:
        if bool(torch.isfinite(value).all()):
            return
        named = list(self.head.named_parameters())
        tensors = named + [(f"the gradient of {name}", p.grad) for name, p in named if p.grad is not None]
        bad = next((name for name, x in tensors if not bool(x.isfinite().all())), "the loss")
        rows = [self.dataset.origins[row] for batch in micro_batches for row in batch]
        shown = ", ".join(rows[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
        raise UserError(
            f"train: {bad} is not finite at step {step} (rows {shown}); lower train.learning_rate or look at these rows;"
            " checkpoints saved so far are intact"
        )

    def _summarise(self, step: int, window: "Window") -> dict[str, Any]:
        """The numbers of a log line, over all ranks since the last one."""
        seconds = time.perf_counter() - window.start
        sums = self.accelerator.reduce(window.sums.to(self.accelerator.device)).tolist()
        loss, tokens, *rest = sums
        depth = len(rest) // 2
        return {
            "loss": loss / window.steps,
            "acceptance": [a / max(1, n) for a, n in zip(rest[:depth], rest[depth:], strict=True)],
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens_per_second": tokens / seconds,
            "epoch": round(step / self.steps_per_epoch, 3),
        }

    def _measure(self) -> dict[str, Any]:
        """Loss on held-out conversations and acceptance length on held-out prompts; empty where the recipe names none."""
        numbers: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            self.head.eval()
            if self.held_out is not None:
                with self.accelerator.autocast():
                    numbers |= held_out_loss(self.head, self.target, self.held_out, self.recipe.train.batch_tokens)
            if self.recipe.eval.prompts is not None:
                numbers |= quick_acceptance(self.head, self.target, self.recipe.eval)
            self.head.train()
        self.accelerator.wait_for_everyone()
        return numbers

    def _save(self, step: int) -> None:
        if self.accelerator.is_main_process:
            folder = self.run / "checkpoints" / f"step-{step:07d}"
            state = {"step": step, "num_steps": self.num_steps, "data": self.dataset.fingerprint}
            save_checkpoint(folder, self.head, self.recipe.head.family, self.target, self.recipe, self.optimizer, state)
            prune_checkpoints(self.run, self.recipe.train.keep)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> int:
        """Load the newest checkpoint of this run, if any; returns the steps done. Other data or length is an error."""
        found = list_checkpoints(self.run)
        if not found:
            return 0
        require_same_head(found[-1], self.head, self.recipe.head.family, self.target)
        state = load_checkpoint(found[-1], self.head, self.optimizer)
        if state["data"] != self.dataset.fingerprint or state["num_steps"] != self.num_steps:
            raise UserError(
                f"output: {found[-1]} is of a run with other data or length ({state['num_steps']} steps, now"
                f" {self.num_steps}); give its recipe again, or another `output`"
            )
        return state["step"]


class Window:
    """Sums since the last log line: loss, padded tokens, then acceptance and counts of each depth."""

    def __init__(self) -> None:
        self.sums = torch.zeros(())
        self.steps = 0
        self.start = time.perf_counter()

    def add(self, loss: Tensor, out: HeadLoss, batch: Batch) -> None:
        head = torch.stack([loss.detach(), loss.new_tensor(batch.input_ids.numel())])
        self.sums = self.sums.to(head.device) + torch.cat([head, out.acceptance.detach(), out.counts]).double()


def _parameter_groups(head: Head, config: TrainConfig) -> list[dict[str, Any]]:
    """Weight decay is for matrices; norms and biases go without."""
    trained = [p for p in head.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
