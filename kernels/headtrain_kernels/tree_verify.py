"""The walk down a tree of drafted tokens: at each node the target's choice, then the child that carries it.

    y_v = argmax_x logits[v, x] + g(seed, sequence, position + depth(v), x)          (no g in greedy decoding)
    v <- the child of v with token y_v, while there is one; the y of the last node is the next token

Shapes: logits [B, n, V] after the processors of each node's own path, tokens, parents, depths, valid [B, n]; path [B, D + 1],
count and token [B]. Ties go to the lowest token, as in torch.argmax on a CPU. -inf is allowed, NaN is not.

Two launches. The first gives each program a block of the vocabulary and a few nodes; the noise of a position is computed
in registers when the depth changes, so nodes should be sorted by depth, which costs speed alone. The second, one program a
sequence, reduces the blocks of the visited nodes and walks. Every logit is read once, no score is written.
"""

from typing import Any

import torch
from torch import Tensor

from headtrain_kernels._triton import next_power_of_2, tl, triton
from headtrain_kernels.ancestors import MAX_NODES
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

BLOCK_V = 1024
NODES_PER_PROGRAM = 8


@triton.jit
def _position_noise(seed, sequence, position, stream, token):
    return gumbel_of(noise_bits(noise_key(seed, sequence, position, stream), token))


@triton.jit(do_not_specialize=["seed", "stream"])
def _choose_kernel(
    logits_ptr, depth_ptr, value_ptr, index_ptr, sequence_ptr, position_ptr, seed, stream,
    stride_b, stride_n, num_nodes, V,
    NODES: tl.constexpr, BLOCK_V: tl.constexpr, HAS_NOISE: tl.constexpr, SEED_PTR: tl.constexpr,
):  # fmt: skip
    """Largest score of each node within one block of the vocabulary, and its token."""
    block = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    token = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = token < V
    noise = tl.zeros((BLOCK_V,), tl.float32)
    known = tl.full((), -1, tl.int64)
    first = tl.program_id(1) * NODES
    for node in range(first, tl.minimum(first + NODES, num_nodes)):
        at = logits_ptr + batch * stride_b + node * stride_n + token
        scores = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
        if HAS_NOISE:
            depth = tl.load(depth_ptr + batch * num_nodes + node).to(tl.int64)
            if depth != known:
                sequence = tl.load(sequence_ptr + batch).to(tl.int64)
                position = tl.load(position_ptr + batch).to(tl.int64) + depth
                key_seed = load_seed(seed, SEED_PTR)
                noise = _position_noise(key_seed, sequence, position, tl.full((), stream, tl.int64), token.to(tl.int64))
            known = depth
            scores = scores + noise
        value, index = tl.max(scores, 0, return_indices=True)
        out = (batch * num_nodes + node) * tl.num_programs(0) + block
        tl.store(value_ptr + out, value)
        tl.store(index_ptr + out, block * BLOCK_V + index)


@triton.jit
def _walk_kernel(
    value_ptr, index_ptr, token_ptr, parent_ptr, valid_ptr, path_ptr, count_ptr, chosen_ptr,
    num_nodes, num_blocks, path_size, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK_N)
    real = ids < num_nodes
    tokens = tl.load(token_ptr + batch * num_nodes + ids, mask=real, other=-1).to(tl.int64)
    parents = tl.load(parent_ptr + batch * num_nodes + ids, mask=real, other=-1).to(tl.int64)
    valid = tl.load(valid_ptr + batch * num_nodes + ids, mask=real, other=0) != 0
    blocks = tl.arange(0, BLOCK_B)
    node = tl.full((), 0, tl.int64)
    count = tl.full((), 0, tl.int64)
    chosen = tl.full((), 0, tl.int64)
    walking = tl.full((), 1, tl.int32)
    for step in range(0, path_size):
        tl.store(path_ptr + batch * path_size + step, tl.where(walking != 0, node, -1))
        at = (batch * num_nodes + node) * num_blocks + blocks
        values = tl.load(value_ptr + at, mask=blocks < num_blocks, other=float("-inf"))
        best = tl.argmax(values, 0)
        y = tl.load(index_ptr + (batch * num_nodes + node) * num_blocks + best).to(tl.int64)
        chosen = tl.where(walking != 0, y, chosen)
        child = tl.min(tl.where(real & valid & (parents == node) & (tokens == y), ids, BLOCK_N), 0)
        found = (child < BLOCK_N) & (walking != 0) & (step < path_size - 1)
        node = tl.where(found, child.to(tl.int64), node)
        count = count + found.to(tl.int64)
        walking = found.to(tl.int32)
    tl.store(count_ptr + batch, count)
    tl.store(chosen_ptr + batch, chosen)


