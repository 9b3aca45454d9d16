"""Kernel and torch form against the float64 loop. See `cases` for the NaN that surrounds every problem."""

import math
from functools import partial

import pytest
import torch
from headtrain_kernels import tree_attention as module
from headtrain_kernels._triton import tl, triton
from headtrain_kernels.ancestors import pack_ancestors, tree_mask
from headtrain_kernels.tree_attention import _torch_tree_attention, launch_tree_attention, tree_attention

from tests.kernels.cases import Problem, assert_differs, assert_matches, make_problem

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    "tree, num_nodes, lengths",
    [
        ("random", 1, (0, 1)),
        ("random", 21, (0, 40)),
        ("path", 9, (1, 64)),
        ("star", 17, (33, 5)),
        ("random", 65, (70,)),
    ],
)
def test_trees(tree, num_nodes, lengths, dtype, device):
    problem = make_problem(lengths, num_nodes, tree, group=2, dtype=dtype, device=device)
    assert_matches(problem.launch(), problem.reference(), dtype)


def test_chain_of_128_nodes(device):
    problem = make_problem((3,), 128, "path", dtype=FP16, device=device)
    assert_matches(problem.launch(), problem.reference(), FP16)


@pytest.mark.parametrize(
    "dtype, lengths",
    [(FP32, (0, 31, 32, 33)), (FP32, (255, 256, 257)), (FP16, (127, 128, 129)), (FP16, (511, 512, 513))],
)
def test_lengths_around_tile_edges(dtype, lengths, device):
    problem = make_problem(lengths, 3, dtype=dtype, device=device)
    for splits in (1, 3):
        assert_matches(problem.launch(max_splits=splits), problem.reference(), dtype)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_group_sizes(group, device):
    problem = make_problem((50, 300), 5, kv_heads=2, group=group, device=device)
    assert_matches(problem.launch(max_splits=2), problem.reference(), FP32)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims(dim, device):
    problem = make_problem((40,), 6, group=3, dim=dim, dtype=FP16, device=device)
    assert_matches(problem.launch(), problem.reference(), FP16)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 4},
        {"window": 290},
        {"softcap": 3.0},
        {"sinks": True},
        {"window": 300, "softcap": 2.0, "sinks": True},
    ],
    ids=str,
)
def test_window_softcap_sinks(options, device):
    problem = make_problem((2, 330), 14, "random", group=2, device=device, **options)
    for splits in (1, 3):
        assert_matches(problem.launch(max_splits=splits), problem.reference(), FP32)


