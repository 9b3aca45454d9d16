"""The residual blocks of K parallel heads in one launch.

    y_k = x_k + SiLU(x_k . W_k^T + b_k)

Shapes: x [N, H] shared by all heads or [K, N, H], W [K, H, H], b [K, H], y [K, N, H]. A grouped matrix product with bias,
activation and residual in its epilogue: each W_k is read once per tile of N, and no pre-activation is written. The backward
pass recomputes the pre-activation and uses batched cuBLAS products. Not supported: second derivatives.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headtrain_kernels._triton import next_power_of_2, tl, triton
from headtrain_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_rows, check_shape


@triton.jit
def _grouped_residual_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, stride_xk, stride_xn, N, H,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    # tiles of N are neighbours: the second finds the weights in L2
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    in_rows = row < N
    in_columns = column < H
    units = tl.arange(0, BLOCK_H)
    x_base = x_ptr + head * stride_xk + row.to(tl.int64)[:, None] * stride_xn
    weight_at = weight_ptr + head * H * H + column.to(tl.int64)[:, None] * H + units[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, H, BLOCK_H):
        inside = (start + units < H)[None, :]
        x = tl.load(x_base + (start + units)[None, :], mask=in_rows[:, None] & inside, other=0.0)
        w = tl.load(weight_at + start, mask=in_columns[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    a = acc + tl.load(bias_ptr + head * H + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    residual = tl.load(x_base + column[None, :], mask=mask, other=0.0).to(tl.float32)
    y = residual + a / (1.0 + tl.exp(-a))
    out = out_ptr + head * N * H + row.to(tl.int64)[:, None] * H + column[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)


def check_arguments(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    check_shape("weight", weight, None, None, None)
    heads, size = weight.shape[:2]
    check_shape("weight", weight, heads, size, size)
    check_shape("bias", bias, heads, size)
    check_shape("x", x, *((heads,) if x.ndim == 3 else ()), None, size)
    check_dtype("x", x, *FLOATS, torch.float64)
    check_dtype("weight", weight, x.dtype)
    check_dtype("bias", bias, x.dtype)
    check_device("weight", weight, x.device)
    check_device("bias", bias, x.device)


def launch_grouped_residual(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    check_arguments(x, weight, bias)
    check_dtype("x", x, *FLOATS)
    check_rows("x", x)
    check_contiguous("weight", weight)
    check_contiguous("bias", bias)
    heads, size = bias.shape
    rows = x.shape[-2]
    out = torch.empty(heads, rows, size, dtype=x.dtype, device=x.device)  # [K, N, H]
    # float32 products run without tensor cores and hold their operands in registers
    wide = x.element_size() == 2
    block_m = min(max(next_power_of_2(rows), 16), 128) if wide else 16
    block_n, block_h = (64, 128 if block_m <= 64 else 64) if wide else (32, 16)
    if rows:
        _grouped_residual_kernel[(triton.cdiv(rows, block_m), triton.cdiv(size, block_n), heads)](
            x, weight, bias, out, x.stride(0) if x.ndim == 3 else 0, x.stride(-2), rows, size,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_H=block_h, num_warps=4, num_stages=4 if wide else 2,
        )  # fmt: skip
    return out


def _preactivation(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[K, N, H]; one product for all heads when they share x."""
    if x.ndim == 2:
        flat = torch.addmm(bias.flatten(), x, weight.flatten(0, 1).T)  # [N, K * H]
        return flat.view(x.shape[0], *bias.shape).transpose(0, 1)
    return torch.baddbmm(bias[:, None], x, weight.mT)


def _torch_grouped_residual(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    check_arguments(x, weight, bias)
    return (F.silu(_preactivation(x, weight, bias)) + x).contiguous()


class _GroupedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return (launch_grouped_residual if x.is_cuda else _torch_grouped_residual)(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        a = _preactivation(x, weight, bias)
        gate = torch.sigmoid(a)
        grad_a = grad * (gate * (1 + a * (1 - gate)))  # [K, N, H]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad + torch.bmm(grad_a, weight)
            grad_x = grad_x if x.ndim == 3 else grad_x.sum(0)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.bmm(grad_a.mT, x if x.ndim == 3 else x.expand(grad.shape[0], -1, -1))
        if ctx.needs_input_grad[2]:
            grad_bias = grad_a.sum(1)
        return grad_x, grad_weight, grad_bias


def grouped_residual(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One residual block of every head. Triton on a CUDA device, else torch.

    Args:
        x: [N, H], the same for all heads, or [K, N, H].
        weight: [K, H, H], as in `torch.nn.Linear` (output first), of x's dtype.
        bias: [K, H].

    Returns: [K, N, H] in x's dtype.
    """
    return _GroupedResidual.apply(x, weight, bias)
