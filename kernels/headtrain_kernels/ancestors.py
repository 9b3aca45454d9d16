"""Who sees whom in a tree: ancestor bits for the kernel, an additive mask for the torch form.

Node j of sequence b sits in cache slot lengths[b] + j and at position lengths[b] + depths[b, j]; siblings share a position.
"""

import torch
from torch import Tensor

MAX_NODES = 128  # two words of 64 bits


def pack_ancestors(ancestors: Tensor) -> Tensor:
    """[B, m, n] bool (row v: v itself, its ancestors, the root) -> [B, m, 2] int64, bit j % 64 of word j // 64 for node j."""
    num_nodes = ancestors.shape[-1]
    assert num_nodes <= MAX_NODES, f"ancestors: {num_nodes} nodes received, at most {MAX_NODES} expected"
    bits = torch.zeros(*ancestors.shape[:-1], MAX_NODES, dtype=torch.int64, device=ancestors.device)  # [B, n, 128]
    bits[..., :num_nodes] = ancestors
    shifts = torch.arange(64, device=ancestors.device)
    return (bits.unflatten(-1, (2, 64)) << shifts).sum(-1)


def unpack_ancestors(words: Tensor, num_nodes: int | None = None) -> Tensor:
    """[B, m, 2] int64 -> [B, m, num_nodes] bool; num_nodes is m by default."""
    shifts = torch.arange(64, device=words.device)
    bits = (words[..., None] >> shifts) & 1  # [B, n, 2, 64]
    return bits.flatten(-2)[..., : words.shape[-2] if num_nodes is None else num_nodes].bool()


def tree_mask(
    lengths: Tensor, depths: Tensor, words: Tensor, total: int, window: int | None = None, dtype=torch.float32
) -> Tensor:
    """Additive mask [B, m, total] over slots 0..total-1: 0 where a node sees a slot, -inf elsewhere.

    Compute it once per step and window, not once per layer. lengths [B], depths [B, n], words [B, m, 2] of the last m nodes.
    """
    num_nodes, queries = depths.shape[1], words.shape[1]
    slots = torch.arange(total, device=depths.device)  # [S]
    node = slots - lengths[:, None]  # [B, S], negative in the prefix
    in_tree = (node >= 0) & (node < num_nodes)
    index = node.clamp(0, num_nodes - 1)  # [B, S]
    ancestor = unpack_ancestors(words, num_nodes).gather(2, index[:, None].expand(-1, queries, -1))  # [B, m, S]
    sees = torch.where(in_tree[:, None], ancestor, (node < 0)[:, None])
    if window is not None:
        position = torch.where(in_tree, lengths[:, None] + depths.gather(1, index), slots)  # [B, S]
        sees &= (lengths[:, None] + depths[:, num_nodes - queries :])[:, :, None] - position[:, None] < window
    return torch.zeros((), dtype=dtype, device=depths.device).where(sees, float("-inf"))