def test_4096_tokens(device):
    problem = make_problem((4096,), 3, group=2, dtype=FP16, device=device)
    assert_matches(problem.launch(max_splits=4), problem.reference(), FP16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("splits", [1, 5, 64])
@pytest.mark.parametrize("tree, num_nodes", [("random", 60), ("path", 128), ("star", 128), ("random", 127)])
def test_long(tree, num_nodes, splits, dtype, device):
    problem = make_problem((4096, 0, 1023), num_nodes, tree, kv_heads=2, group=4, dim=80, dtype=dtype, device=device)
    assert_matches(problem.launch(max_splits=splits), problem.reference(), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_settings(seed, device):
    generator = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    options = {"window": pick(None, 1, 7, 40, 300), "softcap": pick(None, 5.0), "sinks": pick(True, False)}
    problem = make_problem(
        (pick(0, 1, 2, 30), pick(31, 64, 200, 700)), pick(1, 2, 7, 31, 64, 100), pick("random", "star", "path"),
        kv_heads=pick(1, 2), group=pick(1, 3, 4, 7, 8), dim=pick(64, 80, 128), dtype=pick(FP32, FP16), seed=seed,
        device=device, **options,
    )  # fmt: skip
    assert_matches(problem.launch(max_splits=pick(1, 2, 9)), problem.reference(), problem.q.dtype)
    assert_matches(problem.launch(deterministic=True), problem.reference(), problem.q.dtype)


@pytest.mark.parametrize("window", [None, 6])
def test_poison_per_node(window, device):
    """NaN in everything that one node may not see leaves that node exact; a node that sees some of it gets NaN."""
    problem = make_problem((45,), 12, group=2, device=device, window=window)
    expected, visible = problem.reference(), problem.visible()
    for node in range(0, 12, 3):
        poisoned = problem.poison(visible[:, node])
        out = poisoned.launch()
        assert_matches(out[:, :, node], expected[:, :, node], FP32)
        sees_nan = (visible & ~visible[:, node : node + 1]).any(-1)[0]
        assert torch.equal(out[0, 0].isnan().any(-1), sees_nan)


def test_infinite_value_in_hidden_slot(device):
    problem = make_problem((10,), 8, "star", device=device)
    expected = problem.reference()
    problem.k[:, :, 15] = 1e30
    problem.v[:, :, 15] = float("inf")  # node 5
    keep = [node for node in range(8) if node != 5]
    assert_matches(problem.launch()[:, :, keep], expected[:, :, keep], FP32)


def test_node_order_does_not_matter(device):
    problem = make_problem((37,), 30, kv_heads=2, group=2, device=device, window=20)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1)).to(device)
    slots = torch.arange(problem.k.shape[2], device=device)
    slots[37:67] = 37 + order
    shuffled = Problem(
        problem.q[:, :, order], problem.k[:, :, slots], problem.v[:, :, slots], problem.lengths,
        problem.depths[:, order], problem.ancestors[:, order][:, :, order], problem.scale, problem.options,
    )  # fmt: skip
    assert_matches(shuffled.launch(), problem.launch()[:, :, order], FP32)


def test_branch_equals_chain(device):
    """The nodes of a root-to-leaf path attend as the same tokens would in a causal chain."""
    problem = make_problem((20,), 25, device=device)
    leaf = int(problem.depths[0].argmax())
    branch = problem.ancestors[0, leaf].nonzero()[:, 0]
    branch = branch[problem.depths[0, branch].argsort()]
    slots = torch.cat((torch.arange(20, device=device), 20 + branch))
    size = len(branch)
    chain = Problem(
        problem.q[:, :, branch], problem.k[:, :, slots], problem.v[:, :, slots], problem.lengths,
        torch.arange(size, device=device)[None], torch.ones(1, size, size, dtype=torch.bool, device=device).tril(),
        problem.scale,
    )  # fmt: skip
    assert_matches(chain.launch(), problem.launch()[:, :, branch], FP32)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 6])
def test_last_nodes_alone(window, splits, device):
    """A tree run level by level: queries of the last nodes, the rest of the tree in the cache."""
    problem = make_problem((800, 7), 11, kv_heads=2, group=2, device=device, window=window)
    expected = problem.reference()
    common = problem.lengths, problem.depths
    for form in (partial(launch_tree_attention, max_splits=splits), _torch_tree_attention_of):
        for m in (1, 4, 11):
            q, words = problem.q[:, :, -m:], problem.words[:, -m:].contiguous()
            out = form(q, problem.k.nan_to_num(), problem.v.nan_to_num(), *common, words, problem.scale, window)
            assert_matches(out, expected[:, :, -m:], FP32)
    with pytest.raises(AssertionError, match=r"depths: shape \(2, 3\) received, \(2, 11 to 128\) expected"):
        launch_tree_attention(
            problem.q, problem.k, problem.v, problem.lengths, problem.depths[:, :3], problem.words, problem.scale
        )


def _torch_tree_attention_of(q, k, v, lengths, depths, words, scale, window):
    return _torch_tree_attention(q, k, v, lengths, depths, words, scale, window, *[None] * 5)


