"""Attention of the nodes of a step over a shared prefix and their own ancestors.

A step writes n nodes behind each row's prefix: slot s < length holds the token at position s, slot length + j holds
node j at position length + depth(j). Node v sees the prefix and those of the n slots that are its ancestors or itself;
a sliding window counts positions, because the slots of siblings differ while their positions do not.

transformers hands unknown keyword arguments of `model(...)` down to the attention function, so the step's
`Visibility` travels as the argument `tree`. `tree_attention(model)` is a context in which the model runs this function;
outside of it the model keeps its own implementation, so `generate` and training are untouched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from decode.gpu import runs_kernels
from decode.linear import is_slow

NAME = "headtrain_tree"
KERNEL_DIMS = (64, 80, 96, 128, 256)  # head dims of the kernel; a GPU runs others through SDPA
PREFILL_ROWS = 256  # queries scored at once where SDPA cannot be used; bounds the score matrix of a long prompt


class Visibility:
    """What the new tokens of each row may see. Built once per step, read by every layer.

    lengths [B] int64 prefix lengths; depths [B, n] int64 of the n nodes in the slots behind the prefix; ancestors
    [B, m, n] bool for the last m of them, which are the queries (m = n unless a tree is run level by level), or None
    for a prompt: n tokens in a row, each seeing all before it. `start` is the common prefix length when all rows share
    it, else None; `end` is the number of cache slots the attention reads, max(lengths) + n.
    """

    def __init__(self, lengths: Tensor, depths: Tensor, ancestors: Tensor | None, start: int | None, end: int):
        self.lengths, self.depths, self.ancestors = lengths, depths, ancestors
        self.start, self.end = start, end
        self.guarded = False  # set to run the step again without trusting the slots that nobody may see
        self._spans: dict[tuple, tuple[int, Tensor | None]] = {}
        self._bits: tuple[Tensor, Tensor] | None = None

    def visible(self, window: int | None) -> Tensor:
        """[B, m, end] bool: may query v of row b see slot s?"""
        assert self.ancestors is not None, "a prompt is causal and has no ancestor matrix"
        m, n = self.ancestors.shape[1:]
        slots = torch.arange(self.end, device=self.lengths.device)
        offset = slots - self.lengths[:, None]  # [B, end], index of the node held by a slot; negative in the prefix
        node = offset.clamp(0, n - 1)
        in_tree = self.ancestors.gather(2, node[:, None].expand(-1, m, -1)) & (offset < n)[:, None]
        visible = (offset < 0)[:, None] | in_tree
        if window is not None:
            position = torch.where(offset < 0, slots, self.lengths[:, None] + self.depths.gather(1, node))  # [B, end]
            queried = self.lengths[:, None] + self.depths[:, n - m :]  # [B, m]
            visible &= queried[:, :, None] - position[:, None] < window
        return visible

    def span(self, window: int | None, groups: int, dtype: torch.dtype) -> tuple[int, Tensor | None]:
        """First slot that any query sees, and the additive mask [B, 1, groups * m, end - first] behind it.

        The mask is None when every query sees every slot. Computed once per step and window.
        """
        if window is not None and window >= self.end:
            window = None
        key = (window, groups, dtype)
        if key not in self._spans:
            first = 0 if window is None or self.start is None else max(0, self.start - window + 1)
            if self.start is not None and self.depths.shape[1] == 1:
                self._spans[key] = first, None
            else:
                bias = torch.zeros((), dtype=dtype, device=self.lengths.device)
                bias = bias.where(self.visible(window)[:, :, first:], -math.inf)  # [B, m, end - first]
                self._spans[key] = first, bias.repeat(1, groups, 1)[:, None]
        return self._spans[key]

    def bits(self) -> tuple[Tensor, Tensor]:
        """Ancestors as bits [B, m, 2] int64, bit j of word w for node 64 w + j, and the depths [B, n] in dense rows."""
        if self._bits is None:
            assert self.ancestors is not None
            padded = F.pad(self.ancestors, (0, 128 - self.ancestors.shape[2])).unflatten(2, (2, 64))
            words = (padded.long() << torch.arange(64, device=padded.device)).sum(-1)
            self._bits = words, self.depths.contiguous()
        return self._bits


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention without copying K and V.

    query [B, Hq, m, d]; key, value [B, Hkv, S, d]; bias [B, 1, G * m, S] additive or None; sinks [Hq] logits of a slot
    without value. Returns [B, Hq, m, dv]. The queries of one KV head are stacked, so each K and V row is read once.
    """
    batch, heads, m, dim = query.shape
    q = query.reshape(batch, key.shape[1], -1, dim)  # [B, Hkv, G * m, d]
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, key, value, bias, scale=scale)
    else:
        scores = (q @ key.mT).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + bias
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1).expand(batch, heads, m, 1).reshape(*q.shape[:3], 1)
            scores = torch.cat([scores, sink], -1)
        out = torch.softmax(scores, -1)[..., : key.shape[2]].to(value.dtype) @ value
    return out.reshape(batch, heads, m, -1)


