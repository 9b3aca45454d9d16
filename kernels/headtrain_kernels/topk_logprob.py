"""The k likeliest draft tokens of each state, from the lm_head in one read, without writing the log-probabilities.

    z = (hidden . weight^T + bias) / temperature,   lse = log sum_v exp(z_v),   log q_v = z_v - lse
    columns = the k largest of z_v (+ g_v, the Gumbel noise of token vocabulary[v] at (seed, sequence, position))

Shapes: hidden [M, H], weight [Vd, H]; log q and columns [M, k], lse [M]. Ties go to the lower column.

Two launches. Each program of the first multiplies a tile of states by a block of rows of the lm_head and keeps the block's
maximum, sum of exponentials and k best; the second merges the blocks of one state. Noise is keyed by target ids, so a
reduced vocabulary draws what the target will draw. Not supported: k > 64, gradients.
"""

import torch
from torch import Tensor

from headtrain_kernels._triton import next_power_of_2, tl, triton
from headtrain_kernels.checks import (
    FLOATS,
    INTEGERS,
    check_contiguous,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
)  # fmt: skip
from headtrain_kernels.noise import counter_noise, gumbel_of, load_seed, noise_bits, noise_key, seed_argument

MAX_K = 64
BLOCK_V = 128
MERGE_BLOCK = 1024