def test_node_that_sees_nothing_is_zero(device):
    problem = make_problem((0,), 4, device=device)
    problem.ancestors[0, 3] = False
    out = problem.launch()
    assert (out[:, :, 3] == 0).all()
    assert_matches(out, problem.reference(), FP32)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
def test_deterministic_mode_ignores_tree_and_batch(dtype, device):
    """The root's bits are the same with 1 node and 30, alone and beside another sequence."""
    problem = make_problem((600, 70), 30, group=2, dtype=dtype, device=device)
    full = problem.launch(deterministic=True)
    alone = Problem(
        problem.q[:1, :, :1], problem.k[:1], problem.v[:1], problem.lengths[:1], problem.depths[:1, :1],
        problem.ancestors[:1, :1, :1], problem.scale,
    )  # fmt: skip
    assert torch.equal(alone.launch(deterministic=True)[0, :, 0], full[0, :, 0])
    assert_matches(full[:1, :, :1], alone.reference(), dtype)


def test_wrong_masks_fail(device):
    problem = make_problem((20,), 12, device=device, window=6)
    expected = problem.reference()
    n = 12
    # make every slot finite, so that only the mask is at fault
    problem.k.nan_to_num_()
    problem.v.nan_to_num_()
    causal = torch.ones(1, n, n, dtype=torch.bool, device=device).tril()
    own = torch.eye(n, dtype=torch.bool, device=device)[None]
    slots = torch.arange(n, device=device)[None]
    for ancestors, depths in (
        (causal, problem.depths),
        (problem.ancestors & ~own, problem.depths),
        (problem.ancestors, slots),
    ):
        wrong = Problem(
            problem.q, problem.k, problem.v, problem.lengths, depths, ancestors, problem.scale, problem.options
        )
        assert_differs(wrong.launch(), expected, FP32)
    assert_matches(problem.launch(), expected, FP32)


@triton.jit
def _mean_merge_kernel(
    partial_ptr, lse_ptr, out_ptr, length_ptr, sink_ptr, num_nodes, num_heads, window, splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    MIN: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    node, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dims = tl.arange(0, BLOCK_D)
    base = ((batch * num_heads + head) * num_nodes + node) * splits
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(0, splits):
        acc += tl.load(partial_ptr + (base + split) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    out = ((batch * num_nodes + node) * num_heads + head) * HEAD_DIM
    tl.store(out_ptr + out + dims, acc / splits, mask=dims < HEAD_DIM)


def test_wrong_merge_fails(device, monkeypatch):
    problem = make_problem((700,), 4, device=device)
    expected = problem.reference()
    assert_matches(problem.launch(max_splits=2), expected, FP32)
    monkeypatch.setattr(module, "_merge_kernel", _mean_merge_kernel)
    assert_differs(problem.launch(max_splits=2), expected, FP32)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("options", [{}, {"window": 5, "softcap": 3.0, "sinks": True}], ids=["plain", "all"])
def test_torch_form(dtype, options):
    # slots below the longest row are read by the torch form and must be finite
    problem = make_problem((0, 30), 11, kv_heads=2, group=3, dim=80, dtype=dtype, **options)
    problem.k[:, :, :41].nan_to_num_(nan=7.0)
    problem.v[:, :, :41].nan_to_num_(nan=7.0)
    arguments = (problem.q, problem.k, problem.v, problem.lengths, problem.depths, problem.words, problem.scale)
    out = tree_attention(*arguments, **problem.options)
    assert_matches(out, problem.reference(), dtype)
    mask = tree_mask(*arguments[3:6], 41, options.get("window"))
    assert torch.equal(out, tree_attention(*arguments, **problem.options, mask=mask))


def test_torch_form_of_one_node_needs_no_mask(monkeypatch):
    problem = make_problem((30,), 1, group=2)
    monkeypatch.setattr(module, "tree_mask", None)
    out = tree_attention(problem.q, problem.k, problem.v, problem.lengths, problem.depths, problem.words)
    assert_matches(out, problem.reference(), FP32)


def test_torch_form_scales_a_quantised_cache():
    problem = make_problem((30,), 5, kv_heads=2, group=2)
    problem.k, problem.v = (x.nan_to_num().to(torch.float8_e4m3fn) for x in (problem.k, problem.v))
    problem.options |= {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0, 0.1])}
    arguments = (problem.q, problem.k, problem.v, problem.lengths, problem.depths, problem.words, problem.scale)
    assert_matches(tree_attention(*arguments, **problem.options), problem.reference(), FP32)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("k", lambda p: p.k[:, :, :, :32], r"k_cache: shape .*32\) received, \(1, any, any, 64\) expected"),
        ("v", lambda p: p.v[:, :1], r"v_cache: shape \(1, 1, .* received, \(1, 2, "),
        ("q", lambda p: p.q[:, :3], r"q: 3 heads received, a multiple of the cache's 2 expected"),
        ("q", lambda p: p.q.mT.contiguous().mT, r"q: strides .* received, a last stride of 1 expected"),
        ("q", lambda p: p.q.double(), r"q: dtype torch.float64 received"),
        ("k", lambda p: p.k.half(), r"k_cache: dtype torch.float16 received, torch.float32 or"),
        ("lengths", lambda p: p.lengths.float(), r"lengths: dtype torch.float32 received"),
        ("lengths", lambda p: p.lengths.repeat(2), r"lengths: shape \(2,\) received, \(1\) expected"),
        ("depths", lambda p: p.depths[:, :2], r"depths: shape \(1, 2\) received, \(1, 3 to 128\) expected"),
    ],
)  # fmt: skip
def test_asserts_name_the_argument(name, change, message, device):
    problem = make_problem((9,), 3, kv_heads=2, group=2, device=device)
    setattr(problem, name, change(problem))
    words = pack_ancestors(problem.ancestors)
    arguments = (problem.q, problem.k, problem.v, problem.lengths, problem.depths, words, problem.scale)
    with pytest.raises(AssertionError, match=message):
        launch_tree_attention(*arguments)


