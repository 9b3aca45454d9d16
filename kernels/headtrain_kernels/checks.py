"""Asserts of the launchers: each names the argument, what it received and what it expected."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)


def check_shape(name: str, tensor: Tensor, *expected: int | None) -> None:
    """`expected`: one size per dimension, None where any size will do."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(expected) and all(e is None or s == e for s, e in zip(shape, expected, strict=True))
    wanted = "(" + ", ".join("any" if e is None else str(e) for e in expected) + ")"
    assert fits, f"{name}: shape {shape} received, {wanted} expected"


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    wanted = " or ".join(str(dtype) for dtype in allowed)
    assert tensor.dtype in allowed, f"{name}: dtype {tensor.dtype} received, {wanted} expected"


def check_rows(name: str, tensor: Tensor) -> None:
    """The last dimension must be dense: the kernels read it with one wide load."""
    dense = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    assert dense, (
        f"{name}: strides {tensor.stride()} received, a last stride of 1 expected (shape {tuple(tensor.shape)})"
    )


def check_contiguous(name: str, tensor: Tensor) -> None:
    assert tensor.is_contiguous(), (
        f"{name}: strides {tensor.stride()} received, a contiguous tensor expected (shape {tuple(tensor.shape)})"
    )


def check_device(name: str, tensor: Tensor, expected: torch.device) -> None:
    assert tensor.device == expected, f"{name}: device {tensor.device} received, {expected} expected"


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for the interpreter, which runs programs one after another."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
