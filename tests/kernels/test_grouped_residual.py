import pytest
import torch
from headtrain_kernels import reference
from headtrain_kernels.grouped_residual import _torch_grouped_residual, grouped_residual, launch_grouped_residual

from tests.kernels.cases import assert_differs, assert_matches

FORMS = pytest.mark.parametrize("form", [launch_grouped_residual, _torch_grouped_residual], ids=["triton", "torch"])


def make_case(rows, size, heads, shared, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(*(() if shared else (heads,)), rows, size, generator=generator)
    weight, bias = (
        torch.randn(heads, size, size, generator=generator) / size**0.5,
        torch.randn(heads, size, generator=generator),
    )
    return tuple(tensor.to(device, dtype) for tensor in (x, weight, bias))


@FORMS
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("rows, size, heads", [(1, 16, 1), (37, 70, 3), (64, 64, 5)])
def test_forward(form, rows, size, heads, dtype, shared, device):
    arguments = make_case(rows, size, heads, shared, device, dtype)
    expected = reference.grouped_residual(*(tensor.double() for tensor in arguments))
    assert_matches(form(*arguments), expected, dtype)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_gradients(shared):
    arguments = [tensor.double().requires_grad_() for tensor in make_case(13, 20, 3, shared)]
    assert torch.autograd.gradcheck(grouped_residual, arguments, fast_mode=True)
    grad = torch.randn(3, 13, 20, dtype=torch.float64)
    expected = torch.autograd.grad(reference.grouped_residual(*arguments), arguments, grad)
    for a, b in zip(torch.autograd.grad(grouped_residual(*arguments), arguments, grad), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_strided_rows(device):
    x, weight, bias = make_case(9, 32, 2, True, device)
    wide = torch.zeros(9, 3, 32, device=device)
    wide[:, 1] = x
    assert_matches(
        launch_grouped_residual(wide[:, 1], weight, bias), reference.grouped_residual(x, weight, bias), x.dtype
    )


def test_heads_in_wrong_order_fail(device):
    x, weight, bias = make_case(9, 32, 2, True, device)
    assert_differs(
        launch_grouped_residual(x, weight.flip(0), bias), reference.grouped_residual(x, weight, bias), x.dtype
    )


def test_asserts_name_the_argument(device):
    x, weight, bias = make_case(9, 32, 2, True, device)
    with pytest.raises(AssertionError, match=r"weight: shape \(2, 32, 31\) received, \(2, 32, 32\) expected"):
        launch_grouped_residual(x, weight[:, :, :31], bias)
    with pytest.raises(AssertionError, match=r"bias: shape \(1, 32\) received, \(2, 32\) expected"):
        launch_grouped_residual(x, weight, bias[:1])
    with pytest.raises(AssertionError, match=r"x: shape \(9, 31\) received, \(any, 32\) expected"):
        launch_grouped_residual(x[:, :31], weight, bias)
    with pytest.raises(AssertionError, match="weight: strides .* a contiguous tensor expected"):
        launch_grouped_residual(x, weight.mT, bias)
    with pytest.raises(AssertionError, match="bias: dtype torch.float16 received"):
        launch_grouped_residual(x, weight, bias.half())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rows", [1, 60, 700])
def test_gpu(rows, dtype, device):
    arguments = make_case(rows, 576, 4, True, device, dtype)
    expected = reference.grouped_residual(*(tensor.double() for tensor in arguments))
    # float32 sums of 576 products
    rtol, atol = {torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (2e-3, 4e-3), torch.float32: (1e-4, 1e-5)}[dtype]
    torch.testing.assert_close(grouped_residual(*arguments).double(), expected, rtol=rtol, atol=atol)
