"""Distillation losses, computed in chunks of tokens.

A chunk's logits are made, turned into a loss and its gradient, and dropped, so no tensor of size [tokens, V] or
[steps x tokens, Vd] is ever alive. The teacher's softmax of a chunk is shared by all draft steps that predict it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # draft logits of one chunk, all steps together: 2,048 rows of a vocabulary of 8,192

# (log_q, p) [R, Vd] float32 -> losses [R] and their gradient by the logits [R, Vd]; may overwrite log_q, never p
LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def kl(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Forward KL up to the teacher's entropy: -sum_v p log q, gradient q - p."""
    value = -torch.linalg.vecdot(p, log_q)
    return value, log_q.exp_().sub_(p)


LOSSES: dict[str, LossFunction] = {"kl": kl}


class _Distill(torch.autograd.Function):
    """Gradients are made in the forward pass, chunk by chunk, and only scaled in the backward pass."""

    @staticmethod
    def forward(ctx, student, weight, teacher, weights, loss):
        device = student.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else student.dtype
        with torch.autocast(device, enabled=False):  # the reductions below stay in float32
            return _Distill._forward(ctx, student, weight, teacher, weights, loss, compute)

    @staticmethod
    def _forward(ctx, student, weight, teacher, weights, loss, compute):
        steps, num_tokens, _ = student.shape
        needs_student, needs_weight = ctx.needs_input_grad[:2]
        rows = weight.detach().to(compute)  # [Vd, D]
        total = student.new_zeros((), dtype=torch.float32)
        acceptance = student.new_zeros(steps, dtype=torch.float32)
        grad_student = torch.empty_like(student) if needs_student else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        chunk = max(1, CHUNK_ELEMENTS // (steps * weight.shape[0]))
        for start in range(0, num_tokens, chunk):
            part = slice(start, min(start + chunk, num_tokens))
            p = torch.softmax(teacher(part), -1)  # [C, Vd]
            states = student[:, part].to(compute)  # [K, C, D]
            grads = states.new_empty(*states.shape[:2], weight.shape[0])  # [K, C, Vd]
            for k in range(steps):
                log_q = torch.log_softmax((states[k] @ rows.T).float(), -1)  # [C, Vd]
                w = weights[k, part]  # [C]
                value, grad, alpha = loss_and_acceptance(loss, log_q, p)
                total += torch.dot(w, value)
                acceptance[k] += torch.dot((w > 0).float(), alpha)
                torch.mul(grad, w[:, None], out=grads[k])
            if grad_student is not None:
                grad_student[:, part] = (grads @ rows).to(student.dtype)
            if grad_weight is not None:
                grad_weight += grads.flatten(0, 1).T @ states.flatten(0, 1)
        ctx.save_for_backward(grad_student, grad_weight.to(weight.dtype) if grad_weight is not None else None)
        ctx.mark_non_differentiable(acceptance)
        return total, acceptance

    @staticmethod
    def backward(ctx, grad_total, _):
        scaled = (g * grad_total if g is not None else None for g in ctx.saved_tensors)
        return *scaled, None, None, None


def loss_and_acceptance(loss: LossFunction, log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [R], its gradient by the logits [R, Vd], and sum_v min(p, q) = 1 - |p - q|_1 / 2 [R]."""
    if loss is kl:  # its gradient is q - p already
        value, grad = kl(log_q, p)
        return value, grad, 1 - 0.5 * torch.linalg.vector_norm(grad, 1, dim=-1)
    alpha = torch.minimum(log_q.exp(), p).sum(-1)
    return *loss(log_q, p), alpha


def distill(
    student: Tensor, weight: Tensor, teacher: Callable[[slice], Tensor], weights: Tensor, loss: str = "kl"
) -> tuple[Tensor, Tensor]:
    """Distil the teacher's distribution over the draft vocabulary into several draft steps at once.

    Args:
        student: [K, N, D] states of K draft steps that all predict the same N tokens.
        weight: [Vd, D] the student's lm_head.
        teacher: gives the teacher's logits [C, Vd] of a slice of the N tokens, float32. They are renormalised on Vd.
        weights: [K, N] float32, what each loss counts for; 0 leaves a token out.
        loss: a name of LOSSES.

    Returns:
        sum of weights * loss in nats (differentiable in `student` and `weight`), and [K] sums of sum_v min(p, q) over
        the tokens of weight > 0.
    """
    assert student.shape[:2] == weights.shape, (
        f"weights: expected {tuple(student.shape[:2])}, got {tuple(weights.shape)}"
    )
    return _Distill.apply(student, weight, teacher, weights, LOSSES[loss])


def teacher_logits(target, hidden: Tensor, vocabulary: Tensor | None) -> Callable[[slice], Tensor]:
    """The teacher of `distill`: logits of `hidden` [N, H] over the draft vocabulary's rows of the target's lm_head."""
    rows = target.lm_head_weight if vocabulary is None else target.lm_head_weight[vocabulary]  # [Vd, H]
    return lambda part: target.logits(hidden[part].to(rows.dtype), rows)


def step_weights(num_steps: int, decay: float, device: torch.device | None = None) -> Tensor:
    """[K] weights decay^k of the draft steps."""
    return decay ** torch.arange(num_steps, dtype=torch.float32, device=device)
