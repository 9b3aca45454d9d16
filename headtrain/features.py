"""Where a micro-batch's hidden states come from: the target itself, or shards on disk."""

from collections.abc import Sequence

import torch

from headtrain.data import Dataset, collate
from headtrain.heads.base import Batch
from headtrain.target import Target


class OnlineFeatures:
    """Runs the frozen target on each micro-batch."""

    def __init__(self, dataset: Dataset, target: Target, layers: Sequence[int], pad_id: int = 0):
        self.dataset, self.target, self.layers, self.pad_id = dataset, target, tuple(layers), pad_id

    def batch(self, rows: Sequence[int]) -> Batch:
        columns = collate(self.dataset, rows, self.pad_id)
        input_ids = columns["input_ids"].to(self.target.device)
        features, hidden = self.target.features(input_ids, self.layers)
        return Batch(input_ids, columns["loss_mask"].to(self.target.device), features, hidden)


def trained_tokens(dataset: Dataset, rows: Sequence[int]) -> torch.Tensor:
    """loss_mask [B, T] of a micro-batch, without its hidden states."""
    return collate(dataset, rows, 0)["loss_mask"]
