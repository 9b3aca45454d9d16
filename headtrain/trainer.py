"""The Accelerate loop: micro-batches -> hidden states -> loss -> optimizer, with evaluation by real decoding.

Everything random is drawn from the seed and the number of the micro-batch within the run, so a run that resumes from
a checkpoint repeats the losses of an unbroken one, and the number of processes changes nothing as long as
processes x accumulation stays the same.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from headtrain.best import FIGURE, publish_best, resume_best, save_best
from headtrain.checkpoint import (
    fill_head,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    recover_folders,
    require_same_head,
    save_checkpoint,
    write_folder,
)
from headtrain.curves import draw_curves
from headtrain.data import Dataset, batches, build_dataset
from headtrain.evaluate import held_out_loss, quick_acceptance
from headtrain.features import open_features
from headtrain.heads.base import Batch, Head, HeadLoss, load_family
from headtrain.processes import make_accelerator, require_shared
from headtrain.progress import Progress
from headtrain.recipe import Recipe, TrainConfig
from headtrain.sharded import Whole, is_sharded
from headtrain.target import Target
from headtrain.tracking import Tracker
from headtrain.vocabulary import choose_vocabulary

MicroBatches = list[list[int]]  # one optimizer step of one rank: row numbers of each micro-batch


def train(recipe: Recipe) -> Path:
    """Train the recipe's head; returns the folder of the finished head. A run that was cut off goes on where it was."""
    return prepare(recipe).train()


