import os
from typing import get_args

import pytest
import torch
from headtrain_kernels import distill as kernel
from torch.utils._python_dispatch import TorchDispatchMode

from headtrain import losses
from headtrain.losses import (
    FEATURE_LOSSES,
    LOSSES,
    FeatureLossName,
    LossName,
    distill,
    kl,
    step_weights,
    teacher_logits,
)
from headtrain.target import Target
from tests.tiny import VOCAB_SIZE, tiny_target

K, N, D, V = 3, 17, 8, 29


@pytest.fixture
def case():
    """student [K, N, D], weight [V, D], teacher's logits [N, V], weights [K, N] with zeros."""
    g = torch.Generator().manual_seed(0)
    student, weight, teacher = (torch.randn(*shape, generator=g) for shape in ((K, N, D), (V, D), (N, V)))
    weights = torch.rand(K, N, generator=g) * (torch.rand(K, N, generator=g) > 0.3)
    return student.requires_grad_(), weight.requires_grad_(), 2 * teacher, weights


def naive(student, weight, teacher, weights):
    """Full logits in float64, gradients by autograd: total, acceptance, gradients."""
    student, weight = (x.detach().double().requires_grad_() for x in (student, weight))
    p, log_q = teacher.double().softmax(-1), (student @ weight.T).log_softmax(-1)
    total = -(weights.double() * (p * log_q).sum(-1)).sum()
    acceptance = (torch.minimum(p, log_q.exp()).sum(-1) * (weights > 0)).sum(1)
    return total.detach(), acceptance.detach(), *torch.autograd.grad(total, (student, weight))


def fast(student, weight, teacher, weights, **options):
    total, acceptance = distill(student, weight, lambda part: teacher[part], weights, **options)
    return total.detach(), acceptance, *torch.autograd.grad(total, (student, weight))


def close(found, expected, tolerance=2e-5) -> bool:
    return all(
        torch.allclose(a.double(), b.double(), tolerance, tolerance) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 1000])
def test_equals_full_logits_at_any_chunk(case, rows, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", rows * K * V)
    assert close(fast(*case), naive(*case))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
def test_the_kernel_gives_the_same(case, monkeypatch):
    """The branch that a GPU takes, through the interpreter, also for a teacher that is sure of its token."""
    monkeypatch.setattr(losses, "runs_kernels", lambda tensor: True)
    launches = []
    launch = kernel.launch_rows
    monkeypatch.setattr(kernel, "launch_rows", lambda *args, **rest: launches.append(1) or launch(*args, **rest))
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 5 * K * V)
    student, weight, teacher, weights = case
    assert close(fast(*case), naive(*case))
    sure = torch.full_like(teacher, -torch.inf).scatter(1, teacher.argmax(1, keepdim=True), 0.0)
    assert close(fast(student, weight, sure, weights), naive(student, weight, sure.clamp(min=-1e4), weights))
    assert len(launches) == 2 * 4


def test_wrong_weights_and_wrong_teacher_are_seen(case):
    student, weight, teacher, weights = case
    assert not close(fast(student, weight, teacher, weights.roll(1, 1)), naive(*case))
    assert not close(fast(student, weight, teacher.roll(1, 0), weights), naive(*case))


def test_gradient_is_scaled_by_what_comes_behind(case):
    student, weight, teacher, weights = case
    total, _ = distill(student, weight, lambda part: teacher[part], weights)
    found = torch.autograd.grad(total / 7, (student, weight))
    assert close(found, [g / 7 for g in naive(*case)[2:]])


def test_zero_weights_leave_tokens_out(case):
    student, weight, teacher, weights = case
    kept = weights.any(0)
    weights = weights * (torch.arange(N) % 3 > 0)
    total, acceptance, grad, _ = fast(student, weight, teacher, weights)
    assert not grad[weights == 0].any() and grad[weights > 0].any(-1).all() and kept.any()
    nothing = fast(student, weight, teacher, torch.zeros(K, N))
    assert all(not x.any() for x in nothing)


def test_no_tokens_at_all(case):
    student, weight, teacher, weights = case
    total, acceptance, grad, grad_weight = fast(student[:, :0], weight, teacher[:0], weights[:, :0])
    assert total == 0 and not acceptance.any() and not grad_weight.any()


def test_frozen_lm_head_gets_no_gradient(case):
    student, weight, teacher, weights = case
    total, _ = distill(student, weight.detach(), lambda part: teacher[part], weights)
    (grad,) = torch.autograd.grad(total, student)
    assert close([total, grad], [naive(*case)[0], naive(*case)[2]])


def test_another_loss_goes_the_general_way(case, monkeypatch):
    monkeypatch.setitem(losses.LOSSES, "same", lambda log_q, p: kl(log_q, p))
    assert close(fast(*case, loss="same"), naive(*case))


def test_half_precision_under_autocast(case):
    with torch.autocast("cpu", torch.bfloat16):
        found = fast(*case)
    assert close(found, naive(*case), 5e-2)
    assert found[2].dtype == found[3].dtype == torch.float32


