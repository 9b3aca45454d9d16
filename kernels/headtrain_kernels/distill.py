"""Distillation of a teacher's next-token distribution into K draft steps, without logits of all tokens in memory.

    z = cap * tanh(teacher . Wt^T / cap),  p = exp(z - lse(z)),  q_k = softmax(student_k . Ws^T)
    loss = sum_kn weights[k, n] * (-sum_v p_n(v) log q_kn(v)),   acceptance[k, n] = sum_v min(p_n(v), q_kn(v))
    d loss / d student logits = weights[k, n] * (P_n q_kn - p_n),   P_n = sum_v p_n(v)

Shapes: student [K, N, D], Ws [Vd, D], teacher [N, H], Wt [Vd, H]: the teacher's lm_head rows of the draft vocabulary, so p is
renormalised on it and P = 1. With `full_weight` [V, H] the normaliser runs over the whole vocabulary: p is the teacher's true
probability of each draft token and P < 1. For a draft with the full vocabulary Vd = V and nothing else changes.

student[k, n] and teacher[n] predict the same token; the caller shifts. The loss is a sum in nats: the caller's weights hold
mask, decay and normaliser. Gradients are made in the forward pass chunk by chunk and scaled in the backward pass (the scheme
of linkedin/Liger-Kernel's fused linear losses); the products are cuBLAS, the rows one kernel. Gradients are kept relative
to the largest weight, so that they fit in float16. Not supported: gradients of teacher and weights, second derivatives.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headtrain_kernels._triton import next_power_of_2, tl, triton
from headtrain_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape

CHUNK_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 21}  # student and teacher logits alive at once
MAX_BLOCK = 4096


@triton.jit
def _load_teacher(ptr, at, mask, SOFTCAP: tl.constexpr):
    z = tl.load(ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
    if SOFTCAP > 0:
        capped = SOFTCAP * (1.0 - 2.0 / (1.0 + tl.exp(z * (2.0 / SOFTCAP))))
        z = tl.where(mask, capped, float("-inf"))
    return z


@triton.jit
def _row_lse(ptr, V, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """log-sum-exp of one row of V logits; partial sums stay per lane until the end."""
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        z = _load_teacher(ptr, start + lanes, start + lanes < V, SOFTCAP)
        new_top = tl.maximum(top, z)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.exp(z - shift)
        top = new_top
    row_top = tl.max(top, 0)
    return row_top + tl.log(tl.sum(total * tl.exp(top - row_top), 0))


@triton.jit
def _lse_kernel(logits_ptr, lse_ptr, V, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(lse_ptr + row, _row_lse(logits_ptr + row * V, V, SOFTCAP, BLOCK))


@triton.jit
def _distill_kernel(
    student_ptr, teacher_ptr, full_lse_ptr, weight_ptr, loss_ptr, accept_ptr, num_tokens, V,
    SOFTCAP: tl.constexpr, HAS_FULL: tl.constexpr, NEEDS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One (step, token): statistics in a first pass, loss and acceptance in a second, the gradient over the student's logits."""
    row = tl.program_id(0).to(tl.int64)
    token = row % num_tokens
    student = student_ptr + row * V
    teacher = teacher_ptr + token * V
    weight = tl.load(weight_ptr + row)
    lanes = tl.arange(0, BLOCK)
    if weight != 0.0:
        student_lse = _row_lse(student, V, 0.0, BLOCK)
        teacher_lse = _row_lse(teacher, V, SOFTCAP, BLOCK)
        mass = tl.full((), 1.0, tl.float32)
        if HAS_FULL:
            full_lse = tl.load(full_lse_ptr + token)
            mass = tl.exp(teacher_lse - full_lse)
            teacher_lse = full_lse
        cross = tl.zeros((BLOCK,), tl.float32)
        accept = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            at = start + lanes
            inside = at < V
            log_q = tl.load(student + at, mask=inside, other=0.0).to(tl.float32) - student_lse
            p = tl.exp(_load_teacher(teacher, at, inside, SOFTCAP) - teacher_lse)
            q = tl.exp(log_q)
            cross += p * log_q
            accept += tl.where(inside, tl.minimum(p, q), 0.0)
            if NEEDS_GRAD:
                tl.store(student + at, (weight * (mass * q - p)).to(student_ptr.dtype.element_ty), mask=inside)
        tl.store(loss_ptr + row, -tl.sum(cross, 0))
        tl.store(accept_ptr + row, tl.sum(accept, 0))
    else:
        if NEEDS_GRAD:
            for start in range(0, V, BLOCK):
                zero = tl.zeros((BLOCK,), tl.float32).to(student_ptr.dtype.element_ty)
                tl.store(student + start + lanes, zero, mask=start + lanes < V)
        tl.store(loss_ptr + row, 0.0)
        tl.store(accept_ptr + row, 0.0)


