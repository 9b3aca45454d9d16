"""Attention of the n nodes of a token tree over a cached prefix and their own ancestors.

    s[v, j] = softcap(scale * q_v . k_j),  softcap(x) = cap * tanh(x / cap)
    o_v = sum_j exp(s[v, j]) v_j / (exp(sink) + sum_j exp(s[v, j])),   j over the slots that node v sees

Node v sees slot j < L if pos(v) - j < window, and slot L + u if u is v or an ancestor of v and pos(v) - pos(u) < window, where
pos(v) = L + depth(v). The tree's own K and V are already in slots L..L+n-1. A tree that is run level by level asks for its last
nodes only: q and the words then have m <= n rows, depths all n.

Shapes: q [B, Hq, n, d], caches [B, Hkv, S, d], G = Hq / Hkv, R = n * G rows per KV head. Rows are packed node-major
(r = node * G + g), so one program reads each K and V row once for all of them. The prefix is split over programs; the last
split also does the tree; a second kernel merges the splits by their log-sum-exp (flash-decoding, Dao et al. 2023).
The lengths are read on the device: split sizes follow them, the grid is the maximum, so a captured graph serves any length.

Deterministic mode: split size, tile sizes and instructions depend on the sequence length only, never on n, B or Hkv, so
node 0 gets the same bits with n = 1 and n = 60.

A non-finite K or V in a slot reaches the nodes that see it and no other. Not supported: n > 128, S >= 2^31, gradients.
"""

import math

import torch
from torch import Tensor

from headtrain_kernels._triton import next_power_of_2, tl, triton
from headtrain_kernels.ancestors import MAX_NODES, tree_mask
from headtrain_kernels.checks import (
    FLOATS,
    INTEGERS,
    check_contiguous,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
    num_processors,
)  # fmt: skip

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIMS = (64, 80, 96, 128, 256)

# (rows per tile, padded head dim) -> keys per tile, warps, stages; 2-byte KV. Chosen for shared memory on sm_90 (227 KB), untuned.
TILES = {
    (16, 64): (128, 4, 3), (32, 64): (128, 4, 3), (64, 64): (128, 4, 3), (128, 64): (128, 8, 3),
    (16, 128): (64, 4, 4), (32, 128): (64, 4, 4), (64, 128): (64, 4, 3), (128, 128): (64, 8, 3),
    (16, 256): (32, 4, 4), (32, 256): (32, 4, 4), (64, 256): (32, 8, 3),
}  # fmt: skip
MASKED_KEYS = 32  # keys per tile where rows differ in what they see; small, because the masks cost registers
MIN_SPLIT = 256  # keys; below this the merge costs more than the parallelism gives
MAX_SPLITS = 64
DETERMINISTIC_SPLITS = 32
DETERMINISTIC_ROWS = 64
PROGRAMS_PER_PROCESSOR = 2

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _split_range(length, window, splits, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, MIN: tl.constexpr):
    """First key any node sees, keys per split, and the number of splits in use (1 to `splits`)."""
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window + 1, 0)
    keys = length - first
    size = tl.cdiv(tl.cdiv(keys, splits), BLOCK_N) * BLOCK_N
    size = tl.maximum(size, MIN)
    return first, size, tl.maximum(tl.cdiv(keys, size), 1)


@triton.jit
def _scores(q, k, scale, SOFTCAP: tl.constexpr):
    """Base-2 logits [M, N]; `scale` holds the factor log2(e)."""
    s = tl.dot(q, tl.trans(k).to(q.dtype), input_precision="ieee") * scale
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)) saturates to +-1 without overflow trouble
        s = SOFTCAP * _LOG2_E * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 / SOFTCAP))))
    return s


@triton.jit
def _accumulate(q, k, v, scale, top, total, acc, SOFTCAP: tl.constexpr):
    """One tile that every row sees."""
    s = _scores(q, k, scale, SOFTCAP)
    new_top = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return new_top, total * shrink + tl.sum(p, 1), acc


