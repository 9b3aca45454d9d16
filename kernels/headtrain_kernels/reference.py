"""Slow, obvious forms of every operator: loops in float64, one line a formula. They are the specification.

TOLERANCES are for comparisons with them: (rtol, atol) per dtype of the inputs. float32 differs by the order of sums; the
16-bit types also round the softmax weights before the second product.
"""

import math
import struct

import torch
from torch import Tensor

TOLERANCES = {
    torch.float32: (1e-5, 2e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float8_e4m3fn: (1.6e-2, 1e-2),
    torch.float8_e5m2: (1.6e-2, 1e-2),
}

_MASK = (1 << 64) - 1


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, depths: Tensor, ancestors: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [B, Hq, n, d], k and v [B, Hkv, S, d], ancestors [B, n, n] bool -> [B, Hq, n, d] float64; zeros where nothing is seen."""
    batch, heads, num_nodes, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(batch):
        length = int(lengths[b])
        for node in range(num_nodes):
            position = length + int(depths[b, node])
            slots = [j for j in range(length) if window is None or position - j < window]
            for other in range(num_nodes):
                near = window is None or position - (length + int(depths[b, other])) < window
                if ancestors[b, node, other] and near:
                    slots.append(length + other)
            for head in range(heads):
                kv_head = head // group
                keys, values = k[b, kv_head, slots].double().cpu(), v[b, kv_head, slots].double().cpu()
                if k_scale is not None and v_scale is not None:
                    keys, values = keys * float(k_scale[kv_head]), values * float(v_scale[kv_head])
                scores = keys @ q[b, head, node].double().cpu() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double().cpu()))
                if slots:
                    out[b, head, node] = torch.softmax(scores, 0)[: len(slots)] @ values
    return out


def kv_commit(cache: Tensor, lengths: Tensor, path: Tensor) -> Tensor:
    """cache [layers, 2, B, Hkv, S, d], path [B, P] node ids (-1: none) -> a new cache with node path[b, i] in slot lengths[b] + i."""
    result = cache.clone()
    for b in range(path.shape[0]):
        for i, node in enumerate(path[b].tolist()):
            if node >= 0:
                result[:, :, b, :, int(lengths[b]) + i] = cache[:, :, b, :, int(lengths[b]) + node]
    return result


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def noise_bits(seed: int, sequence: int, position: int, token: int, stream: int = 0) -> int:
    """One value in unsigned arithmetic of Python integers, returned as int64."""
    golden = 0x9E3779B97F4A7C15
    key = _mix((seed + golden * (stream + 1)) & _MASK)
    key = _mix((key + sequence) & _MASK)
    key = _mix((key + position) & _MASK)
    y = key ^ _mix((token * golden + golden) & _MASK)
    for _ in range(2):
        y = y * 0xD6E8FEB86659FD93 & _MASK
        y ^= y >> 32
    return y - (1 << 64) if y >> 63 else y


def _float32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def exponential(seed: int, sequence: int, position: int, token: int, stream: int = 0) -> float:
    """v is a float32 by definition; the logarithms are exact to float64."""
    high = (noise_bits(seed, sequence, position, token, stream) & _MASK) >> 11
    v = _float32(_float32(high) + 0.5) * 2.0**-53
    return -math.log1p(-min(v, 1 - 2.0**-24))


def gumbel(seed: int, sequence: int, position: int, token: int, stream: int = 0) -> float:
    return -math.log(exponential(seed, sequence, position, token, stream))


def tree_verify(
    logits: Tensor, tokens: Tensor, parents: Tensor, valid: Tensor, max_depth: int, noise: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [B, n, V], noise [B, max_depth + 1, V] (row d: for the token after a node of depth d) -> path, count, token."""
    batch = tokens.shape[0]
    path = torch.full((batch, max_depth + 1), -1)
    count, chosen = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    for b in range(batch):
        node, depth = 0, 0
        while True:
            path[b, depth] = node
            scores = logits[b, node].double()
            y = int((scores if noise is None else scores + noise[b, depth].double()).argmax())
            children = [
                c for c in range(tokens.shape[1]) if parents[b, c] == node and valid[b, c] and int(tokens[b, c]) == y
            ]
            if not children or depth == max_depth:
                count[b], chosen[b] = depth, y
                break
            node, depth = children[0], depth + 1
    return path, count, chosen


def topk_logprob(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log q of the k largest log q + noise [M, k], their columns [M, k], log-sum-exp of the logits [M]; float64."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits / temperature
    log_q = torch.log_softmax(logits, -1)
    columns = (log_q if noise is None else log_q + noise.double()).topk(k, -1).indices
    return log_q.gather(-1, columns), columns, torch.logsumexp(logits, -1)


def distill(
    student: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor, weights: Tensor,
    full_weight: Tensor | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sum_kn weights[k, n] * -sum_v p log q, and sum_v min(p, q) [K, N]; student [K, N, D], teacher [N, H]. Differentiable."""

    def logits_of(rows: Tensor) -> Tensor:
        z = teacher.double() @ rows.double().T
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    z = logits_of(teacher_weight)  # [N, Vd]
    whole = z if full_weight is None else logits_of(full_weight)
    p = torch.exp(z - torch.logsumexp(whole, -1, keepdim=True))  # [N, Vd]
    log_q = torch.log_softmax(student.double() @ weight.double().T, -1)  # [K, N, Vd]
    loss = -(weights.double() * (p * log_q).sum(-1)).sum()
    return loss, torch.minimum(p, log_q.exp()).sum(-1)


def grouped_residual(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [K, N, H] or [N, H], weight [K, H, H], bias [K, H] -> x + SiLU(x weight^T + bias), [K, N, H]. Differentiable."""
    inputs = x if x.ndim == 3 else x.expand(weight.shape[0], *x.shape)
    return torch.stack(
        [v + torch.nn.functional.silu(v @ w.T + b) for v, w, b in zip(inputs, weight, bias, strict=True)]
    )