def check_arguments(
    logits: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, valid: Tensor, max_depth: int,
    seed: int | Tensor | None, sequences: Tensor | None, positions: Tensor | None,
) -> None:  # fmt: skip
    check_shape("logits", logits, None, None, None)
    batch, num_nodes, _ = logits.shape
    assert 1 <= num_nodes <= MAX_NODES, f"logits: {num_nodes} nodes received, 1 to {MAX_NODES} expected"
    assert max_depth >= 0, f"max_depth: {max_depth} received, at least 0 expected"
    check_dtype("logits", logits, *FLOATS)
    check_rows("logits", logits)
    for name, tensor in (("tokens", tokens), ("parents", parents), ("depths", depths), ("valid", valid)):
        check_shape(name, tensor, batch, num_nodes)
        check_device(name, tensor, logits.device)
    for name, tensor in (("tokens", tokens), ("parents", parents), ("depths", depths)):
        check_dtype(name, tensor, *INTEGERS)
    check_dtype("valid", valid, torch.bool)
    if seed is not None:
        assert sequences is not None, "sequences: None received, a tensor [B] expected with a seed"
        assert positions is not None, "positions: None received, a tensor [B] expected with a seed"
        check_shape("sequences", sequences, batch)
        check_shape("positions", positions, batch)


def launch_tree_verify(
    logits: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, valid: Tensor, max_depth: int,
    seed: int | Tensor | None, sequences: Tensor | None, positions: Tensor | None, stream: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_arguments(logits, tokens, parents, depths, valid, max_depth, seed, sequences, positions)
    for name, tensor in (("tokens", tokens), ("parents", parents), ("depths", depths), ("valid", valid)):
        check_contiguous(name, tensor)
    batch, num_nodes, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, BLOCK_V)
    integers: dict[str, Any] = {"dtype": torch.int64, "device": logits.device}
    values = torch.empty(batch, num_nodes, num_blocks, dtype=torch.float32, device=logits.device)
    indices = torch.empty(batch, num_nodes, num_blocks, dtype=torch.int32, device=logits.device)
    path = torch.empty(batch, max_depth + 1, **integers)  # [B, D + 1]
    count, chosen = torch.empty(batch, **integers), torch.empty(batch, **integers)
    unused = depths
    nodes = min(NODES_PER_PROGRAM, next_power_of_2(num_nodes))
    _choose_kernel[(num_blocks, triton.cdiv(num_nodes, nodes), batch)](
        logits, depths, values, indices,
        unused if sequences is None else sequences.contiguous(), unused if positions is None else positions.contiguous(),
        0 if seed is None else seed_argument(seed), stream, logits.stride(0), logits.stride(1), num_nodes, vocabulary,
        NODES=nodes, BLOCK_V=BLOCK_V, HAS_NOISE=seed is not None, SEED_PTR=isinstance(seed, Tensor), num_warps=4,
    )  # fmt: skip
    _walk_kernel[(batch,)](
        values, indices, tokens, parents, valid, path, count, chosen, num_nodes, num_blocks, max_depth + 1,
        BLOCK_N=next_power_of_2(num_nodes), BLOCK_B=next_power_of_2(num_blocks), num_warps=1,
    )  # fmt: skip
    return path, count, chosen


def _torch_tree_verify(
    logits: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, valid: Tensor, max_depth: int,
    seed: int | Tensor | None, sequences: Tensor | None, positions: Tensor | None, stream: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Only the rows of visited nodes are read."""
    check_arguments(logits, tokens, parents, depths, valid, max_depth, seed, sequences, positions)
    batch, num_nodes, vocabulary = logits.shape
    rows, ids = torch.arange(batch, device=logits.device), torch.arange(num_nodes, device=logits.device)
    path = torch.full((batch, max_depth + 1), -1, device=logits.device)  # [B, D + 1]
    node = torch.zeros(batch, dtype=torch.int64, device=logits.device)  # [B]
    count, chosen, walking = node.clone(), node.clone(), torch.ones_like(node, dtype=torch.bool)
    for step in range(max_depth + 1):
        path[:, step] = torch.where(walking, node, -1)
        scores = logits[rows, node].float()  # [B, V]
        if seed is not None and sequences is not None and positions is not None:
            scores += counter_noise(seed, sequences, positions + depths[rows, node], vocabulary, stream)
        chosen = torch.where(walking, scores.argmax(-1), chosen)
        matches = valid & (parents == node[:, None]) & (tokens == chosen[:, None])  # [B, n]
        child = torch.where(matches, ids, num_nodes).amin(1)
        walking = walking & (child < num_nodes) & (step < max_depth)
        node = torch.where(walking, child, node)
        count = count + walking
    return path, count, chosen


def tree_verify(
    logits: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, valid: Tensor, max_depth: int,
    seed: int | Tensor | None = None, sequences: Tensor | None = None, positions: Tensor | None = None, stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Walk each tree along the target's choices without a host read. Triton on a CUDA device, else torch.

    Args:
        logits: [B, n, V] target logits of each node, processors and temperature applied, dense rows.
        tokens: [B, n] integers; node 0 is the root.
        parents: [B, n] integers, -1 at the root.
        depths: [B, n] integers, 0 at the root.
        valid: [B, n] bool; False: padding, never accepted.
        max_depth: D, depth of the deepest node; the path has D + 1 columns.
        seed: None for greedy, else the seed of the noise (an integer, or a one-element tensor read on the device).
        sequences: [B] integers that key the noise.
        positions: [B] integers, absolute position of the token that the root chooses.
        stream: stream of the noise.

    Returns: path [B, D + 1] int64 node ids from the root on, then -1; count [B] int64 accepted nodes without the root;
    token [B] int64, the choice at the last node of the path.
    """
    form = launch_tree_verify if logits.is_cuda else _torch_tree_verify
    return form(logits, tokens, parents, depths, valid, max_depth, seed, sequences, positions, stream)
