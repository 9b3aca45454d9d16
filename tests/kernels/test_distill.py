import pytest
import torch
from headtrain_kernels import distill as module
from headtrain_kernels import reference
from headtrain_kernels.distill import distill, launch_rows

ROWS = pytest.mark.parametrize("rows", [module.launch_rows, module._torch_rows], ids=["triton", "torch"])


def make_case(device="cpu", dtype=torch.float32, steps=3, tokens=11, dim=20, hidden=24, draft=70, target=200, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    student, weight = draw(steps, tokens, dim).requires_grad_(), (draw(draft, dim) * 0.5).requires_grad_()
    teacher, full_weight = draw(tokens, hidden), draw(target, hidden) * 0.5
    rows = torch.randperm(target, generator=generator)[:draft].sort().values.to(device)
    weights = torch.rand(steps, tokens, generator=generator) * (torch.rand(steps, tokens, generator=generator) < 0.7)
    return student, weight, teacher, full_weight[rows], weights.to(device), full_weight


def compare(arguments, full_weight, softcap, out, rtol, atol):
    """Loss, acceptance of the trained tokens, and both gradients against autograd through the float64 form."""
    student, weight, _, _, weights = arguments
    loss, accept = reference.distill(*arguments, full_weight, softcap)
    expected = torch.autograd.grad(3 * loss, (student, weight))
    got = torch.autograd.grad(3 * out[0], (student, weight))
    trained = weights != 0
    tolerance = {"rtol": rtol, "atol": atol, "check_dtype": False}
    torch.testing.assert_close(out[0], loss, **tolerance)
    torch.testing.assert_close(out[1], accept * trained, **tolerance)
    for name, a, b in zip(("student", "weight"), got, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance, msg=lambda text, name=name: f"gradient of {name}: {text}")


@ROWS
@pytest.mark.parametrize("whole", [False, True], ids=["restricted", "full"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_forward_and_gradients(rows, whole, softcap, chunk, device):
    *arguments, full_weight = make_case(device)
    full_weight = full_weight if whole else None
    out = module._Distill.apply(*arguments, full_weight, softcap, chunk, rows)
    compare(arguments, full_weight, softcap, out, 1e-5, 1e-5)


@ROWS
def test_vocabulary_wider_than_a_block(rows, device):
    *arguments, _ = make_case(device, steps=1, tokens=3, dim=8, hidden=8, draft=5000, target=5001)
    compare(arguments, None, None, module._Distill.apply(*arguments, None, None, 2, rows), 1e-5, 1e-5)


def test_float64_is_exact():
    *arguments, full_weight = make_case(dtype=torch.float64)
    compare(arguments, full_weight, 5.0, distill(*arguments, full_weight, 5.0), 1e-12, 1e-12)


def test_one_step_without_its_dimension():
    student, weight, teacher, rows, weights, _ = make_case(steps=1)
    loss, accept = distill(student[0], weight, teacher, rows, weights[0])
    both = distill(student, weight, teacher, rows, weights)
    assert accept.shape == (11,) and torch.equal(accept, both[1][0]) and torch.equal(loss, both[0])


def test_tokens_of_weight_zero_cost_nothing(device):
    student, weight, teacher, rows, weights, _ = make_case(device)
    weights[:, 4] = 0
    before = module._Distill.apply(student, weight, teacher, rows, weights, None, None, 5, launch_rows)
    spoilt = teacher.clone()
    spoilt[4] = float("nan")
    after = module._Distill.apply(student, weight, spoilt, rows, weights, None, None, 5, launch_rows)
    assert torch.equal(before[0], after[0]) and (after[1][:, 4] == 0).all()
    assert (torch.autograd.grad(after[0], student)[0][:, 4] == 0).all()


def test_tiny_weights_survive_float16(device):
    """Gradients of 1e-9 would vanish in float16; they are kept relative to the largest weight."""
    student, weight, teacher, rows, weights, _ = make_case(device, torch.float16)
    big = module._Distill.apply(student, weight, teacher, rows, weights, None, None, 5, launch_rows)
    small = module._Distill.apply(student, weight, teacher, rows, weights * 2.0**-20, None, None, 5, launch_rows)
    for a, b in zip(
        torch.autograd.grad(big[0], (weight,)), torch.autograd.grad(small[0] * 2.0**20, (weight,)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_only_the_needed_gradients():
    student, weight, teacher, rows, weights, _ = make_case()
    loss, _ = distill(student.detach(), weight, teacher, rows, weights)
    assert torch.autograd.grad(loss, weight)[0].shape == weight.shape
    loss, _ = distill(student, weight.detach(), teacher, rows, weights)
    assert torch.autograd.grad(loss, student)[0].shape == student.shape
    with torch.no_grad():
        assert not distill(student, weight, teacher, rows, weights)[0].requires_grad


def test_autocast():
    """Products in bf16, the sums in float32, gradients in the parameters' dtype."""
    *arguments, _ = make_case()
    with torch.autocast("cpu", torch.bfloat16):
        out = distill(*arguments)
    assert out[0].dtype == torch.float32
    compare(arguments, None, None, out, 5e-2, 5e-2)


def test_wrong_variant_fails(device):
    *arguments, full_weight = make_case(device)
    out = module._Distill.apply(*arguments, None, None, 100, launch_rows)
    with pytest.raises(AssertionError):
        compare(arguments, full_weight, None, out, 1e-3, 1e-3)


def test_asserts_name_the_argument():
    student, weight, teacher, rows, weights, full = make_case()
    with pytest.raises(AssertionError, match=r"weight: shape \(70, 19\) received, \(any, 20\) expected"):
        distill(student, weight[:, :19], teacher, rows, weights)
    with pytest.raises(AssertionError, match=r"teacher: shape \(10, 24\) received, \(11, any\) expected"):
        distill(student, weight, teacher[:10], rows, weights)
    with pytest.raises(AssertionError, match=r"teacher_weight: shape \(69, 24\) received, \(70, 24\) expected"):
        distill(student, weight, teacher, rows[:69], weights)
    with pytest.raises(AssertionError, match=r"weights: shape \(2, 11\) received, \(3, 11\) expected"):
        distill(student, weight, teacher, rows, weights[:2])
    with pytest.raises(AssertionError, match=r"full_weight: shape \(200, 23\) received, \(any, 24\) expected"):
        distill(student, weight, teacher, rows, weights, full[:, :23])
    logits = torch.zeros(3, 4, 70)
    with pytest.raises(AssertionError, match=r"teacher: shape \(4, 69\) received, \(4, 70\) expected"):
        launch_rows(logits, torch.zeros(4, 69), None, torch.ones(3, 4), None, True)
    with pytest.raises(AssertionError, match="weights: dtype torch.float64 received"):
        launch_rows(logits, torch.zeros(4, 70), None, torch.ones(3, 4).double(), None, True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)], ids=str
)
@pytest.mark.parametrize("whole", [False, True], ids=["restricted", "full"])
def test_gpu(dtype, tolerance, whole, device):
    *arguments, full_weight = make_case(
        device, dtype, steps=4, tokens=700, dim=256, hidden=256, draft=8192, target=32_000
    )
    full_weight = full_weight if whole else None
    compare(arguments, full_weight, 30.0, distill(*arguments, full_weight, 30.0), tolerance, tolerance)
