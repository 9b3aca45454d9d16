"""Matrix products in bfloat16 on a CPU, each by the way that is fastest on it.

Few tokens: `F.linear` may first bring the weight into a layout for many rows, which costs as much as the product; W @ x^T
reads the weight as it lies. Many tokens: some CPUs multiply float32 at twice the speed of bfloat16, others at a quarter,
and their flags do not tell, so both are timed once a process. Layers that are given the same tensor one after another
(query, key and value; gate and up) become one product. The results are those of the layers themselves but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 32  # tokens up to which W @ x^T may be the faster
MANY = 64  # tokens from which widening the weight may pay
GAIN = 1.15  # of the other way over the library's own, below which the latter stays


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K] W^T + bias -> [.., N] with weight [N, K]."""
    tokens = x.numel() // x.shape[-1]
    if 0 < tokens <= FEW and prefers_columns():
        return _columns(x, weight, bias)
    if tokens >= MANY and is_slow(weight):
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)
    return F.linear(x, weight, bias)


def is_slow(x: Tensor) -> bool:
    """Whether its device multiplies float32 faster than its dtype."""
    return x.device.type == "cpu" and x.dtype is torch.bfloat16 and prefers_float32()


@cache
def prefers_columns() -> bool:
    """Whether W @ x^T is faster than `F.linear` on this CPU, for few tokens and a weight that its caches cannot hold."""
    x, weight = torch.ones(8, 2048, dtype=torch.bfloat16), torch.ones(16384, 2048, dtype=torch.bfloat16)
    return _gain(lambda: F.linear(x, weight), lambda: _columns(x, weight, None)) > GAIN


@cache
def prefers_float32() -> bool:
    """Whether this CPU is faster at bfloat16 products of many tokens if it widens both sides."""
    x, weight = torch.ones(256, 1024, dtype=torch.bfloat16), torch.ones(1024, 1024, dtype=torch.bfloat16)
    return _gain(lambda: F.linear(x, weight), lambda: F.linear(x.float(), weight.float())) > GAIN


def _gain(own: Callable[[], Tensor], other: Callable[[], Tensor]) -> float:
    """Least time of `own` over that of `other`, taken in turns."""
    seconds: list[list[float]] = [[], []]
    with torch.no_grad():
        for _ in range(6):
            for times, product in zip(seconds, (own, other), strict=True):
                start = perf_counter()
                product()
                times.append(perf_counter() - start)
    return min(seconds[0]) / min(seconds[1])


def _columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    tokens = x.numel() // x.shape[-1]
    if tokens == 1:
        row = x.reshape(-1)
        out = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
    else:
        columns = x.reshape(tokens, -1).t()
        out = (torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)).t()
    return out.view(*x.shape[:-1], -1)


class _Siblings:
    """Layers of one parent that read the same input. Their weights become views of one matrix."""

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.weight = _join([layer.weight.data for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias.data for layer in layers])
        for layer, rows in zip(layers, self.weight.split(self.sizes), strict=True):
            layer.weight.data = rows
        self.input: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def forwards(self) -> list[Callable[[Tensor], Tensor]]:
        return [self._forward(i) for i in range(len(self.layers))]

    def _forward(self, i: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if self.input is not x:
                self.input, self.outputs = x, project(x, self.weight, self.bias).split(self.sizes, -1)
            out = self.outputs[i]
            if i == len(self.layers) - 1:
                self.input, self.outputs = None, ()
            return out

        return forward


class FastLinears:
    """A context in which the linear layers of `model` run as above; the first one entered learns who shares inputs.

    Only plain bfloat16 layers on a CPU take part, and none whose forward somebody else has put in the place of the
    class's own, as accelerate does where a model spans devices. The model's weights keep their values, but those of
    siblings move into common storage.
    """

    def __init__(self, model: nn.Module):
        self.layers = [
            module
            for module in model.modules()
            if type(module) is nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype is torch.bfloat16
            and module.weight.is_contiguous()
            and module.weight.shape == (module.out_features, module.in_features)  # else spread over processes
            and "forward" not in module.__dict__
        ]
        names = {id(module): name.rpartition(".")[0] for name, module in model.named_modules()}
        self.parents = {layer: names[id(layer)] for layer in self.layers}
        self.forwards: list[Callable[[Tensor], Tensor]] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        groups: list[list[nn.Linear]] = []
        for layer, forward in zip(self.layers, self.forwards or self._watch(groups), strict=True):
            layer.__dict__["forward"] = forward  # past nn.Module's slow __setattr__
        try:
            yield
            if self.forwards is None:
                self.forwards = self._plan(groups)
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _watch(self, groups: list[list[nn.Linear]]) -> list[Callable[[Tensor], Tensor]]:
        """Forwards of the layers themselves that note in `groups` who was given the tensor of the call before."""
        last: list[Tensor] = []

        def watch(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
            def forward(x: Tensor) -> Tensor:
                kin = last and last[0] is x and self._match(groups[-1][-1], layer)
                groups[-1].append(layer) if kin else groups.append([layer])
                last[:] = [x]
                return F.linear(x, layer.weight, layer.bias)

            return forward

        return [watch(layer) for layer in self.layers]

    def _match(self, a: nn.Linear, b: nn.Linear) -> bool:
        return a is not b and self.parents[a] == self.parents[b] and (a.bias is None) == (b.bias is None)

    def _plan(self, groups: list[list[nn.Linear]]) -> list[Callable[[Tensor], Tensor]]:
        """One forward a layer; a layer that was seen in two groups, or in none, goes alone."""
        seen = [id(layer) for group in groups for layer in group]
        planned: dict[int, Callable[[Tensor], Tensor]] = {}
        for group in groups:
            if len(group) > 1 and all(seen.count(id(layer)) == 1 for layer in group):
                planned |= dict(zip(map(id, group), _Siblings(group).forwards(), strict=True))
        return [planned.get(id(layer)) or _alone(layer) for layer in self.layers]


def _join(weights: list[Tensor]) -> Tensor:
    """Matrices [N_i, K] as one [sum N_i, K]; no copy where an earlier engine has joined them."""
    first, end = weights[0], weights[0].storage_offset()
    for weight in weights:
        if weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or weight.storage_offset() != end:
            return torch.cat(weights)
        end += weight.numel()
    rows = sum(weight.shape[0] for weight in weights)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def _alone(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: project(x, layer.weight, layer.bias)
