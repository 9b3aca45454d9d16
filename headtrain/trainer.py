"""The Accelerate loop: micro-batches → hidden states → loss → optimizer, with evaluation by real decoding.

Everything random in a step is drawn from (seed, step, rank), so a run that resumes from a checkpoint repeats the
losses of an unbroken one.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from decode.errors import UserError
from headtrain.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    save_head,
)
from headtrain.data import Dataset, batches, build_dataset
from headtrain.features import OnlineFeatures, trained_tokens
from headtrain.heads.base import Head, load_family
from headtrain.progress import Progress
from headtrain.recipe import Recipe, TrainConfig
from headtrain.target import Target
from headtrain.tracking import Tracker, tracker_names
from headtrain.vocabulary import choose_vocabulary


@dataclass
class Window:
    """Sums since the last log line."""

    loss: float = 0.0
    tokens: int = 0
    acceptance: Tensor | None = None
    counts: Tensor | None = None
    padded: int = 0
    start: float = field(default_factory=time.perf_counter)

    def add(self, loss: Tensor, acceptance: Tensor, counts: Tensor, tokens: int, padded: int) -> None:
        self.loss += float(loss)
        self.tokens += tokens
        self.padded += padded
        self.acceptance = acceptance if self.acceptance is None else self.acceptance + acceptance
        self.counts = counts if self.counts is None else self.counts + counts


def train(recipe: Recipe) -> Path:
    """Train the recipe's head; returns the folder of the finished head. A run that was cut off goes on where it was."""
    run = Path(recipe.output)
    accelerator = make_accelerator(recipe, run)
    spec = recipe.target
    target = Target.load(spec.model, spec.dtype, spec.revision, spec.trust_remote_code, accelerator.device)
    with accelerator.main_process_first():
        dataset = build_dataset(recipe.data, target.tokenizer, progress=accelerator.is_main_process)
    torch.manual_seed(recipe.train.seed)
    head = build_head(recipe, target, dataset).to(accelerator.device)
    return Trainer(recipe, run, accelerator, target, dataset, head).train()


def make_accelerator(recipe: Recipe, run: Path):
    """One process or several; the backend is named where there is no accelerator, else each process believes it is alone."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration

    trackers = tracker_names(recipe.tracking)
    handlers = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(
        mixed_precision=recipe.train.precision,
        gradient_accumulation_steps=1,  # the trainer accumulates: it must know the tokens of the whole step
        log_with=trackers or None,
        project_config=ProjectConfiguration(project_dir=str(run), logging_dir=str(run)),
        kwargs_handlers=handlers,
    )
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / ".writable").touch()
        (run / ".writable").unlink()
    except OSError as error:
        raise UserError(f"output: cannot write into {run} ({error.strerror}); choose another folder") from error
    if trackers:
        name = recipe.tracking.name or run.name
        accelerator.init_trackers(recipe.tracking.project, init_kwargs={"wandb": {"name": name, "dir": str(run)}})
    return accelerator


def build_head(recipe: Recipe, target: Target, dataset: Dataset) -> Head:
    family = load_family(recipe.head.family)
    size = family.vocabulary_size(recipe.head.config)
    vocabulary = choose_vocabulary(dataset, size, target.vocab_size) if size else None
    return family.build(recipe.head.config, target, vocabulary)


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Of 0-based `step`: linear warm-up, then the decay that ends at zero behind the last step."""
    warmup = round(config.warmup * num_steps) if config.warmup < 1 else int(config.warmup)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    share = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
    return config.learning_rate * share[config.decay]


