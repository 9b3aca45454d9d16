"""Where a micro-batch's hidden states come from: the target itself, or shards on disk.

A cache folder holds `manifest.json` and shards `shard-00000.safetensors`, ... Each shard covers consecutive rows of
the data set, laid end to end: features [N, F] and hidden [N, H]. The manifest says what the states were made from, and
a reader refuses a cache that was made from anything else. Stored as float8_e4m3fn, each position and boundary has a
scale of its own (`features_scale` [N, L], `hidden_scale` [N, 1]), and the manifest says how far the states are off.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decode.errors import UserError
from headtrain.checkpoint import write_text
from headtrain.data import Dataset, collate, collate_packed
from headtrain.heads.base import Batch
from headtrain.target import Target

SHARD_TOKENS = 1 << 16
MANIFEST = "manifest.json"
NAMES = ("features", "hidden")
FLOAT8 = torch.float8_e4m3fn


class Features(Protocol):
    def batch(self, rows: Sequence[int]) -> Batch:
        """The micro-batch of these rows of the data set."""
        ...


class OnlineFeatures:
    """Runs the frozen target on each micro-batch. With `pack` its rows lie end to end in one."""

    def __init__(self, dataset: Dataset, target: Target, layers: Sequence[int], pack: bool = False):
        self.dataset, self.target, self.layers, self.pack = dataset, target, tuple(layers), pack

    def batch(self, rows: Sequence[int]) -> Batch:
        if self.pack:
            packed = collate_packed(self.dataset, rows)
            ids, mask = (packed[name].to(self.target.device) for name in ("input_ids", "loss_mask"))
            documents = tuple(packed["lengths"].tolist())
            return Batch(ids, mask, *self.target.features(ids, self.layers, documents), documents=documents)
        columns = collate(self.dataset, rows, pad_id=0)
        input_ids = columns["input_ids"].to(self.target.device)
        features, hidden = self.target.features(input_ids, self.layers)
        return Batch(input_ids, columns["loss_mask"].to(self.target.device), features, hidden)


class CachedFeatures:
    """Reads the shards of a cache folder. Raises UserError for a stale, foreign or damaged cache."""

    def __init__(
        self,
        dataset: Dataset,
        target: Target,
        layers: Sequence[int],
        folder: Path,
        pack: bool = False,
        storage: str = "target",
    ):
        self.dataset, self.device, self.pack = dataset, target.device, pack
        self.dtype, self.scaled = target.dtype, storage != "target"
        manifest = describe(dataset, target, layers, storage)
        require_manifest(folder, manifest)
        spans = shard_spans(dataset)
        self.shards = [_open_shard(folder / _shard_name(i), dataset, span) for i, span in enumerate(spans)]
        self.shard_of = np.repeat(np.arange(len(spans)), [end - start for start, end in spans])
        self.first = np.array([dataset.offsets[start] for start, _ in spans])

    def batch(self, rows: Sequence[int]) -> Batch:
        if self.pack:
            packed = collate_packed(self.dataset, rows)
            parts = zip(*map(self._row, rows), strict=True)
            features, hidden = (torch.cat(part)[None] for part in parts)
            documents = tuple(packed["lengths"].tolist())
            batch = Batch(packed["input_ids"], packed["loss_mask"], features, hidden, documents)
            return batch.to(self.device)
        columns = collate(self.dataset, rows, pad_id=0)
        length = columns["input_ids"].shape[1]
        states = [self._row(row) for row in rows]
        features, hidden = (
            torch.stack([torch.nn.functional.pad(x, (0, 0, 0, length - len(x))) for x in parts])
            for parts in zip(*states, strict=True)
        )
        batch = Batch(columns["input_ids"], columns["loss_mask"], features, hidden)
        return batch.to(self.device)

    def _row(self, row: int) -> tuple[Tensor, Tensor]:
        shard = self.shard_of[row]
        start, end = self.dataset.offsets[row : row + 2] - self.first[shard]

        def part(name: str) -> Tensor:
            return self.shards[shard].get_slice(name)[start:end]

        if self.scaled:
            features, hidden = (from_float8(part(name), part(f"{name}_scale"), self.dtype) for name in NAMES)
        else:
            features, hidden = map(part, NAMES)
        return features, hidden


def open_features(
    dataset: Dataset,
    target: Target,
    layers: Sequence[int],
    cache: str | None,
    pack: bool = False,
    storage: str = "target",
) -> Features:
    """The source of hidden states that a recipe asks for: `data.cache` of `data.cache_dtype`, or the target itself."""
    if cache is None:
        return OnlineFeatures(dataset, target, layers, pack)
    return CachedFeatures(dataset, target, layers, Path(cache), pack, storage)


def write_cache(
    dataset: Dataset, target: Target, layers: Sequence[int], folder: Path, batch_tokens: int, storage: str = "target"
) -> Iterator[int]:
    """Fill a cache folder, shard by shard; yields the tokens done after each. Complete shards of an earlier run stay."""
    manifest = describe(dataset, target, layers, storage)
    scaled = storage != "target"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            require_manifest(folder, manifest)
        else:
            write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        online = OnlineFeatures(dataset, target, layers)
        for index, span in enumerate(shard_spans(dataset)):
            path = folder / _shard_name(index)
            if not _is_complete(path, dataset, span):
                _write_shard(path, online, span, batch_tokens, scaled)
            yield int(dataset.offsets[span[1]])
        if scaled:
            errors = _errors(sorted(folder.glob("shard-*.safetensors")), len(dataset.ids))
            write_text(folder / MANIFEST, json.dumps({**manifest, "relative_error": errors}, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{folder}: the cache is incomplete ({error.strerror}); free space and run it again") from error


def to_float8(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """States x [N, L * size] as float8 of the same shape, and scales [N, L] that take the greatest of each to 448."""
    parts = x.float().view(len(x), x.shape[1] // size, size)  # [N, L, size]
    greatest = parts.abs().amax(-1) if parts.numel() else parts.new_zeros(parts.shape[:2])
    scale = (greatest / torch.finfo(FLOAT8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (parts / scale[:, :, None]).to(FLOAT8).view(x.shape), scale


def from_float8(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [N, L * size] again, of `stored` [N, L * size] and `scale` [N, L]."""
    parts = stored.float().view(*scale.shape, stored.shape[1] // max(1, scale.shape[1]))
    return (parts * scale[:, :, None]).to(dtype).view(stored.shape)


def relative_errors(x: Tensor, found: Tensor, size: int) -> Tensor:
    """|x - found| / |x| of each position and boundary, [N, L], of states [N, L * size]."""
    x, found = (y.float().view(len(y), y.shape[1] // size, size) for y in (x, found))
    return (x - found).norm(dim=-1) / x.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)


def cache_error(folder: Path) -> dict[str, float] | None:
    """Relative errors that float8 storage made (`features`, `hidden`: means; `worst`), as the manifest has them."""
    return json.loads((folder / MANIFEST).read_text()).get("relative_error")


def _errors(shards: Sequence[Path], tokens: int) -> dict[str, float]:
    sums, worst = dict.fromkeys(NAMES, 0.0), 0.0
    for path in shards:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        worst = max(worst, float(metadata["worst"]))
        for name in NAMES:
            sums[name] += float(metadata[name])
    return {**{name: value / tokens for name, value in sums.items()}, "worst": worst}


def bytes_per_token(target: Target, layers: Sequence[int], storage: str = "target") -> int:
    """What a cache stores for one token."""
    size = target.hidden_size
    return (len(layers) + 1) * (size * target.dtype.itemsize if storage == "target" else size + 4)


def describe(dataset: Dataset, target: Target, layers: Sequence[int], storage: str = "target") -> dict[str, Any]:
    """The manifest: everything the stored states depend on."""
    return {
        "format": 1,
        "dtype": str(target.dtype).removeprefix("torch."),  # before the target, whose hash it changes
        "target": fingerprint(target),
        "data": dataset.fingerprint,  # covers tokenizer, template, settings and content
        "layers": list(layers),
        "rows": len(dataset),
        "tokens": len(dataset.ids),
        "hidden_size": target.hidden_size,
        "storage": storage,
    }


def fingerprint(target: Target) -> str:
    """Hash of the target's config and of a sample of every weight: fine-tuning may leave most of them as they were."""
    config = {
        key: value
        for key, value in target.config.to_dict().items()
        if key not in ("_name_or_path", "dtype", "transformers_version")
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for parameter in target.model.parameters():
        sample = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)]
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def require_manifest(folder: Path, expected: dict[str, Any]) -> None:
    try:
        found = {"storage": "target", **json.loads((folder / MANIFEST).read_text())}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"data.cache: {folder} holds no readable {MANIFEST}; write it with `headtrain cache`"
        ) from error
    for key, value in expected.items():
        if found.get(key) != value:
            raise UserError(
                f"data.cache: {folder} was made for {key} {found.get(key)}, this recipe needs {value};"
                " write another with `headtrain cache`, or delete it"
            )


