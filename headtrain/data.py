"""Conversations to flat arrays of tokens, and their rows to micro-batches."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from decode.errors import UserError
from headtrain.conversations import Row, load_rows
from headtrain.masks import Text, Unusable, render, render_rows, require_template, tokenize
from headtrain.recipe import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POOL = 64  # micro-batches whose rows are sorted by length together


@dataclass
class Counts:
    """What became of the conversations: read + split = kept + the sum of dropped."""

    read: int = 0  # conversations
    split: int = 0  # further rows from conversations that give one row per reply
    kept: int = 0  # rows of the data set
    dropped: Counter[str] = field(default_factory=Counter)  # rows by reason
    first: dict[str, str] = field(default_factory=dict)  # where the first row dropped for a reason stands
    truncated: int = 0  # kept rows that were cut at max_length
    altered: int = 0  # kept rows whose ids do not decode to the rendered text: the tokenizer changes it
    tokens: int = 0  # of the kept rows
    trained: int = 0  # tokens of the kept rows under the loss mask

    def drop(self, reason: str, where: str) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, where)


@dataclass
class Dataset:
    """Tokenized rows, end to end in flat arrays."""

    ids: np.ndarray  # [N] int32
    masks: np.ndarray  # [N] uint8
    offsets: np.ndarray  # [R + 1] int64: row r is ids[offsets[r]:offsets[r + 1]]
    origins: list[str]  # [R] where each row was read
    counts: Counts
    fingerprint: str  # of tokenizer, template, settings and content

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask of one row, both [T]."""
        part = slice(self.offsets[row], self.offsets[row + 1])
        return self.ids[part], self.masks[part]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def build_dataset(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str = "train", progress: bool = True
) -> Dataset:
    """Tokenizes the conversations of `data.train` (or `data.eval`). Raises UserError if no token is trained."""
    sources = config.train if split == "train" else config.eval or ()
    rows = load_rows(sources, config.limit, config.seed)
    dataset = encode_rows(config, tokenizer, rows, progress)
    require_trained(dataset, rows[0], config, tokenizer, f"data.{split}")
    return dataset


def require_trained(dataset: Dataset, row: Row, config: DataConfig, tokenizer, key: str) -> None:
    """Raises UserError with the reasons and a rendered sample when no token of the data set is trained."""
    if dataset.counts.trained:
        return
    reasons = "; ".join(f"{number} x {reason}" for reason, number in dataset.counts.dropped.most_common(3))
    try:
        text = render(tokenizer, row.messages, config.template_kwargs)
    except Unusable:
        text = json.dumps(row.messages, ensure_ascii=False)
    sample = text if len(text) <= 200 else text[:200] + "..."
    raise UserError(
        f"{key}: no token is trained ({reasons}); {row.where} is {sample!r}; look with `headtrain inspect RECIPE`"
    )


def encode_rows(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], progress: bool = True, chunk: int = 256
) -> Dataset:
    """Tokenizes conversations, cuts them at `max_length` and accounts for each. The data set may be empty."""
    from rich.progress import track

    require_template(tokenizer)
    counts = Counts(read=len(rows))
    ids: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    origins: list[str] = []
    starts = range(0, len(rows), chunk)
    for begin in track(starts, "tokenizing", transient=True, disable=not progress or len(starts) < 4):
        texts: list[Text] = []
        places: list[str] = []
        for row in rows[begin : begin + chunk]:
            try:
                rendered = render_rows(tokenizer, row.messages, config.turns, config.template_kwargs, row.finished)
            except Unusable as reason:
                counts.drop(str(reason), row.where)
                continue
            counts.split += len(rendered) - 1
            texts += rendered
            places += [row.where] * len(rendered)
        for (encoded, faithful), where in zip(tokenize(tokenizer, texts), places, strict=True):
            mask = np.array(encoded.mask[: config.max_length], dtype=np.uint8)
            if not mask.any():
                counts.drop("reply beyond data.max_length" if any(encoded.mask) else "no trained token", where)
                continue
            counts.kept += 1
            counts.truncated += len(encoded.ids) > config.max_length
            counts.altered += not faithful
            ids.append(np.array(encoded.ids[: config.max_length], dtype=np.int32))
            masks.append(mask)
            origins.append(where)
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    flat_ids = np.concatenate(ids) if ids else np.empty(0, np.int32)
    flat_masks = np.concatenate(masks) if masks else np.empty(0, np.uint8)
    counts.tokens, counts.trained = len(flat_ids), int(flat_masks.sum())
    settings = [str(tokenizer.chat_template), config.turns, config.max_length, config.template_kwargs]
    parts = [_vocabulary(tokenizer), json.dumps(settings, sort_keys=True).encode()]
    parts += [array.tobytes() for array in (flat_ids, flat_masks, offsets)]
    fingerprint = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return Dataset(flat_ids, flat_masks, offsets, origins, counts, fingerprint)


