"""The references against numbers that were worked out by hand."""

import math

import pytest
import torch
from headtrain_kernels import reference


def test_attention_of_two_nodes():
    """One prefix token and a chain of two; keys 0 make all weights equal, so outputs are means of what is seen."""
    q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 3, 1)
    v = torch.tensor([6.0, 2.0, 1.0]).view(1, 1, 3, 1)
    lengths, depths = torch.tensor([1]), torch.tensor([[0, 1]])
    ancestors = torch.tensor([[[True, False], [True, True]]])
    out = reference.tree_attention(q, k, v, lengths, depths, ancestors, 1.0)
    assert out.flatten().tolist() == pytest.approx([4.0, 3.0])
    out = reference.tree_attention(q, k, v, lengths, depths, ancestors, 1.0, window=2)
    assert out.flatten().tolist() == pytest.approx([4.0, 1.5])
    out = reference.tree_attention(q, k, v, lengths, depths, ancestors, 1.0, sinks=torch.zeros(1))
    assert out.flatten().tolist() == pytest.approx([8 / 3, 9 / 4])
    siblings = torch.tensor([[[True, False], [False, True]]])
    out = reference.tree_attention(
        q, k, v, lengths, depths, siblings, 1.0, k_scale=torch.ones(1), v_scale=torch.tensor([10.0])
    )
    assert out.flatten().tolist() == pytest.approx([40.0, 35.0])


def test_attention_softcap():
    q, k, v = (
        torch.ones(1, 1, 1, 1),
        torch.tensor([100.0, 0.0]).view(1, 1, 2, 1),
        torch.tensor([1.0, 0.0]).view(1, 1, 2, 1),
    )
    arguments = (torch.tensor([1]), torch.tensor([[0]]), torch.ones(1, 1, 1, dtype=torch.bool), 1.0)
    out = reference.tree_attention(q, k, v, *arguments, softcap=2.0)
    assert out.item() == pytest.approx(1 / (1 + math.exp(-2)))


def test_splitmix64():
    """The first output of splitmix64 from state 0, as published with the generator (0xe220a8397b1dcdaf)."""
    assert reference._mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_commit():
    cache = torch.arange(5.0).view(1, 1, 1, 1, 5, 1).expand(1, 2, 1, 1, 5, 1)
    moved = reference.kv_commit(cache, torch.tensor([1]), torch.tensor([[0, 3, -1]]))
    assert moved[0, 0, 0, 0, :, 0].tolist() == [0.0, 1.0, 4.0, 3.0, 4.0]


def test_verify():
    """Root 0 with children 1 (token 5) and 2 (token 6); node 3 (token 7) below 2."""
    logits = torch.full((1, 4, 9), 0.0)
    for node, token in enumerate((6, 0, 7, 8)):
        logits[0, node, token] = 1.0
    tokens, parents = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[-1, 0, 0, 2]])
    valid = torch.ones(1, 4, dtype=torch.bool)
    path, count, token = reference.tree_verify(logits, tokens, parents, valid, 2)
    assert path.tolist() == [[0, 2, 3]] and count.item() == 2 and token.item() == 8
    noise = torch.zeros(1, 3, 9)
    noise[0, 0, 5] = 2.0
    path, count, token = reference.tree_verify(logits, tokens, parents, valid, 2, noise)
    assert path.tolist() == [[0, 1, -1]] and count.item() == 1 and token.item() == 0


def test_topk():
    hidden, weight = torch.ones(1, 1), torch.log(torch.tensor([[0.1], [0.6], [0.3]]))
    log_q, columns, lse = reference.topk_logprob(hidden, weight, 2)
    assert columns.tolist() == [[1, 2]] and log_q.exp()[0].tolist() == pytest.approx([0.6, 0.3])
    assert lse.item() == pytest.approx(0.0, abs=1e-7)


def test_distill():
    """p = (1/4, 3/4) and q = (1/2, 1/2): cross-entropy log 2, overlap 3/4; weights 2 and 0."""
    teacher, rows = torch.ones(2, 1), torch.log(torch.tensor([[0.25], [0.75]]))
    loss, accept = reference.distill(torch.zeros(1, 2, 1), torch.ones(2, 1), teacher, rows, torch.tensor([[2.0, 0.0]]))
    assert loss.item() == pytest.approx(2 * math.log(2)) and accept.tolist()[0] == pytest.approx([0.75, 0.75])
    full = torch.log(torch.tensor([[0.25], [0.75], [1.0]]))  # p = (1/8, 3/8) of the whole vocabulary
    loss, accept = reference.distill(
        torch.zeros(1, 2, 1), torch.ones(2, 1), teacher, rows, torch.tensor([[2.0, 0.0]]), full
    )
    assert loss.item() == pytest.approx(math.log(2)) and accept.tolist()[0] == pytest.approx([0.5, 0.5])


def test_grouped_residual():
    x, weight, bias = torch.tensor([[1.0]]), torch.tensor([[[2.0]], [[0.0]]]), torch.tensor([[0.0], [0.0]])
    out = reference.grouped_residual(x, weight, bias)
    assert out.flatten().tolist() == pytest.approx([1 + 2 / (1 + math.exp(-2)), 1.0])
