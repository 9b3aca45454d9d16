"""The nodes that a draft has extended in the current step: who descends from whom, for its own attention."""

import torch
from torch import Tensor


class Guesses:
    """depths [B, e] int64, 0 for children of the root; ancestors [B, e, e] bool, each node its own ancestor."""

    def __init__(self, batch: int, device: torch.device):
        self.depths = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        self.ancestors = torch.zeros(batch, 0, 0, dtype=torch.bool, device=device)

    def add(self, parents: Tensor) -> Tensor:
        """One more level; parents [B, m]: 0 for the root, i for the i-th node added. Returns its rows [B, m, e + m]."""
        batch, m = parents.shape
        done = self.depths.shape[1]
        # Row 0 stands for the root, which is committed already: depth -1 and no ancestors among the nodes.
        depths = torch.cat([self.depths.new_full((batch, 1), -1), self.depths], 1).gather(1, parents) + 1
        above = torch.cat([self.ancestors.new_zeros(batch, 1, done), self.ancestors], 1)
        above = above.gather(1, parents[:, :, None].expand(-1, -1, done))  # [B, m, done]
        own = torch.eye(m, dtype=torch.bool, device=parents.device).expand(batch, m, m)
        rows = torch.cat([above, own], 2)
        self.depths = torch.cat([self.depths, depths], 1)
        self.ancestors = torch.cat([torch.nn.functional.pad(self.ancestors, (0, m)), rows], 1)
        return rows

    def select(self, rows: Tensor) -> None:
        self.depths, self.ancestors = self.depths[rows], self.ancestors[rows]
