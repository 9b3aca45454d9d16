"""Random trees and attention problems. Every slot that no node may see holds NaN."""

from dataclasses import dataclass, field

import torch
from headtrain_kernels import reference
from headtrain_kernels.ancestors import pack_ancestors, tree_mask
from headtrain_kernels.tree_attention import launch_tree_attention
from torch import Tensor


def make_tree(kind: str, num_nodes: int, generator: torch.Generator) -> tuple[list[int], Tensor, Tensor]:
    """parents, depths [n], ancestors [n, n] in breadth-first or any other order with parents first."""
    parents = [-1]
    for node in range(1, num_nodes):
        choices = {"path": node - 1, "star": 0, "random": int(torch.randint(0, node, (1,), generator=generator))}
        parents.append(choices[kind])
    depths = torch.zeros(num_nodes, dtype=torch.int64)
    ancestors = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        depths[node] = depths[parents[node]] + 1
        ancestors[node] |= ancestors[parents[node]]
    return parents, depths, ancestors


@dataclass
class Problem:
    """Arguments of one call; `options` are window, softcap, sinks and the scales."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    depths: Tensor
    ancestors: Tensor
    scale: float
    options: dict = field(default_factory=dict)

    @property
    def words(self) -> Tensor:
        return pack_ancestors(self.ancestors)

    def reference(self) -> Tensor:
        return reference.tree_attention(
            self.q, self.k, self.v, self.lengths, self.depths, self.ancestors, self.scale, **self.options
        )

    def launch(self, **extra) -> Tensor:
        """The kernel, into an output full of NaN."""
        batch, heads, num_nodes, dim = self.q.shape
        out = torch.full((batch, num_nodes, heads, dim), float("nan"), dtype=self.q.dtype, device=self.q.device)
        arguments = (self.q, self.k, self.v, self.lengths, self.depths, self.words, self.scale)
        return launch_tree_attention(*arguments, **self.options, **extra, out=out)

    def visible(self) -> Tensor:
        """[B, n, S] bool."""
        return tree_mask(self.lengths, self.depths, self.words, self.k.shape[2], self.options.get("window")) == 0

    def poison(self, allowed: Tensor) -> "Problem":
        """A copy with NaN in every K and V row outside allowed [B, S]."""
        bad = ~allowed[:, None, :, None]
        k, v = (x.float().masked_fill(bad, float("nan")).to(x.dtype) for x in (self.k, self.v))
        return Problem(self.q, k, v, self.lengths, self.depths, self.ancestors, self.scale, self.options)


def make_problem(
    lengths: tuple[int, ...],
    num_nodes: int,
    tree: str = "random",
    kv_heads: int = 1,
    group: int = 1,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **options,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    batch, capacity = len(lengths), max(lengths) + num_nodes + 7
    trees = [make_tree(tree, num_nodes, generator) for _ in lengths]
    # q as a model gives it: the transpose of [B, n, Hq, d]
    q = torch.randn(batch, num_nodes, kv_heads * group, dim, generator=generator).to(device, dtype).transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, capacity, dim, generator=generator).to(device, dtype) for _ in range(2))
    if sinks:
        options["sinks"] = torch.randn(kv_heads * group, generator=generator).to(device)
    problem = Problem(
        q, k, v, torch.tensor(lengths, device=device), torch.stack([t[1] for t in trees]).to(device),
        torch.stack([t[2] for t in trees]).to(device), dim**-0.5, options,
    )  # fmt: skip
    return problem.poison(problem.visible().any(1))


def assert_matches(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    rtol, atol = reference.TOLERANCES[dtype]
    torch.testing.assert_close(out.double().cpu(), expected.double().cpu(), rtol=rtol, atol=atol)


def assert_differs(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """A negative control: the comparison must fail."""
    try:
        assert_matches(out, expected, dtype)
    except AssertionError:
        return
    raise AssertionError("a deliberately wrong result passed the comparison")
