"""Distillation losses, computed in chunks of tokens.

A chunk's logits are made, turned into a loss and its gradient, and dropped, so no tensor of size [tokens, V] or
[steps x tokens, Vd] is ever alive. The teacher's softmax of a chunk is shared by all draft steps that predict it.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from decode.gpu import runs_kernels
from decode.linear import is_slow

CHUNK_ELEMENTS = 1 << 24  # draft logits of one chunk, all steps together: 2,048 rows of a vocabulary of 8,192
PIECE = 2048  # rows of the gradient of an lm_head that are summed at a time

# (log_q, p) [R, Vd] float32 -> losses [R] and their gradient by the logits [R, Vd]; may overwrite log_q, never p
LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def kl(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Forward KL up to the teacher's entropy: -sum_v p log q, gradient q - p."""
    value = -torch.linalg.vecdot(p, log_q)
    return value, log_q.exp_().sub_(p)


def through_softmax(d: Tensor, q: Tensor) -> Tensor:
    """Gradient by the logits of a loss whose gradient by q is `d`: q (d - sum_v q d)."""
    return q * (d - torch.linalg.vecdot(q, d)[:, None])


def top(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy on the teacher's 10 likeliest tokens alone, not renormalised (arXiv 2408.15766)."""
    best = p.topk(min(10, p.shape[-1]), -1)
    value = -(best.values * log_q.gather(-1, best.indices)).sum(-1)
    grad = log_q.exp_() * best.values.sum(-1, keepdim=True)
    return value, grad.scatter_add_(-1, best.indices, -best.values)


def reverse_kl(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """sum_v q (log q - log p)."""
    ratio = log_q - _log(p)
    q = log_q.exp_()
    return torch.linalg.vecdot(q, ratio), through_softmax(ratio, q)


def jsd(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Jensen-Shannon divergence: the mean KL of p and of q from (p + q) / 2."""
    q = log_q.exp()
    log_m = _log((p + q) / 2)
    ratio = log_q - log_m
    value = 0.5 * (torch.linalg.vecdot(p, _log(p) - log_m) + torch.linalg.vecdot(q, ratio))
    return value, through_softmax(0.5 * ratio, q)


def tv(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Total variation: 1 - alpha, alpha = sum_v min(p, q) the probability that the guess is accepted."""
    q = log_q.exp_()
    alpha = torch.minimum(p, q).sum(-1)
    return 1 - alpha, through_softmax(-(q < p).to(q.dtype), q)


def lk_alpha(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """-log alpha (LK losses, arXiv 2602.23881)."""
    value, grad = tv(log_q, p)
    alpha = (1 - value).clamp(min=1e-5)
    return -alpha.log(), grad / alpha[:, None]


def lk_hybrid(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """w KL + (1 - w)(1 - alpha) with w = exp(-3 alpha) of each position, not differentiated (arXiv 2602.23881)."""
    near, near_grad = tv(log_q.clone(), p)
    far, far_grad = kl(log_q, p)
    w = torch.exp(-3 * (1 - near))
    return w * far + (1 - w) * near, w[:, None] * far_grad + (1 - w)[:, None] * near_grad


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()


LOSSES: dict[str, LossFunction] = {
    function.__name__: function for function in (kl, reverse_kl, jsd, tv, lk_alpha, lk_hybrid, top)
}
LossName = Literal["kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_hybrid", "top"]


def smooth_l1(student: Tensor, aim: Tensor) -> Tensor:
    """Distance of features [.., H] in float32, mean over H: d^2 / 2 where |d| < 1, else |d| - 1 / 2. Returns [..]."""
    aim = aim.float().expand_as(student)
    return torch.nn.functional.smooth_l1_loss(student.float(), aim, reduction="none").mean(-1)


FEATURE_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"smooth_l1": smooth_l1}
FeatureLossName = Literal["smooth_l1"]


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
        chunk = max(1, min(num_tokens, CHUNK_ELEMENTS // (steps * weight.shape[0])))
        memory = rows.new_empty(steps * chunk * weight.shape[0])  # of every chunk's logits, then of their gradients
        product = torch.empty_like(rows) if needs_weight and compute is not torch.float32 else None
        for start in range(0, num_tokens, chunk):
            part = slice(start, min(start + chunk, num_tokens))
            states = student[:, part].to(compute)  # [K, C, D]
            flat = memory[: states.shape[1] * steps * weight.shape[0]].view(-1, weight.shape[0])  # [K C, Vd]
            torch.mm(states.flatten(0, 1), rows.T, out=flat)
            grads = flat.view(*states.shape[:2], -1)  # [K, C, Vd]
            values, alphas = replace_by_gradients(loss, grads, teacher(part), weights[:, part])  # [K, C]
            total += torch.sum(weights[:, part] * values)
            acceptance += torch.sum((weights[:, part] > 0) * alphas, 1)
            if grad_student is not None:
                grad_student[:, part] = (grads @ rows).to(student.dtype)
            if grad_weight is not None:
                add_product(grad_weight, flat.T, states.flatten(0, 1), product)
        ctx.save_for_backward(grad_student, grad_weight.to(weight.dtype) if grad_weight is not None else None)
        ctx.mark_non_differentiable(acceptance)
        return total, acceptance

    @staticmethod
    def backward(ctx, grad_total, _):
        scaled = (g * grad_total if g is not None else None for g in ctx.saved_tensors)
        return *scaled, None, None, None


def replace_by_gradients(loss: LossFunction, logits: Tensor, teacher: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Put weights [K, C] * d loss / d logits in the place of the draft's logits [K, C, Vd]; teacher [C, Vd] are logits.

    Returns losses and sum_v min(p, q), both [K, C], finite but meaningless where a weight is 0.
    """
    if loss is kl and runs_kernels(logits):
        from headtrain_kernels.distill import launch_rows

        return launch_rows(logits, teacher.contiguous(), None, weights.contiguous(), softcap=None, needs_grad=True)
    p = torch.softmax(teacher, -1)  # [C, Vd]
    values, alphas = torch.empty_like(weights), torch.empty_like(weights)
    for k, w in enumerate(weights):
        log_q = torch.log_softmax(logits[k].float(), -1)  # [C, Vd]
        values[k], grad, alphas[k] = loss_and_acceptance(loss, log_q, p)
        logits[k] = grad.mul_(w[:, None])
    return values, alphas


def add_product(total: Tensor, a: Tensor, b: Tensor, product: Tensor | None) -> None:
    """total += a @ b in float32. `product` holds a @ b where the two are of a narrower dtype."""
    if product is None:
        total.addmm_(a, b)
        return
    torch.mm(a, b, out=product)
    # A sum of two dtypes first widens one of them: in pieces, the copy stays in the caches.
    for wide, narrow in zip(total.split(PIECE), product.split(PIECE), strict=True):
        wide += narrow


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
    if is_slow(rows):
        rows = rows.float()
    return lambda part: target.logits(hidden[part].to(rows.dtype), rows)


def token_teacher(labels: Tensor, size: int) -> Callable[[slice], Tensor]:
    """A teacher of `distill` over `size` tokens that is sure of `labels` [N]."""

    def teacher(part: slice) -> Tensor:
        logits = torch.full((len(labels[part]), size), -torch.inf, device=labels.device)
        return logits.scatter_(1, labels[part][:, None], 0.0)

    return teacher


def step_weights(num_steps: int, decay: float, device: torch.device | None = None) -> Tensor:
    """[K] weights decay^k of the draft steps."""
    return decay ** torch.arange(num_steps, dtype=torch.float32, device=device)
