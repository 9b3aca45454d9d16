"""Random rows on a tiny target, heads on it, and draft vocabularies."""

from __future__ import annotations

import torch
from torch import Tensor

from headtrain.heads.base import Batch, Head, load_family
from headtrain.target import Target
from tests.tiny import VOCAB_SIZE, tiny_target

VOCABULARY = torch.arange(1, VOCAB_SIZE, 3)


def make_target(family: str = "llama") -> Target:
    return Target(tiny_target(family, num_hidden_layers=3))


def make_head(family: str, target: Target, vocabulary: Tensor | None = None, seed: int = 0, **config) -> Head:
    """A head with random weights everywhere, so that nothing is the identity by chance."""
    kind = load_family(family)
    head = kind.build(kind.Config(**{"vocabulary": None, **config}), target, vocabulary)
    g = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=g)
    return head.eval()


def make_batch(head: Head, target: Target, rows: int = 2, length: int = 14, mask=None, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(VOCAB_SIZE, (rows, length), generator=g)
    loss_mask = torch.ones_like(input_ids) if mask is None else torch.tensor(mask)
    return Batch(input_ids, loss_mask, *target.features(input_ids, head.target_layers))