@triton.jit(do_not_specialize=["seed", "stream"])
def _block_kernel(
    hidden_ptr, weight_ptr, bias_ptr, top_ptr, sum_ptr, score_ptr, logit_ptr, column_ptr,
    sequence_ptr, position_ptr, vocabulary_ptr, seed, stream, inverse_temperature, M, V, H, stride_m, stride_v, K,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NOISE: tl.constexpr, HAS_VOCABULARY: tl.constexpr, SEED_PTR: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_rows = rows < M
    in_columns = columns < V
    units = tl.arange(0, BLOCK_H)
    hidden_at = hidden_ptr + rows.to(tl.int64)[:, None] * stride_m + units[None, :]
    weight_at = weight_ptr + columns.to(tl.int64)[:, None] * stride_v + units[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for start in range(0, H, BLOCK_H):
        x = tl.load(hidden_at + start, mask=in_rows[:, None] & (start + units < H)[None, :], other=0.0)
        w = tl.load(weight_at + start, mask=in_columns[:, None] & (start + units < H)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    z = tl.where(in_columns[None, :], acc * inverse_temperature, float("-inf"))

    blocks = tl.num_programs(0)
    top = tl.max(z, 1)
    tl.store(top_ptr + rows * blocks + block, top, mask=in_rows)
    tl.store(sum_ptr + rows * blocks + block, tl.sum(tl.exp(z - top[:, None]), 1), mask=in_rows)

    score = z
    if HAS_NOISE:
        sequence = tl.load(sequence_ptr + rows, mask=in_rows, other=0).to(tl.int64)
        position = tl.load(position_ptr + rows, mask=in_rows, other=0).to(tl.int64)
        token = columns.to(tl.int64)
        if HAS_VOCABULARY:
            token = tl.load(vocabulary_ptr + columns, mask=in_columns, other=0).to(tl.int64)
        key = noise_key(load_seed(seed, SEED_PTR), sequence, position, tl.full((), stream, tl.int64))
        score = z + gumbel_of(noise_bits(key[:, None], token[None, :]))
    local = tl.arange(0, BLOCK_V)
    for i in range(0, K):
        best, index = tl.max(score, 1, return_indices=True)
        chosen = local[None, :] == index[:, None]
        out = (rows * blocks + block).to(tl.int64) * K + i
        tl.store(score_ptr + out, best, mask=in_rows)
        tl.store(logit_ptr + out, tl.max(tl.where(chosen, z, float("-inf")), 1), mask=in_rows)
        tl.store(column_ptr + out, block * BLOCK_V + index, mask=in_rows)
        score = tl.where(chosen, float("-inf"), score)


@triton.jit
def _merge_kernel(
    top_ptr, sum_ptr, score_ptr, logit_ptr, column_ptr, log_q_ptr, out_ptr, lse_ptr, blocks, K,
    BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_B)
    tops = tl.load(top_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
    sums = tl.load(sum_ptr + row * blocks + block, mask=block < blocks, other=0.0)
    top = tl.max(tops, 0)
    lse = top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))
    tl.store(lse_ptr + row, lse)
    tile = tl.arange(0, TILES)[:, None] * BLOCK_C
    entry = tile + tl.arange(0, BLOCK_C)[None, :]  # candidates of all blocks, block by block
    candidates = blocks * K
    score = tl.load(score_ptr + row * candidates + entry, mask=entry < candidates, other=float("-inf"))
    for i in range(0, K):
        best, index = tl.max(score, 1, return_indices=True)  # per tile, then over tiles
        winner = tl.argmax(best, 0)
        place = tl.sum(tl.where(tl.arange(0, TILES) == winner, index, 0), 0) + winner * BLOCK_C
        at = row * candidates + place
        tl.store(log_q_ptr + row * K + i, tl.load(logit_ptr + at) - lse)
        tl.store(out_ptr + row * K + i, tl.load(column_ptr + at).to(tl.int64))
        score = tl.where(entry == place, float("-inf"), score)


def check_arguments(
    hidden: Tensor, weight: Tensor, k: int, bias: Tensor | None, temperature: float, seed: int | Tensor | None,
    sequences: Tensor | None, positions: Tensor | None, vocabulary: Tensor | None,
) -> None:  # fmt: skip
    check_shape("hidden", hidden, None, None)
    check_shape("weight", weight, None, hidden.shape[1])
    check_dtype("hidden", hidden, *FLOATS)
    check_dtype("weight", weight, hidden.dtype)
    check_rows("hidden", hidden)
    check_rows("weight", weight)
    check_device("weight", weight, hidden.device)
    most = min(MAX_K, weight.shape[0])
    assert 1 <= k <= most, f"k: {k} received, 1 to {most} expected"
    assert temperature > 0, f"temperature: {temperature} received, above 0 expected"
    if bias is not None:
        check_shape("bias", bias, weight.shape[0])
    if vocabulary is not None:
        check_shape("vocabulary", vocabulary, weight.shape[0])
        check_dtype("vocabulary", vocabulary, *INTEGERS)
        check_contiguous("vocabulary", vocabulary)
    if seed is not None:
        assert sequences is not None, "sequences: None received, a tensor [M] expected with a seed"
        assert positions is not None, "positions: None received, a tensor [M] expected with a seed"
        check_shape("sequences", sequences, hidden.shape[0])
        check_shape("positions", positions, hidden.shape[0])


def launch_topk_logprob(
    hidden: Tensor, weight: Tensor, k: int, bias: Tensor | None, temperature: float, seed: int | Tensor | None,
    sequences: Tensor | None, positions: Tensor | None, vocabulary: Tensor | None, stream: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_arguments(hidden, weight, k, bias, temperature, seed, sequences, positions, vocabulary)
    num_rows, size = hidden.shape
    columns = weight.shape[0]
    blocks = triton.cdiv(columns, BLOCK_V)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=hidden.device)

    tops, sums = empty(num_rows, blocks), empty(num_rows, blocks)
    scores, logits = empty(num_rows, blocks, k), empty(num_rows, blocks, k)
    indices = empty(num_rows, blocks, k, dtype=torch.int32)
    log_q, out, lse = empty(num_rows, k), empty(num_rows, k, dtype=torch.int64), empty(num_rows)
    unused = tops
    # float32 products run without tensor cores and hold their operands in registers
    wide = hidden.element_size() == 2
    block_m = min(max(next_power_of_2(num_rows), 16), 64) if wide else 16
    _block_kernel[(blocks, triton.cdiv(num_rows, block_m))](
        hidden, weight, unused if bias is None else bias, tops, sums, scores, logits, indices,
        unused if sequences is None else sequences.contiguous(), unused if positions is None else positions.contiguous(),
        unused if vocabulary is None else vocabulary, 0 if seed is None else seed_argument(seed), stream,
        1 / temperature, num_rows, columns, size, hidden.stride(0), weight.stride(0), k,
        BLOCK_M=block_m, BLOCK_V=BLOCK_V, BLOCK_H=128 if wide else 16, HAS_BIAS=bias is not None,
        HAS_NOISE=seed is not None, HAS_VOCABULARY=vocabulary is not None, SEED_PTR=isinstance(seed, Tensor),
        num_warps=4, num_stages=3 if wide else 2,
    )  # fmt: skip
    tiles = next_power_of_2(triton.cdiv(blocks * k, MERGE_BLOCK))
    _merge_kernel[(num_rows,)](
        tops, sums, scores, logits, indices, log_q, out, lse, blocks, k,
        BLOCK_B=next_power_of_2(blocks), BLOCK_C=MERGE_BLOCK, TILES=tiles, num_warps=min(max(tiles // 2, 4), 16),
    )  # fmt: skip
    return log_q, out, lse


def _torch_topk_logprob(
    hidden: Tensor, weight: Tensor, k: int, bias: Tensor | None, temperature: float, seed: int | Tensor | None,
    sequences: Tensor | None, positions: Tensor | None, vocabulary: Tensor | None, stream: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_arguments(hidden, weight, k, bias, temperature, seed, sequences, positions, vocabulary)
    z = (hidden @ weight.T).float()  # [M, Vd]
    if bias is not None:
        z += bias
    z /= temperature
    lse = torch.logsumexp(z, -1)
    if seed is None or sequences is None or positions is None:
        values, columns = z.topk(k, -1)
        return values - lse[:, None], columns, lse
    size = weight.shape[0] if vocabulary is None else int(vocabulary.max()) + 1
    noise = counter_noise(seed, sequences, positions, size, stream)  # [M, V]
    columns = (z + (noise if vocabulary is None else noise[:, vocabulary])).topk(k, -1).indices
    return z.gather(-1, columns) - lse[:, None], columns, lse


def topk_logprob(
    hidden: Tensor, weight: Tensor, k: int, bias: Tensor | None = None, temperature: float = 1.0,
    seed: int | Tensor | None = None, sequences: Tensor | None = None, positions: Tensor | None = None,
    vocabulary: Tensor | None = None, stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The k best draft tokens and their log-probabilities. Triton on a CUDA device, else torch.

    Args:
        hidden: [M, H] draft states, after the draft's final norm.
        weight: [Vd, H] the draft's lm_head, of hidden's dtype.
        k: children per state, at most 64.
        bias: [Vd] or None.
        temperature: of the draft.
        seed: None for the likeliest tokens, else the noise's seed (an integer, or a one-element tensor read on the device).
        sequences, positions: [M] integers that key the noise; the position is that of the token being drafted.
        vocabulary: [Vd] target ids of the columns, by which the noise is keyed; None: the columns themselves.
        stream: stream of the noise.

    Returns: log q [M, k] float32 in the order of the (noisy) score, columns [M, k] int64, lse [M] float32.
    """
    form = launch_topk_logprob if hidden.is_cuda else _torch_topk_logprob
    return form(hidden, weight, k, bias, temperature, seed, sequences, positions, vocabulary, stream)
