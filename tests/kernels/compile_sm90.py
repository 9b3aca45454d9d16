"""Compiles every kernel for sm_90 without a GPU: run as a script, in a process that never chose the interpreter.

The launchers run with CPU tensors; a stand-in driver reports the target, and each launch compiles (through ptxas, which
the triton wheel carries) instead of running. Prints one line per kernel: registers, spilled bytes, shared memory.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

for name in ("TRITON_INTERPRET", "TRITON_CACHE_DIR"):
    os.environ.pop(name, None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="sm90-")

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

SHARED_LIMIT = 232_448  # bytes a block may use on sm_90
compiled: list[tuple[str, str, object]] = []
case = ""


class StandIn:
    """What triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_instead(self: JITFunction, grid: object):
    def launch(*args: object, **kwargs: object) -> None:
        compiled.append((case, self.fn.__name__, self.run(*args, grid=grid, warmup=True, **kwargs)))

    return launch


triton.runtime.driver.set_active(StandIn())
JITFunction.__getitem__ = compile_instead


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack (spills) from cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def label(*parts: object) -> None:
    global case
    case = " ".join(str(part).removeprefix("torch.") for part in parts)


def attention(
    dtype: torch.dtype, kv: torch.dtype, n: int, group: int, dim: int, before: int = 0, **options: object
) -> None:
    """`before`: nodes of the tree in front of the n that are queries."""
    from headtrain_kernels.tree_attention import launch_tree_attention

    label(dtype, kv, f"n={n} d={dim}", *options)
    q = torch.zeros(1, n, 2 * group, dim, dtype=dtype).transpose(1, 2)
    cache = torch.zeros(1, 2, 1024, dim).to(kv)
    lengths, depths = torch.zeros(1, dtype=torch.int64), torch.zeros(1, before + n, dtype=torch.int64)
    words = torch.zeros(1, n, 2, dtype=torch.int64)
    if options.pop("scales", False):
        options |= {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}
    if options.pop("sink", False):
        options["sinks"] = torch.zeros(2 * group)
    splits = options.pop("max_splits", 8)
    launch_tree_attention(q, cache, cache, lengths, depths, words, 0.1, max_splits=splits, **options)


def others(dtype: torch.dtype) -> None:
    from headtrain_kernels.distill import launch_rows
    from headtrain_kernels.grouped_residual import launch_grouped_residual
    from headtrain_kernels.kv_commit import launch_kv_commit
    from headtrain_kernels.noise import launch_noise
    from headtrain_kernels.topk_logprob import launch_topk_logprob
    from headtrain_kernels.tree_verify import launch_tree_verify

    batch, n, seed = 2, 60, torch.zeros(1, dtype=torch.int64)
    ids = torch.zeros(batch, n, dtype=torch.int64)
    row = torch.zeros(batch, dtype=torch.int64)
    for kind, given in (("gumbel", 7), ("exponential", 1 << 40), ("bits", seed)):
        label(kind)
        launch_noise(given, row, row, 5000, 0, kind)
    label(dtype)
    launch_kv_commit(torch.zeros(4, 2, batch, 2, 64, 128, dtype=dtype), row, ids[:, :9].contiguous())
    for given in (None, 7, seed):
        label(dtype, "seed", type(given).__name__)
        keyed = (None, None, None) if given is None else (given, row, row)
        launch_tree_verify(torch.zeros(batch, n, 5000, dtype=dtype), ids, ids, ids, ids == 0, 8, *keyed, 0)
        hidden, weight = torch.zeros(10, 512, dtype=dtype), torch.zeros(32000, 512, dtype=dtype)
        keyed = (given, *[None if given is None else torch.zeros(10, dtype=torch.int64)] * 2)
        vocabulary = None if given is None else torch.arange(32000)
        launch_topk_logprob(hidden, weight, 10, weight[:, 0].contiguous(), 0.7, *keyed, vocabulary, 0)
    for full, softcap in ((None, None), (torch.zeros(6, 700, dtype=dtype), 30.0)):
        label(dtype, "full" if full is not None else "restricted")
        launch_rows(
            torch.zeros(3, 6, 5000, dtype=dtype),
            torch.zeros(6, 5000, dtype=dtype),
            full,
            torch.ones(3, 6),
            softcap,
            True,
        )
    for rows in (1, 60, 1000):
        label(dtype, f"N={rows}")
        weight = torch.zeros(3, 512, 512, dtype=dtype)
        launch_grouped_residual(torch.zeros(rows, 512, dtype=dtype), weight, weight[:, 0].contiguous())


def compile_all(every: bool) -> None:
    bf16, fp16, fp32, fp8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
    attention(bf16, bf16, 60, 4, 128)
    attention(bf16, bf16, 8, 4, 128, before=19)
    attention(bf16, fp8, 16, 4, 128, scales=True, window=100, softcap=30.0, sink=True)
    others(bf16)
    if every:
        others(fp32)
        for dim in (64, 80, 96, 128, 256):
            for n in (1, 8, 16, 60, 128):
                attention(bf16, bf16, n, 4, dim)
            attention(fp32, fp32, 60, 4, dim)
            attention(fp16, fp16, 60, 4, dim, window=100, softcap=30.0, sink=True)
            attention(bf16, torch.float8_e5m2, 60, 4, dim, scales=True)
            attention(bf16, bf16, 60, 4, dim, deterministic=True)
            attention(fp32, fp32, 3, 4, dim, window=100)


if __name__ == "__main__":
    compile_all("--all" in sys.argv)
    failed = False
    for what, kernel_name, kernel in compiled:
        registers, stack = resources(kernel.asm["cubin"])
        shared = kernel.metadata.shared
        bad = shared > SHARED_LIMIT
        failed |= bad
        print(
            f"{kernel_name:24} {what:52} registers {registers:3} stack {stack:4} shared {shared:6}{' TOO MUCH' if bad else ''}"
        )
    print(f"{len(compiled)} compiled for sm_90, triton {triton.__version__}")
    sys.exit(failed)