def attend_guarded(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest) -> Tensor:
    """`attend` where slots may hold inf or NaN: a weight of zero times NaN would reach queries that may not see it."""
    finite = key.isfinite().all(-1) & value.isfinite().all(-1)  # [B, Hkv, S]
    key, value = (x.where(finite[..., None], 0) for x in (key, value))
    out = attend(query, key, value, bias, *rest)
    visible = torch.ones_like(finite[:, :1, None]) if bias is None else bias > -math.inf  # [B, 1, G * m, S]
    spoilt = (visible & ~finite[:, :, None]).any(-1)  # [B, Hkv, G * m or 1]
    spoilt = spoilt.expand(-1, -1, out.shape[1] // key.shape[1] * out.shape[2])
    return out.masked_fill(spoilt.reshape(*out.shape[:3], 1), math.nan)


def _attend_prompt(query: Tensor, key: Tensor, value: Tensor, scale: float, window, softcap, sinks) -> Tensor:
    """Causal attention of a prompt from position 0 on; the shapes are those of `attend` with S = n."""
    heads, n, kv_heads = query.shape[1], query.shape[2], key.shape[1]
    if window is not None and window >= n:
        window = None
    if window is None and softcap is None and sinks is None:
        if query.is_cuda:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        # On a CPU `enable_gqa` leaves the flash kernel; one copy of K and V per prompt is far cheaper.
        key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
        own, dtype = query.dtype, torch.float32 if is_slow(query) else query.dtype
        query, key, value = (x.to(dtype) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).to(own)
    out = []
    for start in range(0, n, PREFILL_ROWS):
        end = min(n, start + PREFILL_ROWS)
        first = 0 if window is None else max(0, start - window + 1)
        rows = torch.arange(start, end, device=query.device)[:, None]
        slots = torch.arange(first, end, device=query.device)
        visible = slots <= rows
        if window is not None:
            visible &= rows - slots < window
        bias = torch.zeros((), dtype=query.dtype, device=query.device).where(visible, -math.inf)
        bias = bias.repeat(heads // kv_heads, 1)[None, None]
        chunk = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end]
        out.append(attend(*chunk, bias, scale, softcap, sinks))
    return torch.cat(out, 2)


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tree: Visibility,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function given to transformers. query [B, Hq, n, d], key and value [B, Hkv, end, d].

    Returns [B, n, Hq, dv]. `attention_mask` is None: no mask function is registered for this name.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree.ancestors is None:
        out = _attend_prompt(query, key, value, scale, sliding_window, softcap, s_aux)
    elif runs_kernels(query) and query.shape[-1] == value.shape[-1] in KERNEL_DIMS:
        from headtrain_kernels.tree_attention import tree_attention as tree_attention_kernel

        words, depths = tree.bits()
        out = tree_attention_kernel(
            query, key, value, tree.lengths, depths, words, scale, sliding_window, softcap, s_aux
        )
    else:
        first, bias = tree.span(sliding_window, query.shape[1] // key.shape[1], query.dtype)
        if first:
            key, value = key[:, :, first:], value[:, :, first:]
        out = (attend_guarded if tree.guarded else attend)(query, key, value, bias, scale, softcap, s_aux)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, forward)


@contextmanager
def tree_attention(model: PreTrainedModel, name: str = NAME) -> Iterator[None]:
    """While entered, `model(..., tree=visibility)` runs the function above instead of the model's own attention.

    `name`: another function that was registered with transformers, and takes other arguments.
    """
    configs = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation_internal = own