class Trainer:
    """One run. `train` is the loop, `step` one optimizer step."""

    def __init__(self, recipe: Recipe, run: Path, accelerator, target: Target, dataset: Dataset, head: Head):
        self.recipe, self.run, self.accelerator = recipe, run, accelerator
        self.target, self.dataset, self.head = target, dataset, head
        config = recipe.train
        matrices = [p for p in head.parameters() if p.requires_grad and p.ndim > 1]
        vectors = [p for p in head.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
        self.model, self.optimizer = accelerator.prepare(LossModule(head, target), optimizer)
        self.features = OnlineFeatures(dataset, target, head.target_layers)
        self.num_steps = config.steps or sum(len(self._epoch(epoch)) for epoch in range(config.epochs or 1)) // config.accumulation
        self.first_step = self._resume()
        self.tracker = Tracker(run, accelerator, self.first_step)

    def train(self) -> Path:
        config = self.recipe.train
        self.model.train()
        window = Window()
        steps = islice(self._steps(), self.first_step, self.num_steps)
        with Progress(self.accelerator.is_main_process, self.num_steps, self.first_step) as progress:
            for step, micro_batches in enumerate(steps, start=self.first_step + 1):
                self.step(step, micro_batches, window)
                if step % config.log_every == 0 or step == self.num_steps:
                    numbers = self._summarise(window, step)
                    self.tracker.log(numbers, step)
                    progress.update(step, numbers)
                    window = Window()
                if self._due(self.recipe.eval.every, step):
                    numbers = self._measure()
                    self.tracker.log(numbers, step)
                    progress.note(step, numbers)
                    window.start = time.perf_counter()
                if self._due(config.save_every, step):
                    self._save(step)
        self.tracker.close()
        folder = self.run / "head"
        if self.accelerator.is_main_process:
            save_head(folder, self.head, self.recipe.head.family, self.target, self.recipe, self.target.dtype)
        return folder

    def step(self, step: int, micro_batches: list[list[int]], window: Window) -> None:
        """One optimizer step over this rank's micro-batches; the loss is the mean over the trained tokens of all ranks."""
        world = self.accelerator.num_processes
        torch.manual_seed(hash((self.recipe.train.seed, step, self.accelerator.process_index)) % 2**63)
        counts = torch.stack([self.head.tokens(trained_tokens(self.dataset, rows)) for rows in micro_batches]).sum()
        tokens = self.accelerator.reduce(counts.to(self.accelerator.device)).clamp(min=1)
        for index, rows in enumerate(micro_batches):
            batch = self.features.batch(rows)
            last = index == len(micro_batches) - 1
            with self.accelerator.no_sync(self.model) if not last else self.accelerator.accumulate(self.model):
                out = self.model(batch)
                loss = out.total / tokens
                # DDP averages gradients over the ranks; the sum over ranks is what the mean over all tokens needs
                self.accelerator.backward(loss * world)
            self._require_finite(loss, step, micro_batches)
            window.add(loss.detach(), out.acceptance, out.counts, 0, batch.input_ids.numel())
        window.tokens += int(tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe.train, step - 1, self.num_steps)
        clip = self.recipe.train.clip_norm
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip if clip is not None else math.inf)
        if norm is not None:
            self._require_finite(norm, step, micro_batches)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _epoch(self, epoch: int) -> list[list[int]]:
        config = self.recipe.train
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return batches(self.dataset, config.batch_tokens, config.seed, epoch, rank, world, config.accumulation)

    def _steps(self) -> Iterator[list[list[int]]]:
        """This rank's micro-batches of every step, epoch after epoch without end."""
        epoch = 0
        while True:
            micro_batches = self._epoch(epoch)
            share = self.recipe.train.accumulation
            yield from (micro_batches[i : i + share] for i in range(0, len(micro_batches), share))
            epoch += 1

    def _due(self, every: int | None, step: int) -> bool:
        return step == self.num_steps or (every is not None and step % every == 0)

    def _require_finite(self, value: Tensor, step: int, micro_batches: list[list[int]]) -> None:
        if bool(torch.isfinite(value).all()):
            return
        named = self.head.named_parameters()
        bad = next((name for name, p in named if p.grad is not None and not bool(p.grad.isfinite().all())), "loss")
        rows = [self.dataset.origins[row] for batch in micro_batches for row in batch]
        shown = ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
        raise UserError(
            f"step {step}: {bad} is not finite (rows {shown}); lower train.learning_rate or look at these rows;"
            " the last checkpoint is intact"
        )

    def _summarise(self, window: Window, step: int) -> dict:
        """Numbers of the log line; the sums are over all ranks."""
        assert window.acceptance is not None and window.counts is not None
        device = self.accelerator.device
        sums = torch.cat([torch.tensor([window.loss, float(window.padded)], device=device), window.acceptance, window.counts])
        sums = self.accelerator.reduce(sums).tolist()
        depth = len(window.acceptance)
        acceptance, counts = sums[2 : 2 + depth], sums[2 + depth :]
        seconds = time.perf_counter() - window.start
        return {
            "loss": sums[0] / max(1, self._logged_steps(step)),
            "acceptance": [a / max(1, c) for a, c in zip(acceptance, counts, strict=True)],
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens_per_second": sums[1] / seconds,
            "trained_tokens": window.tokens,
            "epoch": self._epoch_of(step),
        }

    def _logged_steps(self, step: int) -> int:
        every = self.recipe.train.log_every
        start = max(self.first_step, (step - 1) // every * every)
        return step - start

    def _epoch_of(self, step: int) -> float:
        per_epoch = max(1, len(self._first_epoch) // self.recipe.train.accumulation)
        return round(step / per_epoch, 3)

    def _measure(self) -> dict:
        """Acceptance length by decoding held-out prompts with the head as it is."""
        from headtrain.evaluate import quick_acceptance

        numbers: dict = {}
        if self.recipe.eval.prompts is not None and self.accelerator.is_main_process:
            self.head.eval()
            numbers = quick_acceptance(self.head, self.target, self.recipe.eval)
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
        """Load the newest checkpoint of this run, if any; returns the steps done. A changed recipe or data is an error."""
        found = list_checkpoints(self.run)
        if not found:
            return 0
        state = load_checkpoint(found[-1], self.head, self.optimizer)
        if state["data"] != self.dataset.fingerprint or state["num_steps"] != self.num_steps:
            raise UserError(
                f"{found[-1]}: was saved by a run of other data or length ({state['num_steps']} steps, now"
                f" {self.num_steps}); give the old recipe, or another `output`"
            )
        return state["step"]


class LossModule(torch.nn.Module):
    """The head with its loss as forward, so that a distributed wrapper sees each use of the parameters."""

    def __init__(self, head: Head, target: Target):
        super().__init__()
        self.head = head
        object.__setattr__(self, "target", target)

    def forward(self, batch):
        return self.head.loss(batch, self.target)