def test_asserts_of_options(device):
    problem = make_problem((9,), 3, group=2, device=device)
    words = problem.words
    arguments = (problem.q, problem.k, problem.v, problem.lengths, problem.depths)
    with pytest.raises(AssertionError, match=r"words: shape \(1, 3, 1\) received, \(1, 3, 2\) expected"):
        launch_tree_attention(*arguments, words[:, :, :1], 1.0)
    with pytest.raises(AssertionError, match=r"sinks: shape \(3,\) received, \(2\) expected"):
        launch_tree_attention(*arguments, words, 1.0, sinks=torch.zeros(3, device=device))
    with pytest.raises(AssertionError, match="k_scale and v_scale: one received"):
        launch_tree_attention(*arguments, words, 1.0, k_scale=torch.ones(1, device=device))
    with pytest.raises(AssertionError, match="window: 0 received, at least 1 expected"):
        launch_tree_attention(*arguments, words, 1.0, window=0)
    with pytest.raises(AssertionError, match="q: head dim 48 received"):
        launch_tree_attention(*(x[..., :48] for x in arguments[:3]), *arguments[3:], words, 1.0)
    with pytest.raises(AssertionError, match="129 nodes received"):
        make_problem((1,), 129, "path", device=device).launch()


def _dense(problem: Problem) -> torch.Tensor:
    """float64 attention as one masked softmax; for long contexts on a GPU. Slots nobody sees become zero."""
    kv_heads = problem.k.shape[1]
    group = problem.q.shape[1] // kv_heads
    mask = problem.visible()[:, None]  # [B, 1, n, S]
    k, v = (torch.nan_to_num(x.double()).repeat_interleave(group, 1) for x in (problem.k, problem.v))
    if "k_scale" in problem.options:
        k = k * problem.options["k_scale"].double().repeat_interleave(group)[:, None, None]
        v = v * problem.options["v_scale"].double().repeat_interleave(group)[:, None, None]
    scores = problem.q.double() @ k.mT * problem.scale
    if problem.options.get("softcap"):
        scores = problem.options["softcap"] * torch.tanh(scores / problem.options["softcap"])
    scores = scores.masked_fill(~mask, -math.inf)
    if problem.options.get("sinks") is not None:
        sink = problem.options["sinks"].double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]] @ v