class Largest(TorchDispatchMode):
    """Records the most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("rows, small", [(2, True), (N, False)])
def test_no_tensor_of_tokens_times_vocabulary(case, rows, small, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", rows * K * V)
    student, weight, teacher, weights = case
    hidden, rows_of_target = torch.randn(N, D), torch.randn(V, D)
    with Largest() as largest:
        total, _ = distill(student, weight, lambda part: hidden[part] @ rows_of_target.T, weights)
        total.backward()
    assert (largest.elements < N * V) == small, largest.elements


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_teacher_is_the_target_renormalised_on_the_draft_vocabulary(family):
    target = Target(tiny_target(family))
    vocabulary = torch.tensor([1, 4, 9, 50, 100])
    ids = torch.randint(VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(0))
    hidden = target.model.base_model(input_ids=ids)[0][0]
    logits = target.model(input_ids=ids).logits[0]
    part = slice(2, 7)
    whole = teacher_logits(target, hidden, None)(part)
    reduced = teacher_logits(target, hidden, vocabulary)(part)
    torch.testing.assert_close(whole, logits[part])
    p = logits[part].softmax(-1)[:, vocabulary]
    torch.testing.assert_close(reduced.softmax(-1), p / p.sum(-1, keepdim=True))


def test_step_weights():
    torch.testing.assert_close(step_weights(4, 0.8), torch.tensor([1.0, 0.8, 0.64, 0.512]))


def in_words(name, log_q, p):
    """Each loss as its formula says, for autograd."""
    q = log_q.exp()
    alpha = torch.minimum(p, q).sum(-1)
    cross = -(p * log_q).sum(-1)
    m = (p + q) / 2
    likeliest = torch.zeros_like(p).scatter(-1, p.topk(min(10, p.shape[-1]), -1).indices, 1.0)
    w = torch.exp(-3 * alpha.detach())
    return {
        "kl": lambda: cross,
        "reverse_kl": lambda: (q * (log_q - p.log())).sum(-1),
        "jsd": lambda: ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2,
        "tv": lambda: (p - q).abs().sum(-1) / 2,
        "lk_alpha": lambda: -alpha.log(),
        "lk_hybrid": lambda: w * cross + (1 - w) * (1 - alpha),
        "top": lambda: -(likeliest * p * log_q).sum(-1),
    }[name]()


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_its_gradient(name):
    generator = torch.Generator().manual_seed(3)
    logits = (2 * torch.randn(9, 31, generator=generator, dtype=torch.float64)).requires_grad_()
    p = torch.softmax(2 * torch.randn(9, 31, generator=generator, dtype=torch.float64), -1)
    expected = in_words(name, torch.log_softmax(logits, -1), p)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    before = p.clone()
    value, grad = LOSSES[name](torch.log_softmax(logits.detach(), -1), p)
    assert torch.allclose(value, expected, atol=1e-12) and torch.allclose(grad, gradient, atol=1e-12)
    assert torch.equal(p, before)


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_breaks_on_certainty(name):
    """p and q with exact zeros, equal or disjoint: finite values and gradients."""
    sure = torch.tensor([[0.0, -200.0, -200.0], [-200.0, 0.0, -200.0]])
    for p in (torch.eye(3)[:2], torch.eye(3)[1:]):
        value, grad = LOSSES[name](torch.log_softmax(sure, -1), p)
        assert bool(value.isfinite().all()) and bool(grad.isfinite().all())


def test_loss_names_are_those_of_recipes():
    assert set(get_args(LossName)) == set(LOSSES)
    assert set(get_args(FeatureLossName)) == set(FEATURE_LOSSES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smooth_l1_and_its_gradient(dtype):
    """Against the formula in float64, on both sides of |d| = 1 and at d = 0."""
    generator = torch.Generator().manual_seed(4)
    student, aim = (3 * torch.randn(*shape, D, generator=generator) for shape in ((K, N), (N,)))
    student[0, 0] = aim[0]
    student, aim, weights = student.to(dtype), aim.to(dtype), torch.rand(K, N, generator=generator)

    def naive(x):
        d = (x - aim.double()).abs()
        return torch.where(d < 1, d**2 / 2, d - 0.5).sum(-1) / D

    exact = student.double().requires_grad_()
    expected = naive(exact)
    (gradient,) = torch.autograd.grad((weights.double() * expected).sum(), exact)
    student.requires_grad_()
    value = FEATURE_LOSSES["smooth_l1"](student, aim)
    (found,) = torch.autograd.grad((weights * value).sum(), student)
    assert value.shape == (K, N) and value.dtype == torch.float32 and found.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3  # of the gradient's own dtype
    assert torch.allclose(value.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert torch.allclose(found.double(), gradient, rtol=4e-3 if dtype == torch.bfloat16 else 1e-5, atol=tolerance)
    assert not torch.allclose(value[1], FEATURE_LOSSES["smooth_l1"](student.roll(1, 1), aim)[1], rtol=1e-2)
