"""Several conversations end to end in one row, none of which sees another.

A packed micro-batch is a single row without padding. `documents` are its lengths, one a conversation; positions start
anew in each, and attention runs conversation by conversation, so its cost is the sum of squares, not the square of the
sum.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import AttentionInterface

from decode.attention import Visibility, tree_attention
from decode.attention import forward as attend

NAME = "headtrain_packed"
Documents = tuple[int, ...]  # lengths of the conversations of a row


def spans(documents: Documents, num_tokens: int | None = None) -> Iterator[slice]:
    """Where each conversation stands in the row, which is cut to `num_tokens`."""
    start = 0
    for length in documents:
        end = start + length if num_tokens is None else min(start + length, num_tokens)
        if start < end:
            yield slice(start, end)
        start += length


def positions_of(documents: Documents, device: torch.device | None = None) -> Tensor:
    """[1, T]: the position of each token in its conversation."""
    return torch.cat([torch.arange(length, device=device) for length in documents])[None]


def starts_of(documents: Documents, device: torch.device | None = None) -> Tensor:
    """[1, T]: where in the row the conversation of each token starts."""
    num_tokens = sum(documents)
    return torch.arange(num_tokens, device=device)[None] - positions_of(documents, device)


def packed_forward(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, documents: Documents, **options):
    """The attention function given to transformers: causal in each conversation. query [1, Hq, T, d].

    Returns [1, T, Hq, dv].
    """
    assert query.shape[2] == sum(documents), f"query: expected {sum(documents)} positions, got {query.shape[2]}"
    prompt = Visibility(query.new_zeros(1, dtype=torch.int64), query.new_zeros(1, 1, dtype=torch.int64), None, 0, 1)
    parts = [
        attend(module, query[:, :, s], key[:, :, s], value[:, :, s], None, tree=prompt, **options)[0]
        for s in spans(documents)
    ]
    return torch.cat(parts, 1), None


AttentionInterface.register(NAME, packed_forward)


def packed_states(model, input_ids: Tensor, documents: Sequence[int]) -> Tensor:
    """The last hidden state [1, T, H] of a packed row [1, T]."""
    documents = tuple(documents)
    with tree_attention(model, NAME):
        return model.base_model(
            input_ids=input_ids,
            position_ids=positions_of(documents, input_ids.device),
            use_cache=False,
            documents=documents,
        )[0]
