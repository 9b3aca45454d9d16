"""The draft vocabulary: the tokens that the assistant writes most often."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.errors import UserError
from headtrain.data import Dataset


def choose_vocabulary(dataset: Dataset, size: int, vocab_size: int) -> Tensor | None:
    """Ascending ids [size] of the most frequent trained tokens, ties to the smaller id; None for the whole vocabulary.

    Raises UserError when `size` exceeds the target's vocabulary.
    """
    if size > vocab_size:
        raise UserError(f"head.vocabulary: {size} tokens, but the target has only {vocab_size}; lower it or give null")
    if size == vocab_size:
        return None
    counts = np.bincount(dataset.ids[dataset.masks.astype(bool)], minlength=vocab_size)[:vocab_size]
    best = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(best))


def coverage(dataset: Dataset, vocabulary: Tensor | None) -> float:
    """Share of the trained tokens that the draft vocabulary holds."""
    if vocabulary is None:
        return 1.0
    trained = dataset.ids[dataset.masks.astype(bool)]
    return float(np.isin(trained, vocabulary.numpy()).mean()) if len(trained) else 0.0


def describe_vocabulary(vocabulary: Tensor | None, target: dict[str, Any]) -> dict[str, Any] | None:
    """Size and content hash of a draft vocabulary of the target described by `describe_target`; None for the whole.

    The hash covers the target's tokenizer and size beside the ids [Vd]: the same ids mean other tokens elsewhere.
    """
    if vocabulary is None:
        return None
    digest = hashlib.sha256(f"{target['tokenizer']} {target['vocab_size']} ".encode())
    digest.update(vocabulary.cpu().numpy().astype("<i8").tobytes())
    return {"size": len(vocabulary), "hash": digest.hexdigest()[:32]}