@triton.jit
def _accumulate_masked(q, k, v, sees, scale, top, total, acc, SOFTCAP: tl.constexpr):
    """One tile of which row m sees the keys sees[m, :]; rows may see none."""
    s = tl.where(sees, _scores(q, k, scale, SOFTCAP), float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - shift[:, None])
    shrink = tl.exp2(top - shift)
    # 0 * NaN is NaN: a bad V row is zeroed for those who do not see it and spoils only those who do
    v = v.to(q.dtype)
    good = tl.abs(v.to(tl.float32)) < float("inf")  # False for NaN too
    bad_key = tl.min(good.to(tl.int32), 1) == 0
    spoilt = tl.max((sees & bad_key[None, :]).to(tl.int32), 1) > 0
    acc = tl.dot(p.to(q.dtype), tl.where(good, v, 0.0), acc * shrink[:, None], input_precision="ieee")
    acc = tl.where(spoilt[:, None], float("nan"), acc)
    return new_top, total * shrink + tl.sum(p, 1), acc


@triton.jit
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr,
    length_ptr, depth_ptr, word_ptr, sink_ptr, k_scale_ptr, v_scale_ptr,
    q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    num_nodes, num_slots, num_heads, window, scale, row_tiles, splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    MIN: tl.constexpr, HAS_WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    # row tiles of one split are neighbours, so that the second finds K and V in L2
    tile = tl.program_id(0) % row_tiles
    split = tl.program_id(0) // row_tiles
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    length = tl.load(length_ptr + batch).to(tl.int32)
    first, size, used = _split_range(length, window, splits, HAS_WINDOW, BLOCK_N, MIN)
    if split < used:
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        node = rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        real = node < num_nodes
        dims = tl.arange(0, BLOCK_D)
        in_head = dims < HEAD_DIM
        depth = tl.load(depth_ptr + (batch + 1) * num_slots - num_nodes + node, mask=real, other=0).to(tl.int32)

        q_at = batch * q_stride_b + head.to(tl.int64) * q_stride_h + node.to(tl.int64) * q_stride_n
        q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=real[:, None] & in_head[None, :], other=0.0)
        k_scale = 1.0
        v_scale = 1.0
        if HAS_SCALES:
            k_scale = tl.load(k_scale_ptr + kv_head).to(tl.float32)
            v_scale = tl.load(v_scale_ptr + kv_head).to(tl.float32)
        scale = scale * k_scale * _LOG2_E

        begin = first + split * size
        end = tl.minimum(begin + size, length)
        k_base = k_ptr + batch * k_stride_b + kv_head.to(tl.int64) * k_stride_h + begin.to(tl.int64) * k_stride_s
        v_base = v_ptr + batch * v_stride_b + kv_head.to(tl.int64) * v_stride_h + begin.to(tl.int64) * v_stride_s
        few = tl.arange(0, BLOCK_T)
        k_few = k_base + few[:, None] * k_stride_s + dims[None, :]
        v_few = v_base + few[:, None] * v_stride_s + dims[None, :]

        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

        # offsets below count from `begin`: [0, start) for some rows out of the window, [start, rest) seen by all rows,
        # [rest, stop) the odd end of the prefix and, in the last split, the tree behind it
        start = 0
        if HAS_WINDOW:
            beyond = (
                length + tl.max(depth, 0) - window + 1 - begin
            )  # keys out of reach for the deepest node of the tile
            start = tl.minimum(tl.cdiv(tl.maximum(beyond, 0), BLOCK_T) * BLOCK_T, end - begin)
            for at in range(0, start, BLOCK_T):
                slot = begin + at + few
                inside = (slot < end)[:, None] & in_head[None, :]
                k = tl.load(k_few + at * k_stride_s, mask=inside, other=0.0)
                v = tl.load(v_few + at * v_stride_s, mask=inside, other=0.0)
                sees = (slot < end)[None, :] & (length + depth[:, None] - slot[None, :] < window)
                top, total, acc = _accumulate_masked(q, k, v, sees, scale, top, total, acc, SOFTCAP)
        rest = start + tl.maximum(end - begin - start, 0) // BLOCK_N * BLOCK_N

        keys = tl.arange(0, BLOCK_N)
        k_many = k_base + keys[:, None] * k_stride_s + dims[None, :]
        v_many = v_base + keys[:, None] * v_stride_s + dims[None, :]
        for at in range(start, rest, BLOCK_N):
            k = tl.load(k_many + at * k_stride_s, mask=in_head[None, :], other=0.0)
            v = tl.load(v_many + at * v_stride_s, mask=in_head[None, :], other=0.0)
            top, total, acc = _accumulate(q, k, v, scale, top, total, acc, SOFTCAP)

        stop = tl.where(split == used - 1, length + num_slots, end) - begin
        low = tl.load(word_ptr + (batch * num_nodes + node) * 2, mask=real, other=0)
        high = tl.load(word_ptr + (batch * num_nodes + node) * 2 + 1, mask=real, other=0)
        for at in range(rest, stop, BLOCK_T):
            slot = begin + at + few
            inside = (at + few < stop)[:, None] & in_head[None, :]
            k = tl.load(k_few + at * k_stride_s, mask=inside, other=0.0)
            v = tl.load(v_few + at * v_stride_s, mask=inside, other=0.0)
            other = slot - length  # node of a slot; negative in the prefix
            in_tree = (other >= 0) & (at + few < stop)
            word = tl.where((other < 64)[None, :], low[:, None], high[:, None])
            bit = (word >> (other & 63).to(tl.int64)[None, :]) & 1
            sees = ((other < 0) & (slot < end))[None, :] | (in_tree[None, :] & (bit != 0))
            if HAS_WINDOW:
                other_depth = tl.load(depth_ptr + batch * num_slots + other, mask=in_tree, other=0).to(tl.int32)
                position = tl.where(in_tree, length + other_depth, slot)
                sees = sees & (length + depth[:, None] - position[None, :] < window)
            top, total, acc = _accumulate_masked(q, k, v, sees, scale, top, total, acc, SOFTCAP)

        acc = acc * v_scale
        store = real[:, None] & in_head[None, :]
        if used == 1:
            if HAS_SINKS:
                sink = tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32) * _LOG2_E
                total = total + tl.exp2(sink - tl.where(top == float("-inf"), sink, top))
            total = tl.where(total > 0, total, 1.0)
            out_at = ((batch * num_nodes + node) * num_heads + head) * HEAD_DIM
            out = acc / total[:, None]
            tl.store(out_ptr + out_at[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=store)
        else:
            # a row that saw nothing has total 0: it stores zeros and the log-sum-exp -inf
            entry = ((batch * num_heads + head) * num_nodes + node) * splits + split
            tl.store(lse_ptr + entry, top + tl.log2(total), mask=real)
            mean = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(partial_ptr + entry[:, None] * HEAD_DIM + dims[None, :], mean, mask=store)


@triton.jit
def _merge_kernel(
    partial_ptr, lse_ptr, out_ptr, length_ptr, sink_ptr,
    num_nodes, num_heads, window, splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    MIN: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    length = tl.load(length_ptr + batch).to(tl.int32)
    _, _, used = _split_range(length, window, splits, HAS_WINDOW, BLOCK_N, MIN)
    if used > 1:
        dims = tl.arange(0, BLOCK_D)
        in_head = dims < HEAD_DIM
        base = ((batch * num_heads + head) * num_nodes + node) * splits
        top = tl.full((), float("-inf"), tl.float32)
        if HAS_SINKS:
            top = tl.load(sink_ptr + head).to(tl.float32) * _LOG2_E
        total = tl.full((), 1.0 if HAS_SINKS else 0.0, tl.float32)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        for start in range(0, used, BLOCK_S):
            split = start + tl.arange(0, BLOCK_S)
            lse = tl.load(lse_ptr + base + split, mask=split < used, other=float("-inf"))
            mask = (split < used)[:, None] & in_head[None, :]
            mean = tl.load(partial_ptr + (base + split)[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
            new_top = tl.maximum(top, tl.max(lse, 0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(lse - shift)
            shrink = tl.exp2(top - shift)
            total = total * shrink + tl.sum(weight, 0)
            acc = acc * shrink + tl.sum(mean * weight[:, None], 0)
            top = new_top
        out = acc / tl.where(total > 0, total, 1.0)
        out_at = ((batch * num_nodes + node) * num_heads + head) * HEAD_DIM
        tl.store(out_ptr + out_at + dims, out.to(out_ptr.dtype.element_ty), mask=in_head)


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, depths: Tensor, words: Tensor,
    sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
) -> None:  # fmt: skip
    check_shape("q", q, None, None, None, None)
    batch, heads, num_nodes, dim = q.shape
    check_shape("k_cache", k, batch, None, None, dim)
    kv_heads = k.shape[1]
    check_shape("v_cache", v, batch, kv_heads, k.shape[2], dim)
    check_shape("lengths", lengths, batch)
    check_shape("depths", depths, batch, None)
    check_shape("words", words, batch, num_nodes, 2)
    assert heads % kv_heads == 0, f"q: {heads} heads received, a multiple of the cache's {kv_heads} expected"
    slots = depths.shape[1]
    assert 1 <= num_nodes <= MAX_NODES, f"q: {num_nodes} nodes received, 1 to {MAX_NODES} expected"
    assert num_nodes <= slots <= MAX_NODES, (
        f"depths: shape {tuple(depths.shape)} received, ({batch}, {num_nodes} to {MAX_NODES}) expected: q holds the last of"
        " these nodes"
    )
    check_dtype("q", q, *FLOATS)
    check_dtype("k_cache", k, q.dtype, *FP8)
    check_dtype("v_cache", v, k.dtype)
    check_dtype("lengths", lengths, *INTEGERS)
    check_dtype("depths", depths, *INTEGERS)
    check_dtype("words", words, torch.int64)
    for name, tensor in (("q", q), ("k_cache", k), ("v_cache", v)):
        check_rows(name, tensor)
    for name, tensor in (("k_cache", k), ("v_cache", v), ("lengths", lengths), ("depths", depths), ("words", words)):
        check_device(name, tensor, q.device)
    if sinks is not None:
        check_shape("sinks", sinks, heads)
        check_device("sinks", sinks, q.device)
    assert (k_scale is None) == (v_scale is None), "k_scale and v_scale: one received, both or neither expected"
    if k_scale is not None and v_scale is not None:
        check_shape("k_scale", k_scale, kv_heads)
        check_shape("v_scale", v_scale, kv_heads)


def _choose_tiles(rows: int, dim: int, query_bytes: int, deterministic: bool) -> tuple[int, int, int, int, int]:
    """Rows per tile, keys per tile where all rows see all keys, keys per masked tile, warps, stages."""
    block_d = next_power_of_2(dim)
    block_m = DETERMINISTIC_ROWS if deterministic else min(max(next_power_of_2(rows), 16), 128)
    if query_bytes == 4:
        # float32 products run without tensor cores and hold their operands in registers
        keys = 16 if block_d == 256 else 32
        return 16, keys, keys, 4, 2
    if block_d == 256:
        block_m = min(block_m, 64)
    keys, warps, stages = TILES[block_m, block_d]
    return block_m, keys, MASKED_KEYS, warps, stages


def launch_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, depths: Tensor, words: Tensor,
    scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, deterministic: bool = False,
    max_splits: int | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The Triton form; `max_splits` overrides the choice by device, `out` [B, n, Hq, d] is written in place of a new tensor."""
    check_arguments(q, k, v, lengths, depths, words, sinks, k_scale, v_scale)
    batch, heads, num_nodes, dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    assert dim in HEAD_DIMS, f"q: head dim {dim} received, one of {HEAD_DIMS} expected"
    for name, tensor in (("lengths", lengths), ("depths", depths), ("words", words)):
        check_contiguous(name, tensor)
    assert window is None or window >= 1, f"window: {window} received, at least 1 expected"
    group = heads // kv_heads
    rows = num_nodes * group
    block_m, block_n, block_t, warps, stages = _choose_tiles(rows, dim, q.element_size(), deterministic)
    row_tiles = triton.cdiv(rows, block_m)
    if deterministic:
        splits = DETERMINISTIC_SPLITS
    elif max_splits is None:
        splits = PROGRAMS_PER_PROCESSOR * num_processors(q.device) // max(batch * kv_heads * row_tiles, 1)
        reach = capacity if window is None else min(capacity, window)
        splits = max(min(splits, triton.cdiv(reach, MIN_SPLIT), MAX_SPLITS), 1)
    else:
        splits = max_splits
    if out is None:
        out = torch.empty(batch, num_nodes, heads, dim, dtype=q.dtype, device=q.device)  # [B, n, Hq, d]
    check_shape("out", out, batch, num_nodes, heads, dim)
    check_contiguous("out", out)
    partial = lse = out  # unused without splits
    if splits > 1:
        partial = torch.empty(batch, heads, num_nodes, splits, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, heads, num_nodes, splits, dtype=torch.float32, device=q.device)
    block_d = next_power_of_2(dim)
    unused = lengths
    options = {"HEAD_DIM": dim, "BLOCK_D": block_d, "BLOCK_N": block_n, "MIN": max(MIN_SPLIT, block_n)}
    options |= {"HAS_WINDOW": window is not None, "HAS_SINKS": sinks is not None}
    _tree_attention_kernel[(row_tiles * splits, kv_heads, batch)](
        q, k, v, out, partial, lse, lengths, depths, words,
        unused if sinks is None else sinks, unused if k_scale is None else k_scale, unused if v_scale is None else v_scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        num_nodes, depths.shape[1], heads, window or 0, scale, row_tiles, splits,
        GROUP=group, BLOCK_M=block_m, BLOCK_T=block_t, SOFTCAP=softcap or 0.0, HAS_SCALES=k_scale is not None,
        num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(num_nodes, heads, batch)](
            partial, lse, out, lengths, unused if sinks is None else sinks,
            num_nodes, heads, window or 0, splits,
            BLOCK_S=min(next_power_of_2(splits), 16), num_warps=4, **options,
        )  # fmt: skip
    return out.transpose(1, 2)


def _torch_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, depths: Tensor, words: Tensor,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Queries of one KV head are stacked into one matmul: no copy of the cache, no expanded heads."""
    check_arguments(q, k, v, lengths, depths, words, sinks, k_scale, v_scale)
    batch, heads, num_nodes, dim = q.shape
    kv_heads = k.shape[1]
    total = int(lengths.max()) + depths.shape[1] if mask is None else mask.shape[-1]
    k, v = k[:, :, :total].to(q.dtype), v[:, :, :total].to(q.dtype)  # views, except for fp8
    if mask is None and not (batch == 1 and depths.shape[1] == 1 and window is None):
        mask = tree_mask(lengths, depths, words, total, window)  # [B, n, S]
    grouped = q.reshape(batch, kv_heads, -1, dim)  # [B, Hkv, G * n, d]
    scores = torch.matmul(grouped, k.mT).float().view(batch, heads, num_nodes, total)
    scores.mul_(scale)
    if k_scale is not None:
        scores.mul_(k_scale.repeat_interleave(heads // kv_heads)[:, None, None])
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.add_(mask[:, None])
    if sinks is not None:
        sink = sinks.float().view(1, heads, 1, 1).expand(batch, heads, num_nodes, 1)
        weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    out = torch.matmul(weights.to(q.dtype).reshape(batch, kv_heads, -1, total), v).view(q.shape)
    if v_scale is not None:
        out = out * v_scale.to(out.dtype).repeat_interleave(heads // kv_heads)[:, None, None]
    return out


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, depths: Tensor, words: Tensor,
    scale: float | None = None, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, deterministic: bool = False, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of tree nodes over prefix and ancestors. Triton on a CUDA device, else torch.

    Args:
        q: [B, Hq, n, d] float32, float16 or bfloat16, any strides with dense rows.
        k_cache, v_cache: [B, Hkv, S, d] of q's dtype or float8; rows lengths[b]..lengths[b]+n-1 hold the tree's own K and V.
        lengths: [B] integers, tokens in the prefix.
        depths: [B, n] integers, 0 at the root; more columns than q has nodes if q holds the last nodes only.
        words: [B, n, 2] int64 ancestor bits of q's nodes (`pack_ancestors`).
        scale: factor of q . k; default 1 / sqrt(d).
        window: a node sees positions above pos - window only; None: all.
        softcap: cap of the scaled score; None: none.
        sinks: [Hq] logits that take part in the softmax without a value.
        k_scale, v_scale: [Hkv] factors of a float8 cache.
        deterministic: reduction order from the lengths alone (Triton form).
        mask: [B, n, S'] from `tree_mask`, so that layers share it (torch form; S' slots are read).

    Returns: [B, Hq, n, d] in q's dtype, a transpose of contiguous [B, n, Hq, d] in the Triton form. Zero for a node that
    sees nothing (Triton form).
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    common = (q, k_cache, v_cache, lengths, depths, words, scale, window, softcap, sinks, k_scale, v_scale)
    if q.is_cuda:
        return launch_tree_attention(*common, deterministic=deterministic)
    return _torch_tree_attention(*common, mask)
