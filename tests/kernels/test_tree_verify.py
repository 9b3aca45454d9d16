import pytest
import torch
from headtrain_kernels import reference
from headtrain_kernels.noise import counter_noise
from headtrain_kernels.tree_verify import _torch_tree_verify, launch_tree_verify, tree_verify

from tests.kernels.cases import make_tree

FORMS = pytest.mark.parametrize("form", [launch_tree_verify, _torch_tree_verify], ids=["triton", "torch"])


def make_case(num_nodes, vocabulary, device, tree="random", seed=0, noisy=True, dtype=torch.float32):
    """Trees whose children often carry the token that the target chooses: long and short walks both occur."""
    generator = torch.Generator().manual_seed(seed)
    batch = 3
    trees = [make_tree(tree, num_nodes, generator) for _ in range(batch)]
    parents, depths = torch.tensor([t[0] for t in trees]), torch.stack([t[1] for t in trees])
    max_depth = int(depths.max())
    logits = torch.randn(batch, num_nodes, vocabulary, generator=generator).to(dtype)
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
    sequences, positions = torch.tensor([0, 4, 9]), torch.tensor([5, 100, 7])
    noise = counter_noise(3, sequences[:, None], positions[:, None] + torch.arange(max_depth + 1), vocabulary)
    scores = logits.double()
    if noisy:
        scores = scores + noise.gather(1, depths[..., None].expand(-1, -1, vocabulary))
    choice = scores.argmax(-1)
    # siblings differ: the r-th child of a node carries its choice plus r, from r = 0 or 1 on
    rank = torch.stack([(row[:, None] == row).tril(-1).sum(-1) for row in parents])
    miss = (torch.rand(batch, num_nodes, generator=generator) < 0.2).long().gather(1, parents.clamp(min=0))
    tokens = (choice.gather(1, parents.clamp(min=0)) + rank + miss) % vocabulary
    valid = torch.rand(batch, num_nodes, generator=generator) < 0.9
    valid[:, 0] = True
    expected = reference.tree_verify(logits, tokens, parents, valid, max_depth, noise if noisy else None)
    keys = (3, sequences.to(device), positions.to(device)) if noisy else (None, None, None)
    arguments = [x.to(device) for x in (logits, tokens, parents, depths, valid)]
    return [*arguments, max_depth, *keys, 0], expected


@FORMS
@pytest.mark.parametrize("noisy", [False, True], ids=["greedy", "gumbel"])
@pytest.mark.parametrize(
    "tree, num_nodes, vocabulary", [("random", 1, 50), ("random", 14, 1500), ("path", 12, 1024), ("star", 9, 1025)]
)
def test_walk(form, tree, num_nodes, vocabulary, noisy, device):
    for seed in range(2):
        arguments, expected = make_case(num_nodes, vocabulary, device, tree, seed, noisy)
        for name, out, right in zip(("path", "count", "token"), form(*arguments), expected, strict=True):
            assert torch.equal(out.cpu(), right), name


def test_cases_reach_different_depths(device):
    counts = torch.cat([make_case(20, 300, device, "path", seed)[1][1] for seed in range(5)])
    assert counts.min() == 0 and counts.max() > 4


@FORMS
def test_node_order_does_not_matter(form, device):
    arguments, expected = make_case(15, 700, device)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0)).to(device) + 1
    order = torch.cat((torch.zeros(1, dtype=torch.int64, device=device), order))
    place = order.argsort()  # new index of an old node
    logits, tokens, parents, depths, valid = (x[:, order] for x in arguments[:5])
    parents = torch.where(parents >= 0, place[parents.clamp(min=0)], -1).contiguous()
    shuffled = (logits, tokens.contiguous(), parents, depths.contiguous(), valid.contiguous())
    path, count, token = form(*shuffled, *arguments[5:])
    assert torch.equal(count.cpu(), expected[1]) and torch.equal(token.cpu(), expected[2])
    assert torch.equal(torch.where(path >= 0, order[path.clamp(min=0)], -1).cpu(), expected[0])


@FORMS
def test_padding_is_never_accepted(form, device):
    """A padded node with the right token, once with token 0, which an all-equal row would choose."""
    logits = torch.zeros(1, 3, 40, device=device)
    tokens = torch.zeros(1, 3, dtype=torch.int64, device=device)
    parents, depths = torch.tensor([[-1, 0, 0]], device=device), torch.tensor([[0, 1, 1]], device=device)
    valid = torch.tensor([[True, False, False]], device=device)
    path, count, token = form(logits, tokens, parents, depths, valid, 1, None, None, None, 0)
    assert path.tolist() == [[0, -1]] and count.tolist() == [0] and token.tolist() == [0]
    path, count, _ = form(logits, tokens, parents, depths, ~valid, 1, None, None, None, 0)
    assert path.tolist() == [[0, 1]] and count.tolist() == [1]  # the lower of two equal children


@FORMS
def test_shared_noise_per_position_not_per_node(form, device):
    """The control: noise of another position gives another walk."""
    arguments, expected = make_case(10, 1500, device, "path")
    arguments[8] = arguments[8] + 1
    assert not torch.equal(form(*arguments)[0].cpu(), expected[0])


def test_seed_on_the_device_and_strided_logits(device):
    arguments, expected = make_case(12, 300, device, dtype=torch.float16)
    wide = torch.zeros(3, 14, 400, dtype=torch.float16, device=device)
    wide[:, 1:13, :300] = arguments[0]
    arguments[0], arguments[6] = wide[:, 1:13, :300], torch.tensor([3], device=device)
    for form in (launch_tree_verify, _torch_tree_verify):
        assert all(torch.equal(out.cpu(), right) for out, right in zip(form(*arguments), expected, strict=True))


def test_asserts_name_the_argument(device):
    arguments, _ = make_case(5, 50, device)
    for place, name in ((1, "tokens"), (2, "parents"), (3, "depths"), (4, "valid")):
        wrong = list(arguments)
        wrong[place] = wrong[place][:, :4]
        with pytest.raises(AssertionError, match=rf"{name}: shape \(3, 4\) received, \(3, 5\) expected"):
            launch_tree_verify(*wrong)
    wrong = list(arguments)
    wrong[7] = None
    with pytest.raises(AssertionError, match="sequences: None received"):
        launch_tree_verify(*wrong)
    wrong[0] = wrong[0].double()
    with pytest.raises(AssertionError, match="logits: dtype torch.float64 received"):
        launch_tree_verify(*wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("noisy", [False, True], ids=["greedy", "gumbel"])
def test_gpu_large_vocabulary(noisy, device):
    for seed in range(5):
        arguments, expected = make_case(60, 128_256, device, seed=seed, noisy=noisy, dtype=torch.bfloat16)
        for out, right in zip(tree_verify(*arguments), expected, strict=True):
            assert torch.equal(out.cpu(), right)