def _vocabulary(tokenizer) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))).encode()


def batches(
    dataset: Dataset,
    batch_tokens: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world: int = 1,
    accumulation: int = 1,
    pack: bool = False,
) -> list[list[int]]:
    """This rank's micro-batches of one epoch, as lists of row indices.

    Rows of similar length stand together; rows x longest row <= batch_tokens, but a longer single row forms its own.
    With `pack` rows that fill batch_tokens stand together; a micro-batch is then one row of them end to end.
    Every rank gets the same number, a multiple of `accumulation`: micro-batches are halved until the count divides, so
    each row is seen exactly once. Where all are single rows already, fewer than world x accumulation are repeated.
    Micro-batch i of the epoch goes to rank i mod world, so runs with the same world x accumulation take the same steps.
    """
    assert 0 <= rank < world and accumulation >= 1, f"rank {rank} of world {world}, accumulation {accumulation}"
    random = np.random.default_rng([seed, epoch])
    lengths = dataset.lengths
    order = random.permutation(len(dataset))
    # Sorting pools of rows instead of all rows keeps the company of a row changing from epoch to epoch.
    pool = max(1, POOL * batch_tokens * len(dataset) // max(1, len(dataset.ids)))
    groups: list[list[int]] = []
    for begin in range(0, len(order), pool):
        rows = order[begin : begin + pool]
        if pack:
            groups += fill_bins(rows.tolist(), lengths, batch_tokens)
            continue
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        group: list[int] = []
        for row in rows.tolist():  # ascending, so the new row is the longest
            if group and (len(group) + 1) * lengths[row] > batch_tokens:
                groups.append(group)
                group = []
            group.append(row)
        groups.append(group)
    share = world * accumulation
    while len(groups) % share:
        largest = max(range(len(groups)), key=lambda index: len(groups[index]))
        rows_of = groups[largest]
        if len(rows_of) == 1:
            groups += list(islice(cycle(groups), share - len(groups) % share))
            break
        groups[largest : largest + 1] = [rows_of[: len(rows_of) // 2], rows_of[len(rows_of) // 2 :]]
    return [groups[index] for index in random.permutation(len(groups)).tolist()[rank::world]]


def places(dataset: Dataset, rows: Sequence[int], pack: bool) -> int:
    """Tokens of a micro-batch as it is computed, padding included."""
    lengths = dataset.lengths[list(rows)]
    return int(lengths.sum() if pack else len(lengths) * lengths.max())


def fill_bins(rows: Sequence[int], lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Best fit, longest first: each row goes where the least room is left behind it. A row over `capacity` is alone."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        fitting = [index for index, left in enumerate(room) if left >= lengths[row]]
        if fitting:
            index = min(fitting, key=room.__getitem__)
            bins[index].append(row)
            room[index] -= int(lengths[row])
        else:
            bins.append([row])
            room.append(capacity - int(lengths[row]))
    return bins


def collate_packed(dataset: Dataset, rows: Sequence[int]) -> dict[str, Tensor]:
    """input_ids [1, T] int64 and loss_mask [1, T] bool of the rows end to end; lengths [B] and row_ids [B] int64."""
    parts = [dataset[row] for row in rows]
    ids, masks = (np.concatenate([part[i] for part in parts]) for i in range(2))
    return {
        "input_ids": torch.from_numpy(ids.astype(np.int64))[None],
        "loss_mask": torch.from_numpy(masks.astype(bool))[None],
        "lengths": torch.from_numpy(dataset.lengths[list(rows)]),
        "row_ids": torch.tensor(list(rows), dtype=torch.int64),
    }


def collate(dataset: Dataset, rows: Sequence[int], pad_id: int) -> dict[str, Tensor]:
    """input_ids [B, T] int64 and loss_mask [B, T] bool, right padded; lengths [B] and row_ids [B] int64."""
    lengths = dataset.lengths[list(rows)]
    input_ids = torch.full((len(rows), int(lengths.max())), pad_id, dtype=torch.int64)
    loss_mask = torch.zeros(input_ids.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids, mask = dataset[row]
        input_ids[index, : len(ids)] = torch.from_numpy(ids)
        loss_mask[index, : len(ids)] = torch.from_numpy(mask)
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "lengths": torch.from_numpy(lengths),
        "row_ids": torch.tensor(list(rows), dtype=torch.int64),
    }
