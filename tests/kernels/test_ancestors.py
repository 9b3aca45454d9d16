import pytest
import torch
from headtrain_kernels.ancestors import pack_ancestors, tree_mask, unpack_ancestors

from tests.kernels.cases import make_tree


@pytest.mark.parametrize("num_nodes", [1, 2, 63, 64, 65, 128])
def test_bits_round_trip(num_nodes):
    ancestors = torch.rand(3, num_nodes, num_nodes, generator=torch.Generator().manual_seed(num_nodes)) < 0.5
    words = pack_ancestors(ancestors)
    assert words.shape == (3, num_nodes, 2) and words.dtype == torch.int64
    assert torch.equal(unpack_ancestors(words), ancestors)
    for node in (0, num_nodes - 1):
        low, high = (int(word) % (1 << 64) for word in words[0, node])
        assert [(low + (high << 64)) >> j & 1 == 1 for j in range(num_nodes)] == ancestors[0, node].tolist()


def test_too_many_nodes_are_refused():
    with pytest.raises(AssertionError, match="129 nodes received, at most 128"):
        pack_ancestors(torch.ones(1, 129, 129, dtype=torch.bool))


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_mask_by_definition(window):
    generator = torch.Generator().manual_seed(0)
    trees = [make_tree("random", 9, generator) for _ in range(2)]
    depths, ancestors = torch.stack([t[1] for t in trees]), torch.stack([t[2] for t in trees])
    lengths, total = torch.tensor([0, 6]), 18
    mask = tree_mask(lengths, depths, pack_ancestors(ancestors), total, window)
    for b in range(2):
        for node in range(9):
            position = int(lengths[b] + depths[b, node])
            for slot in range(total):
                other = slot - int(lengths[b])
                if other < 0:
                    sees, at = True, slot
                elif other < 9:
                    sees, at = bool(ancestors[b, node, other]), int(lengths[b] + depths[b, other])
                else:
                    sees, at = False, slot
                sees &= window is None or position - at < window
                assert (mask[b, node, slot] == 0) == sees and (sees or mask[b, node, slot] == -torch.inf)
