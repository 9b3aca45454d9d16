"""Keeping the accepted path: its K and V rows move to consecutive slots, all layers in one launch, in place.

    cache[:, :, b, :, lengths[b] + i] <- cache[:, :, b, :, lengths[b] + path[b, i]]      for every i with path[b, i] >= 0

Shapes: cache [layers, 2, B, Hkv, S, d], one tensor for the whole model; path [B, P], node ids from the root on, -1 behind
the end. One program owns all P rows of a slice of d for one (layer, K or V, sequence, head): it loads them all, waits for
all its threads, then stores, so any order of source and destination is safe. Rows that stay are neither read nor written.

The lengths are not changed. Not supported: layers of different shapes (call it once per tensor), P > 128.
"""

import torch
from torch import Tensor

from headtrain_kernels._triton import next_power_of_2, tl, triton
from headtrain_kernels.checks import INTEGERS, check_contiguous, check_device, check_dtype, check_rows, check_shape

MAX_PATH = 128
TILE_ELEMENTS = 4096  # 32 per thread


@triton.jit
def _kv_commit_kernel(
    cache_ptr, length_ptr, path_ptr, stride_layer, stride_kv, stride_b, stride_h, stride_s, num_heads, path_size,
    HEAD_DIM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64) // 2
    kv = tl.program_id(0).to(tl.int64) % 2
    batch = tl.program_id(1).to(tl.int64) // num_heads
    head = tl.program_id(1).to(tl.int64) % num_heads
    step = tl.arange(0, BLOCK_P)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    length = tl.load(length_ptr + batch).to(tl.int64)
    node = tl.load(path_ptr + batch * path_size + step, mask=step < path_size, other=-1).to(tl.int64)
    moves = (node >= 0) & (node != step)
    mask = moves[:, None] & (dims < HEAD_DIM)[None, :]
    base = cache_ptr + layer * stride_layer + kv * stride_kv + batch * stride_b + head * stride_h + length * stride_s
    rows = tl.load(base + node[:, None] * stride_s + dims[None, :], mask=mask)
    # a row one warp stores may be the source of another warp
    tl.debug_barrier()
    tl.store(base + step.to(tl.int64)[:, None] * stride_s + dims[None, :], rows, mask=mask)


def check_arguments(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    check_shape("cache", cache, None, 2, None, None, None, None)
    batch = cache.shape[2]
    check_shape("lengths", lengths, batch)
    check_shape("path", path, batch, None)
    assert path.shape[1] <= MAX_PATH, f"path: shape {tuple(path.shape)} received, at most {MAX_PATH} columns expected"
    check_dtype("lengths", lengths, *INTEGERS)
    check_dtype("path", path, *INTEGERS)
    check_device("lengths", lengths, cache.device)
    check_device("path", path, cache.device)
    check_rows("cache", cache)


def launch_kv_commit(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    check_arguments(cache, lengths, path)
    check_contiguous("lengths", lengths)
    check_contiguous("path", path)
    layers, _, batch, heads, _, dim = cache.shape
    block_p = next_power_of_2(path.shape[1])
    block_d = min(next_power_of_2(dim), max(TILE_ELEMENTS // block_p, 16))
    _kv_commit_kernel[(2 * layers, batch * heads, triton.cdiv(dim, block_d))](
        cache, lengths, path, *cache.stride()[:5], heads, path.shape[1],
        HEAD_DIM=dim, BLOCK_P=block_p, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


def _torch_kv_commit(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    check_arguments(cache, lengths, path)
    steps = torch.arange(path.shape[1], device=path.device)
    kept = path >= 0
    # behind the end the root's row is written onto itself, whose slot is always there
    sources = lengths[:, None] + torch.where(kept, path, 0)  # [B, P]
    targets = lengths[:, None] + torch.where(kept, steps, 0)  # [B, P]
    for b in range(path.shape[0]):
        rows = cache[:, :, b].index_select(3, sources[b])  # [layers, 2, Hkv, P, d], a copy: overlap is safe
        cache[:, :, b].index_copy_(3, targets[b], rows)


def kv_commit(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Move the rows of the accepted path behind the prefix, in place. Triton on a CUDA device, else torch.

    Args:
        cache: [layers, 2, B, Hkv, S, d] any dtype, any strides with dense rows; node j of row b in slot lengths[b] + j.
        lengths: [B] integers, tokens in the prefix (the root is node 0, in slot lengths[b]).
        path: [B, P] integers, path[b, 0] == 0, then the accepted nodes, -1 behind the last.
    """
    (launch_kv_commit if cache.is_cuda else _torch_kv_commit)(cache, lengths, path)
