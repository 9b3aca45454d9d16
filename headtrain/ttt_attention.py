"""Attention of the training-time test (arXiv 2503.01840, section 3.2): every draft step attends as it will when decoding.

The query of slot t at step k sees the step-0 keys of slots <= t (made from the target's features) and its own keys of
steps 1..k (made from the draft's own states); one softmax over all of them.

The fast form runs flash attention over the step-0 keys, merges the k extra logits through the log-sum-exp, and gives
the *merged* output and log-sum-exp to the flash backward, whose gradients are then those of the joint softmax.
"""

import torch
from torch import Tensor

from headtrain.packing import Documents, spans


def ttt_attention_reference(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """The loop of the paper. q [B, h, T, d]; keys, values: one [B, h, T, d] a step, step 0 first. Returns [B, h, T, d]."""
    num_slots = q.shape[2]
    scores = scale * q @ keys[0].mT  # [B, h, T, T]
    future = torch.ones(num_slots, num_slots, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    own = [scale * (q * k).sum(-1, keepdim=True) for k in keys[1:]]
    p = torch.softmax(torch.cat([scores, *own], -1), -1)  # [B, h, T, T + k]
    out = p[..., :num_slots] @ values[0]
    for i, v in enumerate(values[1:]):
        out = out + p[..., num_slots + i, None] * v
    return out


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, scale: float, documents: Documents | None, *keys_values: Tensor):
        num_steps = len(keys_values) // 2
        keys, values = keys_values[:num_steps], keys_values[num_steps:]
        out, lse = _flash_forward(q, keys[0], values[0], scale, documents)  # [B, h, T, d], [B, h, T] float32
        own = [scale * (q.float() * k.float()).sum(-1) for k in keys[1:]]  # each [B, h, T]
        if own:
            total = torch.logsumexp(torch.stack([lse, *own]), 0)
            merged = (lse - total).exp()[..., None] * out.float()
            for s, v in zip(own, values[1:], strict=True):
                merged += (s - total).exp()[..., None] * v.float()
            out, lse = merged.to(q.dtype), total
        ctx.scale, ctx.documents = scale, documents
        ctx.save_for_backward(q, out, lse, *keys_values)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        q, out, lse, *keys_values = ctx.saved_tensors
        num_steps = len(keys_values) // 2
        keys, values = keys_values[:num_steps], keys_values[num_steps:]
        grad_out = grad_out.to(q.dtype).contiguous()
        grad_q, grad_k, grad_v = _flash_backward(grad_out, q, keys[0], values[0], out, lse, ctx.scale, ctx.documents)
        grad_q = grad_q.float()
        grad_keys, grad_values = [grad_k], [grad_v]
        g = grad_out.float()
        delta = (g * out.float()).sum(-1)  # [B, h, T]: sum over keys of p dp
        for k, v in zip(keys[1:], values[1:], strict=True):
            p = (ctx.scale * (q.float() * k.float()).sum(-1) - lse).exp()
            ds = ctx.scale * p * ((g * v.float()).sum(-1) - delta)
            grad_q += ds[..., None] * k.float()
            grad_keys.append((ds[..., None] * q.float()).to(k.dtype))
            grad_values.append((p[..., None] * g).to(v.dtype))
        return grad_q.to(q.dtype), None, None, *grad_keys, *grad_values


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    if documents is not None:
        parts = [_flash_forward(q[:, :, s], k[:, :, s], v[:, :, s], scale) for s in spans(documents, q.shape[2])]
        out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))
        return out, lse
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    # The efficient kernel takes float32 too and returns the log-sum-exp rounded up to 32 rows.
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True, scale=scale)
    return out, lse[..., : q.shape[2]]


def _flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if documents is not None:
        parts = [
            _flash_backward(grad_out[:, :, s], q[:, :, s], k[:, :, s], v[:, :, s], out[:, :, s], lse[:, :, s], scale)
            for s in spans(documents, q.shape[2])
        ]
        grads_q, grads_k, grads_v = (torch.cat(part, 2) for part in zip(*parts, strict=True))
        return grads_q, grads_k, grads_v
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, True, scale=scale
        )
    pad = -q.shape[2] % 32
    lse = torch.nn.functional.pad(lse, (0, pad)).contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], True, scale=scale
    )
    return grads[0], grads[1], grads[2]


def ttt_attention(
    q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, documents: Documents | None = None
) -> Tensor:
    """Fast form of `ttt_attention_reference`, same arguments; CPU and CUDA, float32 and half precision.

    `documents`: lengths of the conversations packed into the one row; a slot sees those of its own only.
    """
    assert len(keys) == len(values), f"keys and values: {len(keys)} and {len(values)} steps"
    assert all(x.shape == q.shape for x in (*keys, *values)), f"keys, values: expected shape {tuple(q.shape)} each"
    return _TTTAttention.apply(q, scale, documents, *keys, *values)
