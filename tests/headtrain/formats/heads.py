"""Random heads of every family for a tiny target, and what they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headtrain.checkpoint import save_head
from headtrain.heads.base import Head, load_family
from headtrain.target import Target

VOCABULARY = 40


def make_head(family: str, target: Target, seed: int = 0, **settings: Any) -> Head:
    """A head whose every parameter is random. `vocabulary`, if given, is the size of a random draft vocabulary."""
    kind = load_family(family)
    if family == "eagle3":
        settings = {"vocabulary": VOCABULARY, "steps": 2, **settings}
    torch.manual_seed(seed)
    size = settings.get("vocabulary")
    vocabulary = None if size is None else torch.randperm(target.vocab_size)[:size].sort().values
    head = kind.build(kind.Config(**settings), target, vocabulary)
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15)
    for name, parameter in head.named_parameters():
        if name.endswith("norm.weight") or "norm." in name:
            parameter.data = 1 + 0.2 * torch.randn_like(parameter)
    return head.eval()


def save(head: Head, family: str, target: Target, folder: Path) -> Path:
    save_head(folder, head, family, target)
    return folder


@torch.no_grad()
def drafts(head: Head, target: Target, seed: int = 1) -> list[torch.Tensor]:
    """Logits of `begin`, up to two levels of `extend`, and `commit`, on random features and tokens of two rows."""
    generator = torch.Generator().manual_seed(seed)

    def features(length: int) -> torch.Tensor:
        return torch.randn(2, length, len(head.target_layers) * target.hidden_size, generator=generator)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(3, target.vocab_size, (2, length), generator=generator)

    state, first = head.begin(features(6), tokens(7), torch.tensor([6, 4]), 32)
    levels = [torch.tensor([[0, 0], [0, 0]]), torch.tensor([[1, 2], [2, 1]])][: (head.max_depth or 3) - 1]
    extended = [head.extend(state, tokens(2), parents) for parents in levels]
    return [first, *extended, head.commit(state, features(3), tokens(3), torch.tensor([3, 1]))]