def launch_rows(
    student: Tensor, teacher: Tensor, full: Tensor | None, weights: Tensor, softcap: float | None, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """student [K, C, Vd] logits (overwritten with the gradient if one is needed), teacher [C, Vd], full [C, V] or None, weights
    [K, C] float32 -> unweighted losses and acceptances [K, C]."""
    check_shape("student", student, None, None, None)
    steps, tokens, vocabulary = student.shape
    check_shape("teacher", teacher, tokens, vocabulary)
    check_shape("weights", weights, steps, tokens)
    check_dtype("student", student, *FLOATS)
    check_dtype("weights", weights, torch.float32)
    for name, tensor in (("student", student), ("teacher", teacher), ("weights", weights)):
        check_contiguous(name, tensor)
    loss = torch.empty(steps, tokens, dtype=torch.float32, device=student.device)  # [K, C]
    accept = torch.empty_like(loss)
    full_lse = loss
    if full is not None:
        check_shape("full", full, tokens, None)
        check_contiguous("full", full)
        full_lse = torch.empty(tokens, dtype=torch.float32, device=student.device)  # [C]
        _lse_kernel[(tokens,)](
            full, full_lse, full.shape[1],
            SOFTCAP=softcap or 0.0, BLOCK=min(next_power_of_2(full.shape[1]), MAX_BLOCK), num_warps=8,
        )  # fmt: skip
    _distill_kernel[(steps * tokens,)](
        student, teacher, full_lse, weights, loss, accept, tokens, vocabulary,
        SOFTCAP=softcap or 0.0, HAS_FULL=full is not None, NEEDS_GRAD=needs_grad,
        BLOCK=min(next_power_of_2(vocabulary), MAX_BLOCK), num_warps=8,
    )  # fmt: skip
    return loss, accept


def _torch_rows(
    student: Tensor, teacher: Tensor, full: Tensor | None, weights: Tensor, softcap: float | None, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(student.dtype, torch.float32)

    def capped(z: Tensor) -> Tensor:
        z = z.to(exact)
        return z if softcap is None else z.div(softcap).tanh_().mul_(softcap)

    z = capped(teacher)  # [C, Vd]
    whole = z if full is None else capped(full)
    p = (z - torch.logsumexp(whole, -1, keepdim=True)).exp_()
    mass = p.sum(-1, keepdim=True)
    loss = torch.empty(student.shape[:2], dtype=exact, device=student.device)  # [K, C]
    accept = torch.empty_like(loss)
    for k in range(student.shape[0]):
        log_q = torch.log_softmax(student[k].to(exact), -1)  # [C, Vd]
        trained = weights[k] != 0
        loss[k] = torch.where(trained, -torch.linalg.vecdot(p, log_q), 0)
        q = log_q.exp_()
        accept[k] = torch.where(trained, torch.minimum(p, q).sum(-1), 0)
        if needs_grad:
            student[k] = (q.mul_(mass).sub_(p)).mul_(weights[k, :, None])
    return loss, accept


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, weight, teacher, teacher_weight, weights, full_weight, softcap, chunk, rows):
        steps, num_tokens, dim = student.shape
        device = student.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else student.dtype
        needs_student, needs_weight = ctx.needs_input_grad[:2]
        needs_grad = needs_student or needs_weight
        exact = torch.promote_types(compute, torch.float32)
        largest = weights.abs().max().clamp(min=torch.finfo(torch.float32).tiny).to(exact)
        relative = weights.to(exact) / largest  # [K, N]
        draft_rows, target_rows = weight.to(compute), teacher_weight.to(compute)
        grad_student = torch.empty_like(student) if needs_student else None
        grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if needs_weight else None
        losses = torch.empty(steps, num_tokens, dtype=exact, device=student.device)  # [K, N]
        accept = torch.empty_like(losses)
        with torch.autocast(device, enabled=False):
            for start in range(0, num_tokens, chunk):
                part = slice(start, start + chunk)
                inputs = student[:, part].to(compute).reshape(-1, dim)  # [K * C, D]
                logits = (inputs @ draft_rows.T).view(steps, -1, weight.shape[0])  # [K, C, Vd]
                states = teacher[part].to(compute)
                full = None if full_weight is None else states @ full_weight.to(compute).T  # [C, V]
                scale = relative[:, part].contiguous()
                losses[:, part], accept[:, part] = rows(
                    logits, states @ target_rows.T, full, scale, softcap, needs_grad
                )
                grads = logits.view(-1, weight.shape[0])  # [K * C, Vd]
                if grad_student is not None:
                    grad_student[:, part] = (grads @ draft_rows).view(steps, -1, dim)
                if grad_weight is not None:
                    grad_weight += grads.T @ inputs
        ctx.save_for_backward(grad_student, grad_weight, largest)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(accept)
        return (losses * weights).sum(), accept

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        grad_student, grad_weight, largest = ctx.saved_tensors
        factor = grad_loss * largest
        if grad_student is not None:
            grad_student = (grad_student * factor).to(grad_student.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * factor).to(ctx.weight_dtype)
        return grad_student, grad_weight, None, None, None, None, None, None, None


def distill(
    student: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor, weights: Tensor,
    full_weight: Tensor | None = None, softcap: float | None = None, chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weighted cross-entropy to the teacher's distribution. Rows by Triton on a CUDA device, else torch.

    Args:
        student: [K, N, D] or [N, D] (K = 1) states of the draft; finite everywhere, tokens of weight 0 included.
        weight: [Vd, D] the draft's lm_head.
        teacher: [N, H] states of the target after its final norm.
        teacher_weight: [Vd, H] rows of the target's lm_head for the draft's vocabulary.
        weights: [K, N] or [N] float32; a token of weight 0 costs nothing and reports acceptance 0.
        full_weight: [V, H] the target's whole lm_head; None: p is renormalised on the draft's vocabulary.
        softcap: soft-cap of the target's logits.
        chunk: tokens per chunk; default by memory.

    Returns: loss, a scalar in nats (the sum over all steps and tokens), and acceptance [K, N] or [N], not differentiable.
    """
    single = student.ndim == 2
    if single:
        student, weights = student[None], weights.reshape(1, -1)
    check_shape("student", student, None, None, None)
    steps, num_tokens, dim = student.shape
    check_shape("weight", weight, None, dim)
    vocabulary = weight.shape[0]
    check_shape("teacher", teacher, num_tokens, None)
    check_shape("teacher_weight", teacher_weight, vocabulary, teacher.shape[1])
    check_shape("weights", weights, steps, num_tokens)
    if full_weight is not None:
        check_shape("full_weight", full_weight, None, teacher.shape[1])
    for name, tensor in (("weight", weight), ("teacher", teacher), ("weights", weights)):
        check_device(name, tensor, student.device)
    if chunk is None:
        alive = (steps + 1) * vocabulary + (0 if full_weight is None else full_weight.shape[0])
        chunk = max(1, CHUNK_ELEMENTS["cuda" if student.is_cuda else "cpu"] // alive)
    rows = launch_rows if student.is_cuda else _torch_rows
    loss, accept = _Distill.apply(
        student, weight, teacher.detach(), teacher_weight.detach(), weights, full_weight, softcap, chunk, rows
    )
    return loss, accept[0] if single else accept
