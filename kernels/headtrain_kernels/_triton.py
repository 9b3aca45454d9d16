"""Triton where it is installed, else a stand-in, so that every kernel file can be imported on a machine without it.

The stand-in swallows decorators and constants at import time and raises only when a kernel is launched.
"""

from __future__ import annotations

from typing import Any

__all__ = ["next_power_of_2", "tl", "triton"]

triton: Any
tl: Any

try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
except ImportError:

    class _Missing:
        """Stands for `triton` and `triton.language`: any attribute and any call give it back."""

        def __getattr__(self, name: str) -> _Missing:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> _Missing:
            return self

        def __getitem__(self, grid: Any) -> None:
            raise ModuleNotFoundError("triton is not installed: the GPU kernels of headtrain_kernels need it")

    triton = tl = _Missing()


def next_power_of_2(value: int) -> int:
    """Smallest power of two >= value (1 for 0)."""
    return 1 << max(value - 1, 0).bit_length()