def test_dense_form_equals_reference():
    problem = make_problem((40, 3), 9, kv_heads=2, group=2, window=12, softcap=4.0, sinks=True)
    torch.testing.assert_close(_dense(problem), problem.reference())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_nodes, group", [(1, 1), (1, 8), (7, 3), (16, 4), (60, 4), (128, 8)])
def test_gpu_shapes(num_nodes, group, dim, dtype, device):
    for options in ({}, {"window": 300, "softcap": 20.0, "sinks": True}):
        problem = make_problem(
            (0, 1, 255, 2049), num_nodes, kv_heads=2, group=group, dim=dim, dtype=dtype, device=device, **options
        )
        assert_matches(problem.launch(), _dense(problem), dtype)
        assert_matches(problem.launch(deterministic=True), _dense(problem), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("num_nodes", [1, 16, 60])
def test_gpu_fp8_cache(num_nodes, kind, device):
    problem = make_problem((700, 33), num_nodes, kv_heads=2, group=4, dim=128, dtype=BF16, device=device)
    problem.k, problem.v = (x.float().to(kind) for x in (problem.k, problem.v))
    scales = {"k_scale": torch.tensor([0.5, 1.5], device=device), "v_scale": torch.tensor([2.0, 0.25], device=device)}
    problem.options |= scales
    assert_matches(problem.launch(), _dense(problem), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [16_384, 131_072])
@pytest.mark.parametrize("num_nodes", [1, 16, 64])
def test_gpu_long_context(num_nodes, length, device):
    problem = make_problem((length,), num_nodes, kv_heads=1, group=4, dim=128, dtype=BF16, device=device)
    assert_matches(problem.launch(), _dense(problem), BF16)


@pytest.mark.gpu
def test_gpu_poison(device):
    problem = make_problem((500,), 40, group=4, dim=128, dtype=BF16, device=device, window=64)
    expected, visible = problem.reference(), problem.visible()
    for node in (0, 7, 39):
        assert_matches(problem.poison(visible[:, node]).launch()[:, :, node], expected[:, :, node], BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_gpu_deterministic_bits(dtype, device):
    problem = make_problem((5000, 70), 64, kv_heads=4, group=4, dim=128, dtype=dtype, device=device)
    full = problem.launch(deterministic=True)
    for nodes in (1, 16, 60):
        part = Problem(
            problem.q[:1, :, :nodes], problem.k[:1], problem.v[:1], problem.lengths[:1], problem.depths[:1, :nodes],
            problem.ancestors[:1, :nodes, :nodes], problem.scale,
        )  # fmt: skip
        assert torch.equal(part.launch(deterministic=True)[0, :, 0], full[0, :, 0])


@pytest.mark.gpu
def test_gpu_graph_replays_with_other_lengths_and_trees(device):
    first = make_problem((900, 20), 24, kv_heads=2, group=4, dim=128, dtype=BF16, device=device)
    words = first.words
    arguments = (first.q, first.k, first.v, first.lengths, first.depths, words, first.scale)
    tree_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention(*arguments)
    second = make_problem((3, 900), 24, kv_heads=2, group=4, dim=128, dtype=BF16, device=device, seed=1)
    for old, new in zip(
        arguments[:6], (second.q, second.k, second.v, second.lengths, second.depths, second.words), strict=True
    ):
        old.copy_(new)
    graph.replay()
    assert_matches(out, _dense(second), BF16)
