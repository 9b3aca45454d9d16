import pytest
import torch
from headtrain_kernels import reference
from headtrain_kernels.noise import counter_noise
from headtrain_kernels.topk_logprob import _torch_topk_logprob, launch_topk_logprob, topk_logprob

from tests.kernels.cases import assert_matches

FORMS = pytest.mark.parametrize("form", [launch_topk_logprob, _torch_topk_logprob], ids=["triton", "torch"])


def make_case(rows, size, columns, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, size, generator=generator).to(device, dtype)
    weight = (torch.randn(columns, size, generator=generator) / size**0.5 * 3).to(device, dtype)
    bias = torch.randn(columns, generator=generator).to(device)
    vocabulary = torch.randperm(4 * columns, generator=generator)[:columns].sort().values.to(device)
    keys = torch.arange(rows, device=device), torch.arange(rows, device=device) * 3 + 5
    return hidden, weight, bias, vocabulary, keys


def check(out, expected, dtype):
    log_q, columns, lse = out
    assert torch.equal(columns.cpu(), expected[1].cpu())
    assert_matches(log_q, expected[0], dtype)
    assert_matches(lse, expected[2], dtype)


@FORMS
@pytest.mark.parametrize("rows, size, columns, k", [(1, 16, 5, 5), (3, 40, 300, 4), (17, 20, 128, 1), (1, 17, 129, 12)])
def test_likeliest(form, rows, size, columns, k, device):
    hidden, weight, bias, _, _ = make_case(rows, size, columns, device)
    none = (None, None, None, None, 0)
    check(form(hidden, weight, k, None, 1.0, *none), reference.topk_logprob(hidden, weight, k), torch.float32)
    expected = reference.topk_logprob(hidden, weight, k, bias, 0.6)
    check(form(hidden, weight, k, bias, 0.6, *none), expected, torch.float32)


@FORMS
def test_noisy_order(form, device):
    """The best by log q + g, with noise keyed by target ids; a seed on the device is the same seed."""
    hidden, weight, bias, vocabulary, keys = make_case(2, 17, 200, device)
    noise = counter_noise(7, *(key.cpu() for key in keys), 800, 1)
    expected = reference.topk_logprob(hidden, weight, 3, bias, 0.7, noise[:, vocabulary.cpu()].to(device))
    for seed in (7, torch.tensor([7], device=device)):
        check(form(hidden, weight, 3, bias, 0.7, seed, *keys, vocabulary, 1), expected, torch.float32)
    by_column = reference.topk_logprob(hidden, weight, 3, bias, 0.7, noise[:, :200].to(device))
    assert not torch.equal(by_column[1], expected[1])
    check(form(hidden, weight, 3, bias, 0.7, 7, *keys, None, 1), by_column, torch.float32)


@FORMS
def test_ties_and_masked_columns(form, device):
    hidden = torch.ones(2, 16, device=device)
    weight = torch.zeros(300, 16, device=device)
    bias = torch.full((300,), -torch.inf, device=device)
    bias[[7, 140, 290]] = 0.0
    log_q, columns, _ = form(hidden, weight, 3, bias, 1.0, None, None, None, None, 0)
    assert log_q.exp().sum(1).allclose(torch.ones(2, device=device))
    assert columns.sort().values.tolist() == [[7, 140, 290]] * 2


def test_kernel_gives_the_lower_column_of_a_tie(device):
    hidden, weight = torch.ones(1, 16, device=device), torch.zeros(300, 16, device=device)
    columns = launch_topk_logprob(hidden, weight, 5, None, 1.0, None, None, None, None, 0)[1]
    assert columns.tolist() == [[0, 1, 2, 3, 4]]


def test_half_precision_and_strides(device):
    """fp16 in the interpreter; the columns may differ where logits tie to fp16, the values may not."""
    hidden, weight, _, _, _ = make_case(6, 80, 200, device, torch.float16)
    wide = torch.zeros(12, 100, dtype=torch.float16, device=device)
    wide[::2, 10:90] = hidden
    out = launch_topk_logprob(wide[::2, 10:90], weight, 6, None, 1.0, None, None, None, None, 0)
    assert_matches(out[0], reference.topk_logprob(hidden, weight, 6)[0], torch.float16)


def test_wrong_normaliser_fails(device):
    hidden, weight, _, _, _ = make_case(4, 30, 100, device)
    log_q = launch_topk_logprob(hidden, weight, 3, None, 1.0, None, None, None, None, 0)[0]
    with pytest.raises(AssertionError):
        assert_matches(log_q, reference.topk_logprob(hidden, weight[:90], 3)[0], torch.float32)


def test_asserts_name_the_argument(device):
    hidden, weight, bias, vocabulary, keys = make_case(4, 30, 100, device)
    none = (None, None, None, None, 0)
    with pytest.raises(AssertionError, match=r"weight: shape \(100, 29\) received, \(any, 30\) expected"):
        launch_topk_logprob(hidden, weight[:, :29], 3, None, 1.0, *none)
    with pytest.raises(AssertionError, match="weight: dtype torch.float16 received, torch.float32 expected"):
        launch_topk_logprob(hidden, weight.half(), 3, None, 1.0, *none)
    with pytest.raises(AssertionError, match="k: 65 received, 1 to 64 expected"):
        launch_topk_logprob(hidden, weight, 65, None, 1.0, *none)
    with pytest.raises(AssertionError, match="temperature: 0.0 received"):
        launch_topk_logprob(hidden, weight, 3, None, 0.0, *none)
    with pytest.raises(AssertionError, match=r"bias: shape \(99,\) received, \(100\) expected"):
        launch_topk_logprob(hidden, weight, 3, bias[:99], 1.0, *none)
    with pytest.raises(AssertionError, match="positions: None received"):
        launch_topk_logprob(hidden, weight, 3, None, 1.0, 1, keys[0], None, None, 0)
    with pytest.raises(AssertionError, match=r"vocabulary: shape \(50,\) received"):
        launch_topk_logprob(hidden, weight, 3, None, 1.0, 1, *keys, vocabulary[:50], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rows, columns, k", [(1, 32_000, 10), (10, 32_000, 10), (100, 128_256, 8), (4, 32_000, 64)])
def test_gpu(rows, columns, k, dtype, device):
    hidden, weight, bias, vocabulary, keys = make_case(rows, 1024, columns, device, dtype)
    log_q, found, lse = topk_logprob(hidden, weight, k, bias, 0.8, 3, *keys, vocabulary)
    noise = counter_noise(3, *keys, 4 * columns)[:, vocabulary]
    z = (hidden.double() @ weight.double().T + bias) / 0.8
    log_p = torch.log_softmax(z, -1)
    assert_matches(lse, torch.logsumexp(z, -1), torch.float32 if dtype == torch.float32 else torch.float16)
    torch.testing.assert_close(log_q.double(), log_p.gather(1, found), rtol=1e-4, atol=1e-4)
    best = (log_p + noise).topk(k, -1).values
    torch.testing.assert_close((log_p + noise).gather(1, found), best, rtol=1e-4, atol=1e-4)