def shard_spans(dataset: Dataset) -> list[tuple[int, int]]:
    """Row ranges [start, end) of the shards, about SHARD_TOKENS tokens each."""
    spans, start = [], 0
    while start < len(dataset):
        end = int(np.searchsorted(dataset.offsets, dataset.offsets[start] + SHARD_TOKENS))
        end = min(max(end, start + 1), len(dataset))
        spans.append((start, end))
        start = end
    return spans


def _shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def _write_shard(path: Path, online: OnlineFeatures, span: tuple[int, int], batch_tokens: int, scaled: bool) -> None:
    dataset = online.dataset
    first = dataset.offsets[span[0]]
    total = int(dataset.offsets[span[1]] - first)
    states: dict[str, Tensor] = {}
    rows = sorted(range(*span), key=lambda row: dataset.lengths[row])
    while rows:
        group = [rows.pop(0)]
        while rows and (len(group) + 1) * dataset.lengths[rows[0]] <= batch_tokens:
            group.append(rows.pop(0))
        batch = online.batch(group)
        for name in NAMES:
            value = getattr(batch, name).cpu()
            stored = states.setdefault(name, value.new_empty(total, value.shape[-1]))
            for index, row in enumerate(group):
                start, end = dataset.offsets[row : row + 2] - first
                stored[start:end] = value[index, : end - start]
    metadata = _scale(states, online.target.hidden_size) if scaled else None
    partial = path.with_name(f".{path.name}.partial")  # what a killed run left is overwritten
    try:
        save_file(states, partial, metadata)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except SafetensorError as error:
        raise OSError(0, str(error)) from error
    finally:
        partial.unlink(missing_ok=True)


