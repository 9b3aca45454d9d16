"""Plans and growth, against a slow tree built path by path."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.errors import UserError
from decode.noise import Noise
from decode.tree import MAX_NODES, Chain, Dynamic, Proposer, Static, Tree, from_dict, grow

VOCAB = 11
PLANS = [
    Chain(1),
    Chain(5),
    Static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2)]),
    Static([(2,)]),
    Static([(1,), (0,), (1, 3), (1, 3, 0), (0, 1)]),
    Dynamic(1, 3, 4),
    Dynamic(3, 3, 12),
    Dynamic(4, 2, 9),
    Dynamic(2, 11, 20),
]


class TableDraft:
    """Logits are a fixed function of the path behind the root; checks the bookkeeping of `extend`."""

    def __init__(self, roots, seed=0, flat=False):
        self.paths = [[(root,)] for root in roots.tolist()]  # per row: path of the root and of each extended node
        self.seed, self.flat, self.calls = seed, flat, 0

    def row(self, path):
        depth_only = (len(path),) if self.flat else path
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash((self.seed, depth_only)) % 2**31)) * 2

    def begin(self):
        return torch.stack([self.row(paths[0]) for paths in self.paths])[:, None]

    def extend(self, tokens, parents):
        self.calls += 1
        logits = []
        for b, paths in enumerate(self.paths):
            new = [(*paths[p], t) for t, p in zip(tokens[b].tolist(), parents[b].tolist(), strict=True)]
            paths += new
            logits.append(torch.stack([self.row(path) for path in new]))
        logits = torch.stack(logits)
        return logits[:, :1] if self.flat else logits


def chosen(row, temperature, noise, count):
    """Children of a node the slow way: columns, log q."""
    log_q = torch.log_softmax(row / temperature, -1)
    keys = log_q if noise is None else log_q + noise
    columns = sorted(range(VOCAB), key=lambda x: (-float(keys[x]), x))[:count]
    return [(x, float(log_q[x])) for x in columns]


def slow_tree(plan, draft, root, temperature, noise):
    """{path of tokens: cumulative log q} of the tree, without batches, buffers or indices."""
    if isinstance(plan, Dynamic):
        pool, beam = {}, {(root,): 0.0}
        for depth in range(1, plan.depth + 1):
            grown = {}
            for path, score in beam.items():
                for x, log_q in chosen(draft.row(path), temperature, noise and noise(depth), min(plan.width, VOCAB)):
                    grown[(*path, x)] = score + log_q
            pool |= grown
            beam = dict(sorted(grown.items(), key=lambda item: -item[1])[: plan.width])
        return dict(sorted(pool.items(), key=lambda item: -item[1])[: plan.size - 1])
    tree, tokens = {}, {(): (root,)}
    for ranks in plan.paths:
        path = tokens[ranks[:-1]]
        x, log_q = chosen(draft.row(path), temperature, noise and noise(len(ranks)), ranks[-1] + 1)[ranks[-1]]
        tokens[ranks] = (*path, x)
        tree[(*path, x)] = tree.get(path, 0.0) + log_q
    return tree


def token_path(tree, b, node):
    path = []
    while node >= 0:
        path.append(int(tree.tokens[b, node]))
        node = int(tree.parents[b, node])
    return tuple(reversed(path))


def check_structure(tree):
    """Root first, parents before children, depths and ancestors as the parents say, no two equal siblings."""
    for b, parents in enumerate(tree.parents.tolist()):
        assert parents[0] == -1
        for v, parent in enumerate(parents):
            chain = {v}
            while parents[min(chain)] >= 0:
                chain.add(parents[min(chain)])
            assert v == 0 or 0 <= parent < v
            assert tree.ancestors[b, v].nonzero()[:, 0].tolist() == sorted(chain)
            assert int(tree.depths[b, v]) == len(chain) - 1
        assert tree.depths[b].tolist() == sorted(tree.depths[b].tolist())
        siblings = list(zip(parents, tree.tokens[b].tolist(), strict=True))
        assert len(set(siblings)) == len(siblings)


@pytest.mark.parametrize("mode", ["top", "shared"])
@pytest.mark.parametrize("flat", [False, True], ids=["per-node", "per-level"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.to_dict()['kind']}{plan.num_nodes}")
def test_growth_equals_the_slow_tree(plan, flat, mode):
    roots, temperature = torch.tensor([3, 7, 3]), 0.7
    noise = Noise(5, [4, 0, 9]).proposal(torch.tensor([20, 3, 11]), VOCAB)
    draft = TableDraft(roots, flat=flat)
    proposer = Proposer(mode, temperature, None, noise if mode == "shared" else None)
    tree = grow(plan, roots, draft.begin(), draft.extend, proposer)
    check_structure(tree)
    assert draft.calls == plan.depth - 1
    for b, root in enumerate(roots.tolist()):
        row_noise = (lambda depth, b=b: noise(depth, None, 0)[b]) if mode == "shared" else None
        expected = slow_tree(plan, draft, root, temperature, row_noise)
        got = {token_path(tree, b, v): v for v in range(1, tree.num_nodes) if tree.valid[b, v]}
        assert set(got) == set(expected)
        for path, v in got.items():
            total = sum(float(tree.log_q[b, u]) for u in tree.ancestors[b, v].nonzero()[:, 0].tolist())
            assert total == pytest.approx(expected[path], abs=1e-5)


@pytest.mark.parametrize("mode", ["independent", "iid"])
@pytest.mark.parametrize("flat", [False, True], ids=["per-node", "per-level"])
def test_drawn_children_use_noise_of_their_own_node(mode, flat):
    plan = Static([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0, 0)])
    roots = torch.tensor([3, 7])
    noise = Noise(5, [4, 0]).proposal(torch.tensor([20, 3]), VOCAB)
    draft = TableDraft(roots, flat=flat)
    tree = grow(plan, roots, draft.begin(), draft.extend, Proposer(mode, 1.0, None, noise, keep_q=True))
    for b in range(2):
        for v in range(tree.num_nodes):
            children = (tree.parents[b] == v).nonzero()[:, 0].tolist()
            if not children:
                assert torch.isinf(tree.q[b, v]).all()
                continue
            log_q = torch.log_softmax(draft.row(token_path(tree, b, v)), -1)
            assert torch.allclose(tree.q[b, v], log_q, atol=1e-6)
            at = int(tree.depths[b, v]) + 1
            if mode == "iid":
                drawn = [int((log_q + noise(at, torch.tensor([v]), k)[b, 0]).argmax()) for k in range(len(children))]
            else:
                drawn = (log_q + noise(at, torch.tensor([v]), 0)[b, 0]).topk(len(children)).indices.tolist()
            assert tree.tokens[b, children].tolist() == drawn


def test_vocabulary_maps_columns_to_target_ids():
    roots, vocabulary = torch.tensor([3]), torch.arange(VOCAB) * 5 + 2

    class Mapped(TableDraft):
        def extend(self, tokens, parents):
            return super().extend((tokens - 2) // 5, parents)

    plain, mapped = TableDraft(roots), Mapped(roots)
    plan = Dynamic(3, 3, 10)
    a = grow(plan, roots, plain.begin(), plain.extend, Proposer())
    b = grow(plan, roots, mapped.begin(), mapped.extend, Proposer(vocabulary=vocabulary))
    assert torch.equal(b.tokens[:, 1:], vocabulary[a.tokens[:, 1:]])
    assert torch.equal(a.parents, b.parents)


@pytest.mark.parametrize("plan", [Static([(0,), (1,), (2,), (0, 0)]), Dynamic(2, 3, 9)], ids=["static", "dynamic"])
def test_columns_of_probability_zero_are_invalid_nodes(plan):
    logits = torch.full((1, 1, VOCAB), -torch.inf)
    logits[0, 0, 4:6] = 0.0
    tree = grow(
        plan, torch.tensor([1]), logits, lambda tokens, parents: logits.expand(1, tokens.shape[1], -1), Proposer()
    )
    check = {4, 5}
    assert set(tree.tokens[tree.valid].tolist()) == {1} | check
    assert not tree.valid.all()
    for v in range(1, tree.num_nodes):
        assert not tree.valid[0, v] or tree.valid[0, tree.parents[0, v]]


def test_ties_go_to_the_smaller_index_so_trees_stay_connected():
    """log q = 0 makes a child as likely as its parent; an unstable sort would drop the parent."""
    certain = torch.full((1, 1, VOCAB), -torch.inf)
    certain[0, 0, 3] = 0.0
    plan = Dynamic(6, 3, 7)
    tree = grow(plan, torch.tensor([1]), certain, lambda tokens, parents: certain, Proposer())
    assert tree.valid[0].tolist() == [True] * 7
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 3, 4, 5]


def test_noise_weight_orders_nodes_by_what_the_target_will_draw():
    roots = torch.tensor([3])
    noise = Noise(1, [0]).proposal(torch.tensor([9]), VOCAB)
    draft = TableDraft(roots)
    plan = Dynamic(1, 6, 4, noise_weight=1.0, sharpness=2.0)
    tree = grow(plan, roots, draft.begin(), draft.extend, Proposer("shared", 1.0, None, noise))
    keys = torch.log_softmax(draft.row((3,)), -1) + noise(1, None, 0)[0]
    assert tree.tokens[0, 1:].tolist() == keys.topk(3).indices.tolist()


def test_plan_and_dict():
    for plan in PLANS:
        assert from_dict(plan.to_dict()) == plan
    with pytest.raises(UserError, match="kind 'bush' is unknown"):
        from_dict({"kind": "bush"})
    with pytest.raises(UserError, match="chain with dept"):
        from_dict({"kind": "chain", "dept": 3})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain(0), "at least 1"),
        (lambda: Chain(MAX_NODES), "129 nodes are more than the 128"),
        (lambda: Static([]), "at least 1"),
        (lambda: Static([(0,), (0,)]), r"path \[0\] occurs twice"),
        (lambda: Static([(0, 0)]), r"path \[0, 0\] needs its parent \[0\]"),
        (lambda: Static([(0,), (-1,)]), "ranks >= 0"),
        (lambda: Static([(0,), ()]), "non-empty"),
        (lambda: Static([(i,) for i in range(MAX_NODES)]), "129 nodes"),
        (lambda: Dynamic(0, 2, 4), "at least 1"),
        (lambda: Dynamic(3, 2, 1), "at least 1"),
        (lambda: Dynamic(2, 2, 8), "only 7 nodes are ever grown"),
        (lambda: Dynamic(8, 10, 129), "129 nodes"),
        (lambda: Dynamic(3, 3, 8, sharpness=0), "sharpness 0"),
    ],
)
def test_wrong_plans_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_root_tree():
    tree = Tree.root(torch.tensor([5, 6]))
    check_structure(tree)
    assert tree.num_nodes == 1 and tree.tokens[:, 0].tolist() == [5, 6] and tree.valid.all()


@st.composite
def path_sets(draw):
    paths = {(0,)}
    for _ in range(draw(st.integers(0, 14))):
        paths.add((*draw(st.sampled_from(sorted({()} | paths))), draw(st.integers(0, 3))))
    return paths


@settings(max_examples=40, deadline=None)
@given(path_sets(), st.randoms())
def test_any_static_shape_grows_whatever_the_order_of_its_list(paths, random):
    listed = list(paths)
    random.shuffle(listed)
    plan, roots = Static(listed), torch.tensor([2])
    draft = TableDraft(roots)
    tree = grow(plan, roots, draft.begin(), draft.extend, Proposer())
    check_structure(tree)
    got = {token_path(tree, 0, v) for v in range(1, tree.num_nodes)}
    assert got == set(slow_tree(plan, draft, 2, 1.0, None))


def test_slow_tree_sees_a_wrong_parent():
    """Negative control: swapped parents in `extend` change the tree."""
    plan, roots = (
        Static(list(itertools.product(range(2), repeat=1)) + [(0, 0), (1, 0), (0, 0, 0), (1, 0, 0)]),
        torch.tensor([3]),
    )
    draft = TableDraft(roots)
    wrong = grow(plan, roots, draft.begin(), lambda tokens, parents: draft.extend(tokens, parents.flip(1)), Proposer())
    right = TableDraft(roots)
    tree = grow(plan, roots, right.begin(), right.extend, Proposer())
    assert not torch.equal(wrong.tokens, tree.tokens)
