import pytest
import torch
from headtrain_kernels import reference
from headtrain_kernels.kv_commit import _torch_kv_commit, kv_commit, launch_kv_commit

FORMS = pytest.mark.parametrize("form", [launch_kv_commit, _torch_kv_commit], ids=["triton", "torch"])


def make_cache(device, layers=2, batch=2, heads=2, capacity=40, dim=80, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(layers, 2, batch, heads, capacity, dim, generator=generator).to(device, dtype)


@FORMS
@pytest.mark.parametrize(
    "path",
    [
        [[0, 2, 1, 7, -1], [0, 1, 3, 4, 9]],  # node order need not follow the path
        [[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]],
        [[0, -1, -1, -1, -1], [0, 12, -1, -1, -1]],
        [[0, 4, 3, 2, 1], [0, 2, 3, 4, 5]],  # overlap in both directions
        [[0], [0]],
    ],
    ids=str,
)
def test_moves_the_path(form, path, device):
    cache, lengths, path = make_cache(device), torch.tensor([0, 17], device=device), torch.tensor(path, device=device)
    expected = reference.kv_commit(cache, lengths, path)
    before = cache.data_ptr()
    form(cache, lengths, path)
    assert cache.data_ptr() == before and torch.equal(cache, expected)


@FORMS
def test_random_paths(form, device):
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        cache = make_cache(device, batch=3, dim=96, capacity=70)
        lengths = torch.randint(0, 30, (3,), generator=generator)
        path = torch.stack([torch.randperm(33, generator=generator)[:20] for _ in range(3)]).sort().values
        path[:, 0] = 0
        path[1, 5:] = -1
        lengths, path = lengths.to(device), path.to(device)
        expected = reference.kv_commit(cache, lengths, path)
        form(cache, lengths, path)
        assert torch.equal(cache, expected)


@FORMS
def test_nan_in_dropped_nodes_stays_out(form, device):
    """Rows outside the path hold NaN, which must neither spread nor hinder."""
    cache = make_cache(device, batch=1)
    path, lengths = torch.tensor([[0, 3, 5]], device=device), torch.tensor([10], device=device)
    for slot in (11, 12, 14, 16):
        cache[..., slot, :] = float("nan")
    form(cache, lengths, path)
    assert cache[..., 10:13, :].isfinite().all()


@FORMS
def test_view_of_a_larger_tensor(form, device):
    whole = make_cache(device, heads=3, capacity=50)
    cache = whole[:, :, :, 1:, 5:45]
    lengths, path = torch.tensor([2, 9], device=device), torch.tensor([[0, 2, 6], [0, 4, -1]], device=device)
    expected = whole.clone()
    expected[:, :, :, 1:, 5:45] = reference.kv_commit(cache, lengths, path)
    form(cache, lengths, path)
    assert torch.equal(whole, expected)


def test_copying_in_another_order_fails():
    """The control: descending moves without a copy lose rows that overlap."""
    cache, path = make_cache("cpu", batch=1), [0, 2, 4, 6]
    expected = reference.kv_commit(cache, torch.tensor([0]), torch.tensor([path]))
    for i in reversed(range(4)):
        cache[..., i, :] = cache[..., path[i], :]
    assert not torch.equal(cache, expected)


def test_asserts_name_the_argument(device):
    cache, lengths, path = (
        make_cache(device),
        torch.tensor([0, 1], device=device),
        torch.zeros(2, 3, dtype=torch.int64, device=device),
    )
    with pytest.raises(AssertionError, match=r"lengths: shape \(1,\) received, \(2\) expected"):
        launch_kv_commit(cache, lengths[:1], path)
    with pytest.raises(AssertionError, match=r"path: shape \(1, 3\) received, \(2, any\) expected"):
        launch_kv_commit(cache, lengths, path[:1])
    with pytest.raises(AssertionError, match=r"cache: shape .* received, \(any, 2, any, any, any, any\) expected"):
        launch_kv_commit(cache[:, :1], lengths, path)
    with pytest.raises(AssertionError, match="cache: strides .* a last stride of 1 expected"):
        launch_kv_commit(cache.mT, lengths, path)
    with pytest.raises(AssertionError, match="path: strides .* contiguous"):
        launch_kv_commit(cache, lengths, path.T.contiguous().T)
    with pytest.raises(AssertionError, match="at most 128 columns expected"):
        launch_kv_commit(cache, lengths, path.repeat(1, 50))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_gpu_overlap(dtype, device):
    """Many rows of one head, where a race between warps would show."""
    generator = torch.Generator().manual_seed(2)
    for dim in (64, 128, 256):
        cache = make_cache(device, layers=32, heads=8, capacity=300, dim=dim, dtype=torch.float32).to(dtype)
        path = torch.stack([torch.randperm(127, generator=generator)[:63].sort().values + 1 for _ in range(2)])
        path = torch.cat((torch.zeros(2, 1, dtype=torch.int64), path), 1).to(device)
        lengths = torch.tensor([100, 0], device=device)
        raw = cache.view(torch.uint8)
        expected = reference.kv_commit(raw, lengths, path)
        kv_commit(cache, lengths, path)
        assert torch.equal(raw, expected)