def _scale(states: dict[str, Tensor], size: int) -> dict[str, str]:
    """Replace states by their float8 form. Returns sums over the positions of their relative error, and the worst."""
    errors, worst = {}, 0.0
    for name in NAMES:
        x = states[name]
        states[name], states[f"{name}_scale"] = stored, scale = to_float8(x, size)
        error = relative_errors(x, from_float8(stored, scale, x.dtype), size)  # [N, L]
        errors[name] = str(float(error.double().mean(-1).sum()) if error.numel() else 0.0)
        worst = max(worst, float(error.max()) if error.numel() else 0.0)
    return {**errors, "worst": str(worst)}


def _open_shard(path: Path, dataset: Dataset, span: tuple[int, int]):
    if not _is_complete(path, dataset, span):
        raise UserError(
            f"data.cache: {path} is missing or cut short; run `headtrain cache` again, it keeps what is whole"
        )
    return safe_open(path, "pt")


def _is_complete(path: Path, dataset: Dataset, span: tuple[int, int]) -> bool:
    tokens = int(dataset.offsets[span[1]] - dataset.offsets[span[0]])
    try:
        with safe_open(path, "pt") as file:
            return all(file.get_slice(name).get_shape()[0] == tokens for name in NAMES)
    except (OSError, SafetensorError):
        return False
