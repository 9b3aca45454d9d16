"""The target's KV cache: B rows of their own lengths, a tree written behind each, one path of it kept.

All layers share one tensor [layers, 2, B, Hkv, capacity, d], so keeping a path is one move for the whole model. Slots
start at zero and only ever hold what the model wrote, so a slot that nobody may see is still finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.errors import UserError
from decode.gpu import runs_kernels

GRANULE = 64  # capacities are multiples of this


class TreeLayer(CacheLayerMixin):
    """What the attention of one layer sees of a `TreeCache`."""

    def __init__(self, cache: TreeCache, index: int):
        super().__init__()
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object):
        return self.cache.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.end, 0

    def get_seq_length(self) -> int:
        return self.cache.start or 0

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """`open` a step, let the model write n tokens behind each row, then `commit` a path of them.

    lengths [B] int64 counts the committed tokens of each row; the host knows them too (`host_lengths`).
    """

    def __init__(self, num_layers: int, batch: int, capacity: int, device: torch.device | str = "cpu"):
        super().__init__(layers=[TreeLayer(self, i) for i in range(num_layers)])
        self.host_lengths = [0] * batch
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.capacity = -(-capacity // GRANULE) * GRANULE
        self.store: Tensor | None = None  # [layers, 2, B, Hkv, capacity, d]
        self.start: int | None = 0
        self.end = self.nodes = self.written = 0
        self._reads: tuple[Tensor, ...] = ()
        self._writes: tuple[Tensor, ...] = ()
        self._slots: tuple[Tensor, Tensor] | None = None

    def open(self, nodes: int, written: int = 0) -> tuple[int | None, int]:
        """Make room for `nodes` tokens a row, behind `written` uncommitted ones of the same step.

        Returns the common length of the rows (None if they differ) and the number of slots in use.
        """
        longest = max(self.host_lengths)
        self.start = longest if min(self.host_lengths) == longest else None
        self.end, self.nodes, self.written = longest + written + nodes, nodes, written
        if self.end > self.capacity:
            self._grow(max(self.end, 2 * self.capacity))
        if self.store is not None:
            self._aim()
        return self.start, self.end

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key, value [B, Hkv, n, d] of the opened step -> the filled part of the layer, [B, Hkv, end, d] views."""
        if self.store is None:
            shape = len(self.layers), 2, *key.shape[:2], self.capacity, key.shape[-1]
            self.store = key.new_zeros(shape)
            self._aim()
        if key.shape[1::2] != value.shape[1::2] or key.shape[1] != self.store.shape[3]:
            raise UserError(
                f"target: layer {layer} caches keys {tuple(key.shape)} and values {tuple(value.shape)}, unlike layer 0;"
                " decode it with transformers' generate"
            )
        at = 2 * layer
        if self._slots is None:
            self._writes[at].copy_(key)
            self._writes[at + 1].copy_(value)
        else:
            rows, slots = self._slots
            self._writes[at][rows, :, slots] = key.transpose(1, 2)
            self._writes[at + 1][rows, :, slots] = value.transpose(1, 2)
        return self._reads[at], self._reads[at + 1]

    def commit(self, path: Tensor, counts: Sequence[int] | Tensor, moved: bool = True) -> None:
        """Keep the nodes path[b, :counts[b]] of each row, in this order, and forget the rest.

        path [B, m] node ids of the opened step with path[b, j] >= j (breadth-first order), -1 behind a row's path.
        `moved=False` promises that path[b, j] == j throughout, as on a chain.
        """
        if moved:
            self._keep(path)
        if isinstance(counts, Tensor):
            counts = counts.tolist()
        self.host_lengths = [a + b for a, b in zip(self.host_lengths, counts, strict=True)]
        self.lengths = torch.tensor(self.host_lengths, device=self.lengths.device)

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch; rows [B'] int64."""
        if self.store is not None:
            self.store = self.store.index_select(2, rows)
        self.lengths = self.lengths[rows]
        self.host_lengths = self.lengths.tolist()

    def _keep(self, path: Tensor) -> None:
        """Move the nodes path [B, m] of all layers to the slots behind the prefix, in place."""
        assert self.store is not None
        if runs_kernels(self.store):
            from headtrain_kernels.kv_commit import kv_commit

            return kv_commit(self.store, self.lengths, path.contiguous())
        steps = torch.arange(path.shape[1], device=path.device)
        path = path.where(path >= 0, steps)
        if self.start is not None and len(path) == 1:
            tree = self.store.narrow(4, self.start, self.written + self.nodes)
            # index_select copies before the write, so overlapping source and destination are safe
            tree.narrow(4, 0, path.shape[1]).copy_(tree.index_select(4, path[0]))
        else:
            self._move(self.lengths[:, None] + path, self.lengths[:, None] + steps)
        return None

    def _move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots source [B, m] to slots target [B, m] in all layers; they may overlap."""
        assert self.store is not None
        size = (*self.store.shape[:4], source.shape[1], self.store.shape[5])
        source, target = (x[:, None, :, None].expand(size) for x in (source, target))
        self.store.scatter_(4, target, self.store.gather(4, source))

    def _aim(self) -> None:
        """Views of all layers for this step, two a layer: what the attention reads and where the model writes."""
        assert self.store is not None
        layers = self.store.flatten(0, 1)
        self._reads = layers.narrow(3, 0, self.end).unbind(0)
        if self.start is not None:
            self._slots = None
            self._writes = layers.narrow(3, self.start + self.written, self.nodes).unbind(0)
        else:
            rows = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
            slots = torch.arange(self.written, self.written + self.nodes, device=self.lengths.device)
            self._slots = rows, self.lengths[:, None] + slots
            self._writes = layers.unbind(0)

    def _grow(self, capacity: int) -> None:
        capacity = -(-capacity // GRANULE) * GRANULE
        if self.store is not None:
            grown = self.store.new_zeros((*self.store.shape[:4], capacity, self.store.shape[5]))
            grown.narrow(4, 0, self.capacity).copy_(self.store)
            self.store = grown
        self.capacity = capacity


def require_rollback(model: PreTrainedModel) -> None:
    """Refuse targets whose state cannot go back to an earlier token."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    strange = sorted(kinds - {"full_attention", "sliding_attention"})
    if getattr(model, "_is_stateful", False) or strange:
        what = f"layers of type {', '.join(strange)}" if strange else "a recurrent state"
        raise UserError(
            f"target: {config.model_type} has {what}, which cannot be rolled back to the accepted tokens; use a target"
            " with full or sliding attention layers only"
        )
