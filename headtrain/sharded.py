"""Heads whose weights or optimizer state are spread over processes (ZeRO, FSDP2), put together and spread again.

Checkpoints hold a head and an AdamW as one process has them, so a run may go on in another mode. `Whole` is such a
pair on the CPU; `gather` fills it from the shards, `scatter` fills the shards from it. Both are called by all ranks.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headtrain.heads.base import Head
from headtrain.target import Target

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


def is_sharded(accelerator: Any) -> bool:
    return accelerator.distributed_type.value in ("DEEPSPEED", "FSDP")


class Whole:
    """An ordinary copy of a head and its optimizer. `parameter_groups` makes the optimizer's groups of a head."""

    def __init__(self, head: Head, target: Target, parameter_groups: Any, betas: tuple[float, float]):
        # The target is used by the head, not a part of it.
        shared = [target, target.model, *target.model.modules(), *target.model.parameters()]
        self.head = copy.deepcopy(head, {id(item): item for item in shared}).to("cpu")
        self.optimizer = torch.optim.AdamW(parameter_groups(self.head), betas=betas)

    def gather(self, accelerator: Any, head: Head, optimizer: Any, moments: bool) -> None:
        """Take the weights of all ranks' shards and, with `moments`, the optimizer's state."""
        here = dict(self.head.named_parameters())
        for name, parameter in head.named_parameters():
            here[name].data.copy_(_full(accelerator, parameter))
        for mine, theirs in zip(self.head.buffers(), head.buffers(), strict=True):
            mine.copy_(theirs)
        if not moments:
            return
        _link_moments(optimizer)
        state, step = _inner(optimizer).state, _step(optimizer)
        for name, parameter in head.named_parameters():
            unused = accelerator.distributed_type.value == "FSDP" and not state.get(parameter)
            if parameter.requires_grad and step is not None and not unused:
                found = {key: _full(accelerator, parameter, key, state) for key in MOMENTS}
                self.optimizer.state[here[name]] = {"step": torch.tensor(float(step)), **found}

    def scatter(self, accelerator: Any, model: nn.Module, head: Head, optimizer: Any, batch: Any) -> None:
        """Give weights and the optimizer's state to the shards. `batch`: any, for one step that changes nothing."""
        if self.optimizer.state:
            self._make_moments(accelerator, model, optimizer, batch)
        here = dict(self.head.named_parameters())
        state = _inner(optimizer).state
        steps = [float(entry["step"]) for entry in self.optimizer.state.values()]
        for name, parameter in head.named_parameters():
            _fill(accelerator, parameter, here[name].data)
            for key, value in self.optimizer.state.get(here[name], {}).items():
                if key in MOMENTS:
                    _fill(accelerator, parameter, value, key, state)
        for mine, theirs in zip(self.head.buffers(), head.buffers(), strict=True):
            theirs.copy_(mine)
        for entry in state.values():
            entry["step"].fill_(steps[0])

    def _make_moments(self, accelerator: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
        """An optimizer has state, and DeepSpeed knows where it lies, only behind a first step: take one of rate 0."""
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        accelerator.backward(0 * model(batch)[0])
        optimizer.step()
        optimizer.zero_grad()
        _link_moments(optimizer)


def _full(accelerator: Any, parameter: Any, key: str | None = None, state: Any = None) -> Tensor:
    """A parameter, or the optimizer's `key` of it, whole and in float32 on the CPU."""
    if accelerator.distributed_type.value == "FSDP":
        value = (parameter if key is None else state[parameter][key]).full_tensor()
    elif not parameter.requires_grad:
        value = _whole_zero3(parameter)
    else:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        value = safe_get_full_fp32_param(parameter) if key is None else safe_get_full_optimizer_state(parameter, key)
    return value.detach().cpu().clone()


def _fill(accelerator: Any, parameter: Any, value: Tensor, key: str | None = None, state: Any = None) -> None:
    """The opposite of `_full`; each rank keeps its part of `value`."""
    value = value.to(accelerator.device)
    if accelerator.distributed_type.value == "FSDP":
        from torch.distributed.tensor import distribute_tensor

        place = parameter if key is None else state[parameter][key]
        part = distribute_tensor(value.to(place.dtype), place.device_mesh, place.placements)
        with torch.no_grad():
            place.copy_(part)
    elif hasattr(parameter, "ds_id"):
        _fill_zero3(accelerator, parameter, value, key)
    else:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if key is not None:
            safe_set_full_optimizer_state(parameter, value, key)
        else:
            safe_set_full_fp32_param(parameter, value)
            parameter.data.copy_(value)


def _fill_zero3(accelerator: Any, parameter: Any, value: Tensor, key: str | None) -> None:
    """ZeRO-3 keeps equal parts of the flat tensor, the last one padded; a small tensor stays whole beside its part."""
    from deepspeed import zero
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    if not parameter.requires_grad:
        with zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(value)
        return
    size = parameter.ds_tensor.ds_numel
    flat = nn.functional.pad(value.flatten(), (0, size * accelerator.num_processes - value.numel()))
    part = flat[size * accelerator.process_index :][:size]
    if key is not None:
        safe_set_local_optimizer_state(parameter, part, key)
        return
    safe_set_local_fp32_param(parameter, part)
    with zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.copy_(value)


def _whole_zero3(parameter: Any) -> Tensor:
    """A parameter that no optimizer knows."""
    if not hasattr(parameter, "ds_id"):
        return parameter.data
    from deepspeed import zero

    with zero.GatheredParameters([parameter]):
        return parameter.data.clone()


def _link_moments(optimizer: Any) -> None:
    """ZeRO-1 and 2 of DeepSpeed 0.19 look up where moments lie behind the first group's first step: too early for others."""
    while optimizer is not None:
        if hasattr(optimizer, "_hp_optimizer_states_linked"):
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        optimizer = getattr(optimizer, "optimizer", None)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The AdamW beneath the wrappers of accelerate and DeepSpeed."""
    while not isinstance(optimizer, torch.optim.AdamW):
        optimizer = optimizer.optimizer
    return optimizer


def _step(optimizer: Any) -> float | None:
    """Steps that were taken; None before the first."""
    entries: Iterator[Any] = iter(_inner(optimizer).state.values())
    entry = next(entries, None)
    return None if entry is None else float(entry["step"])
