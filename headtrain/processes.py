"""The processes of a run: one Accelerator for one device, data parallel, ZeRO-1/2/3 or FSDP2, on GPUs or on CPUs."""

import os
from pathlib import Path
from typing import Any

import torch

from decode.errors import UserError, one_line
from decode.linear import prefers_float32
from headtrain.recipe import Recipe
from headtrain.tracking import tracker_names


def make_accelerator(recipe: Recipe, run: Path) -> Any:
    """One process or several, as the launcher asked, with the trackers that the recipe asks for.

    Raises UserError where the processes do not form the group that the launcher asked for.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration

    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / ".writable").touch()
        (run / ".writable").unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"output: cannot write into {run} ({error.strerror}); choose another folder") from error
    use_cores()
    trackers = tracker_names(recipe.tracking)
    # On a machine without GPU accelerate joins no group unless told the backend, and wraps no model unless told `cpu`;
    # DeepSpeed in turn is left out where it is told `cpu`.
    on_cpu = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    try:
        accelerator = Accelerator(
            cpu=on_cpu and not _asked("DEEPSPEED"),
            mixed_precision=choose_precision(recipe.train.precision),
            log_with=trackers or None,
            project_config=ProjectConfiguration(project_dir=str(run), logging_dir=str(run)),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu else [],
        )
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"launcher: {_processes()} cannot form a group ({one_line(error)}); look at the `accelerate launch` options"
        ) from error
    if _asked("FSDP") and on_cpu:
        _shard_on_cpu(accelerator)
    require_world(accelerator)
    if accelerator.distributed_type.value == "DEEPSPEED":
        _follow_recipe(accelerator.state.deepspeed_plugin, recipe)
    if trackers:
        options = {"wandb": {"name": recipe.tracking.name or run.name, "dir": str(run)}}
        accelerator.init_trackers(recipe.tracking.project, init_kwargs=options)
    return accelerator


def choose_precision(asked: str) -> str:
    """bf16 or no; `auto` stands for float32 on CPUs that multiply it faster than bfloat16."""
    if asked != "auto":
        return asked
    return "no" if not torch.cuda.is_available() and prefers_float32() else "bf16"


def use_cores() -> None:
    """Give a process of a CPU machine its share of the cores: accelerate's launcher leaves it one thread unless told."""
    launched, told = "ACCELERATE_MIXED_PRECISION" in os.environ, os.environ.get("OMP_NUM_THREADS", "1") != "1"
    if launched and not told and not torch.cuda.is_available():
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def require_world(accelerator: Any) -> None:
    """Raises UserError unless as many processes as the launcher asked for reach each other, in the mode it asked for."""
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != asked:
        raise UserError(
            f"launcher: {asked} processes were asked for, but this one is in a group of {accelerator.num_processes};"
            " start all of them with one `accelerate launch`"
        )
    mode = accelerator.distributed_type.value
    if asked > 1 and mode == "NO":
        raise UserError(f"launcher: {asked} processes would train alone side by side; use `accelerate launch`")
    found = int(accelerator.reduce(torch.ones(1, device=accelerator.device)))
    if found != asked:
        raise UserError(f"launcher: {asked} processes were asked for, but {found} answer; look at the other machines")
    for name in ("DEEPSPEED", "FSDP"):
        if _asked(name) and mode != name and asked > 1:
            raise UserError(f"launcher: {name} was asked for, but accelerate runs {mode}; drop --cpu from its options")


def require_shared(accelerator: Any, what: str, number: int) -> None:
    """Raises UserError unless all processes found the same number in the run's folder."""
    numbers = accelerator.gather(torch.tensor([number], device=accelerator.device)).tolist()
    if len(set(numbers)) > 1:
        raise UserError(
            f"output: the processes see different {what} ({', '.join(map(str, numbers))}); put `output` on a file system"
            " that all machines share"
        )


def _asked(mode: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{mode}", "false").lower() == "true"


def _processes() -> str:
    return f"process {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}"


def _shard_on_cpu(accelerator: Any) -> None:
    """accelerate 1.15 knows FSDP on accelerators only and takes plain data parallel on CPUs; FSDP2 itself runs there."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState().distributed_type = DistributedType.FSDP  # each look at the state copies from here


def _follow_recipe(plugin: Any, recipe: Recipe) -> None:
    """What a recipe decides stands in no DeepSpeed file: weights stay float32, computing in bfloat16 is autocast's."""
    config = plugin.deepspeed_config
    config["gradient_clipping"] = recipe.train.clip_norm or 0.0
    config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed wants a number; the trainer makes the batches
    config["bf16"] = {"enabled": False}
    config["torch_autocast"] = {"enabled": choose_precision(recipe.train.precision) == "bf16", "dtype": "bfloat16"}
    if not plugin.zero3_init_flag:
        plugin.dschf = None  # as long as it lives, transformers spreads the target over the processes under ZeRO-3