def prepare(recipe: Recipe, dataset: Dataset | None = None) -> "Trainer":
    """The run behind its last checkpoint; its output folder is made. `dataset`: the recipe's, where it is at hand."""
    run = Path(recipe.output)
    accelerator = make_accelerator(recipe, run)
    spec = recipe.target
    if spec.device_map and accelerator.num_processes > 1:
        raise UserError(
            f"target.device_map: {spec.device_map} gives all devices to each of {accelerator.num_processes} processes;"
            " launch one, or set it to null"
        )
    options = (spec.revision, spec.trust_remote_code, accelerator.device, spec.device_map)
    target = Target.load(spec.model, spec.dtype, *options)
    dataset = dataset or build_dataset(recipe.data, target.tokenizer, progress=accelerator.is_main_process)
    torch.manual_seed(recipe.train.seed)
    head = build_head(recipe, target, dataset).to(accelerator.device)
    target.template_kwargs = dict(recipe.data.template_kwargs)
    return Trainer(recipe, run, accelerator, target, dataset, head)


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

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of HeadLoss: FSDP2 finds tensors in tuples only."""
        out = self.head.loss(batch, self.target)
        return out.total, out.acceptance, out.counts


class Trainer:
    """One run. `train` is the loop over steps, `step` one optimizer step."""

    def __init__(self, recipe: Recipe, run: Path, accelerator: Any, target: Target, dataset: Dataset, head: Head):
        self.recipe, self.run, self.accelerator = recipe, run, accelerator
        self.target, self.dataset, self.head = target, dataset, head
        config = recipe.train
        self.held_out = (
            build_dataset(recipe.data, target.tokenizer, "eval", progress=False) if recipe.data.eval else None
        )
        if recipe.data.pack and not head.packs():
            raise UserError(
                f"data.pack: {recipe.head.family} with these settings cannot keep packed conversations apart; set"
                " data.pack=false"
            )
        data = recipe.data
        self.features = open_features(dataset, target, head.target_layers, data.cache, data.pack, data.cache_dtype)
        if accelerator.is_main_process:
            recover_folders(run)
            recover_folders(run / "checkpoints")
        accelerator.wait_for_everyone()
        if is_sharded(accelerator) and not head.shards:
            raise UserError(
                "head.family: this one adapts the target, which must be whole; launch with DDP or one process"
            )
        groups = partial(_parameter_groups, config=config)
        self.shards = Whole(head, target, groups, config.betas) if is_sharded(accelerator) else None
        self.whole_head = self.shards.head if self.shards else head  # what is measured and saved
        optimizer = torch.optim.AdamW(_parameter_groups(head, config), lr=config.learning_rate, betas=config.betas)
        self.model, self.optimizer = accelerator.prepare(LossModule(head, target), optimizer)
        self.steps_per_epoch = len(self._epoch(0))
        epochs = range(config.epochs or 0)
        self.num_steps = config.steps or sum(len(self._epoch(epoch)) for epoch in epochs)
        self.chooses = recipe.eval.prompts is not None and recipe.eval.choose != "last"
        self.window = Window()
        self.first_step, best = self._resume()
        self.best = resume_best(run / "best", best, self.chooses)
        self.tracker = Tracker(run, accelerator, self.first_step)

    def train(self) -> Path:
        config = self.recipe.train
        self.model.train()
        stopped = self.best.exhausted(self.recipe.eval.patience)  # this run ended early before, and is only published
        steps = islice(self.steps(), self.first_step, self.first_step if stopped else self.num_steps)
        window = self.window
        with Progress(self.accelerator.is_main_process, self.num_steps, self.first_step) as progress:
            for step, micro_batches in enumerate(steps, start=self.first_step + 1):
                self.step(step, micro_batches, window)
                if self._due(config.log_every, step):
                    numbers = self._summarise(step, window)
                    self.tracker.log(numbers, step)
                    progress.update(step, numbers)
                    window = Window()
                if self._due(self.recipe.eval.every, step):
                    before = time.perf_counter()
                    if numbers := self._measure(step):
                        self.tracker.log(numbers, step)
                        progress.note(step, numbers)
                    stopped = self._is_exhausted()
                    window.start += time.perf_counter() - before
                if self._due(config.save_every, step) or stopped:
                    self._save(step, window)
                if stopped:
                    break
            self._assemble()
            if self.accelerator.is_main_process:
                self._publish(progress)
        self.accelerator.wait_for_everyone()
        self.tracker.close()  # ends the process group too
        return self.run / "head"

    def step(self, step: int, micro_batches: MicroBatches, window: "Window") -> None:
        """One optimizer step; the loss is the mean over the trained tokens of all micro-batches and ranks."""
        accelerator, config = self.accelerator, self.recipe.train
        world, rank = accelerator.num_processes, accelerator.process_index
        tokens = self._trained_tokens(micro_batches)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step, self.num_steps)
        self.head.progress = step / self.num_steps
        for index, rows in enumerate(micro_batches):
            torch.manual_seed(config.seed * 1_000_003 + (step * len(micro_batches) + index) * world + rank)
            batch = self.features.batch(rows)
            last = index == len(micro_batches) - 1
            accelerator.sync_gradients = last  # DeepSpeed takes the step behind the last one
            with nullcontext() if last else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    out = HeadLoss(*self.model(batch))
                loss = out.total / tokens
                if self.shards:  # the step may be taken in the backward pass
                    self._require_finite(loss, step, micro_batches)
                # A distributed wrapper averages gradients over ranks, but the mean over all tokens is their sum.
                accelerator.backward(loss * world)
            self._require_finite(loss, step, micro_batches)
            window.add(loss, out, batch)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), config.clip_norm or math.inf)
        if norm is not None:
            self._require_finite(torch.as_tensor(norm), step, micro_batches)
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
        rows = batches(self.dataset, config.batch_tokens, config.seed, epoch, rank, world, share, self.recipe.data.pack)
        return [rows[i : i + share] for i in range(0, len(rows), share)]

    def steps(self) -> Iterator[MicroBatches]:
        """This rank's micro-batches of every step, without an end."""
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

    def _measure(self, step: int) -> dict[str, Any]:
        """Loss on held-out conversations and acceptance length on held-out prompts; empty where the recipe names none.

        Keeps the head where no earlier one had so great an acceptance length.
        """
        numbers: dict[str, Any] = {}
        self._assemble()
        if self.accelerator.is_main_process:
            head = self.whole_head.to(self.accelerator.device).eval()
            if self.held_out is not None:
                with self.accelerator.autocast():
                    numbers |= held_out_loss(head, self.target, self.held_out, self.recipe.train.batch_tokens)
            if self.recipe.eval.prompts is not None:
                numbers |= quick_acceptance(head, self.target, self.recipe.eval)
                if self.best.judge(step, numbers[FIGURE]) and self.chooses:
                    save_best(self.run / "best", self.best, self._fill_head)
                numbers |= {"best_step": self.best.step, f"best_{FIGURE}": self.best.acceptance_length}
            head.train()
            if self.shards:
                head.to("cpu")
        self.accelerator.wait_for_everyone()
        return numbers

    def _is_exhausted(self) -> bool:
        """Whether patience is at its end; only the main process has measured, but all must agree."""
        patience = self.recipe.eval.patience
        if patience is None:
            return False
        own = self.accelerator.is_main_process and self.best.exhausted(patience)
        return bool(self.accelerator.reduce(torch.tensor(float(own), device=self.accelerator.device)))

    def _fill_head(self, folder: Path) -> None:
        fill_head(folder, self.whole_head, self.recipe.head.family, self.target, self.recipe, self.target.dtype)

    def _publish(self, progress: Progress) -> None:
        """Write the run's `head` folder, from the best evaluation or the last step, and say which it is."""
        if self.chooses and self.best.step is not None:
            step, figure = publish_best(self.run / "best", self.run / "head")
            progress.say(
                f"head: of step {step}, acceptance length {figure:.3f}, the best of {self.best.evaluations} evaluations"
            )
        else:
            write_folder(self.run / "head", self._fill_head)
        draw_curves(self.run)

    def _assemble(self, moments: bool = False) -> None:
        """Put the head in `whole_head` together where ranks hold parts of it; all of them call this."""
        if self.shards:
            self.shards.gather(self.accelerator, self.head, self.optimizer, moments)

    def _schedule(self) -> dict[str, Any]:
        """What the order of the rows depends on, besides the data."""
        config = self.recipe.train
        return {
            "num_steps": self.num_steps,
            "micro_batches": self.accelerator.num_processes * config.accumulation,
            "batch_tokens": config.batch_tokens,
            "seed": config.seed,
            "pack": self.recipe.data.pack,
        }

    def _save(self, step: int, window: "Window") -> None:
        self._assemble(moments=True)
        sums = self.accelerator.reduce(window.sums.to(self.accelerator.device)).tolist()
        if self.accelerator.is_main_process:
            folder = self.run / "checkpoints" / f"step-{step:07d}"
            state = {"step": step, "data": self.dataset.fingerprint, **self._schedule(), "best": self.best.state()}
            state["window"] = {"sums": sums, "steps": window.steps, "seconds": time.perf_counter() - window.start}
            optimizer = self.shards.optimizer if self.shards else self.optimizer
            family = self.recipe.head.family
            save_checkpoint(folder, self.whole_head, family, self.target, self.recipe, optimizer, state)
            prune_checkpoints(self.run, self.recipe.train.keep)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> tuple[int, dict[str, Any]]:
        """Load the newest checkpoint of this run, if any; returns the steps done and the state of the evaluations.

        Other data, or another order of it, is an error.
        """
        found = list_checkpoints(self.run)
        require_shared(self.accelerator, "checkpoints", int(found[-1].name[5:]) if found else 0)
        if not found:
            return 0, {}
        require_same_head(found[-1], self.whole_head, self.recipe.head.family, self.target)
        state = load_checkpoint(found[-1], self.whole_head, self.shards.optimizer if self.shards else self.optimizer)
        if state["data"] != self.dataset.fingerprint:
            raise UserError(
                f"output: {found[-1]} is of a run with other data; give its recipe again, or another `output`"
            )
        for key, value in self._schedule().items():
            if state.get(key, value) != value:
                name = {"num_steps": "steps in all", "micro_batches": "micro-batches a step (processes x accumulation)"}
                raise UserError(
                    f"output: {found[-1]} is of a run with {state[key]} {name.get(key, key)}, now {value}; give its"
                    " recipe and number of processes again, or another `output`"
                )
        if self.shards:
            self.shards.scatter(self.accelerator, self.model, self.head, self.optimizer, self.features.batch([0]))
        if "window" in state:
            self.window = Window.restore(**state["window"], counts=self.accelerator.is_main_process)
        return state["step"], state.get("best", {})


class Window:
    """Sums since the last log line: loss, padded tokens, then acceptance and counts of each depth."""

    def __init__(self) -> None:
        self.sums = torch.zeros(())
        self.steps = 0
        self.start = time.perf_counter()

    @classmethod
    def restore(cls, sums: Any, steps: int, seconds: float, counts: bool) -> "Window":
        """One that a checkpoint kept; its sums are of all ranks, so only one of them `counts` them again."""
        window = cls()
        window.sums = torch.tensor(sums, dtype=torch.float64) * counts
        window.steps, window.start = steps, window.start - seconds
        return window

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
