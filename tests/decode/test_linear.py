"""Linear layers for few tokens against `F.linear`, and which layers become one product."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from decode import linear
from decode.linear import FEW, MANY, FastLinears, project


@pytest.fixture(autouse=True, params=["own", "other"])
def way(request, monkeypatch):
    """What the timings of a CPU may choose: the library's own product, or the other way, for few tokens and for many."""
    for choice in ("prefers_columns", "prefers_float32"):
        monkeypatch.setattr(linear, choice, lambda: request.param == "other")


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (2, 1), (1, FEW), (1, FEW + 1), (0, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_project_is_the_layer(shape, bias):
    layer = nn.Linear(24, 40, bias=bias).double()
    x = torch.randn(*shape, 24, dtype=torch.float64)
    torch.testing.assert_close(project(x, layer.weight, layer.bias), layer(x))


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, FEW, MANY - 1, MANY, 3 * MANY])
@pytest.mark.parametrize("bias", [False, True])
def test_project_in_bfloat16_rounds_once(tokens, bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 40, bias=bias).bfloat16(), torch.randn(tokens, 24).bfloat16()
    exact = layer.double()(x.double())
    layer.bfloat16()
    torch.testing.assert_close(project(x, layer.weight, layer.bias).double(), exact, atol=2e-3, rtol=2**-8)


@pytest.mark.parametrize("choice", ["prefers_columns", "prefers_float32"])
def test_a_cpu_is_timed_once(choice, monkeypatch):
    monkeypatch.undo()
    measure = getattr(linear, choice)
    measure.cache_clear()
    for gain, expected in ((1.0, False), (2.0, True)):
        monkeypatch.setattr(linear, "_gain", lambda own, other, gain=gain: gain)
        assert measure() is expected
        monkeypatch.setattr(linear, "_gain", lambda own, other: pytest.fail("timed twice"))
        assert measure() is expected
        measure.cache_clear()


class Block(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.q, self.k, self.o = nn.Linear(16, 16, bias), nn.Linear(16, 8, bias), nn.Linear(16, 16, bias)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return self.o(q) + torch.cat([k, k], -1)


class Model(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.first, self.second = Block(bias), Block(bias)

    def forward(self, x):
        return self.second(self.first(x))


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_siblings_become_one_product(bias):
    torch.manual_seed(0)
    model = Model(bias).bfloat16()
    inputs = [torch.randn(1, n, 16, dtype=torch.bfloat16) for n in (9, 1, 4, 100)]
    expected = [model(x) for x in inputs]
    few = FastLinears(model)
    for _ in range(2):
        for x, y in zip(inputs, expected, strict=True):
            with few():
                torch.testing.assert_close(model(x), y, atol=2e-2, rtol=2e-2)
    one = model.first.q.weight.untyped_storage().data_ptr()
    assert one == model.first.k.weight.untyped_storage().data_ptr()
    assert one not in (w.weight.untyped_storage().data_ptr() for w in (model.first.o, model.second.q))
    assert all("forward" not in module.__dict__ for module in model.modules())


@torch.no_grad()
def test_a_second_context_shares_the_weights_of_the_first():
    model, x = Model().bfloat16(), torch.randn(1, 3, 16, dtype=torch.bfloat16)
    before = []
    for _ in range(2):
        few = FastLinears(model)
        with few():
            model(x)
        before.append([layer.weight.data_ptr() for layer in few.layers])
    assert before[0] == before[1]


@torch.no_grad()
def test_another_input_is_computed_anew():
    """A layer that is later called with a tensor of its own must not get the product of its sibling's."""
    model, x = Model().bfloat16(), torch.randn(1, 3, 16, dtype=torch.bfloat16)
    few = FastLinears(model)
    with few():
        model(x)
    other = torch.randn_like(x)
    expected = model.first.k(other)
    with few():
        model.first.q(x)
        torch.testing.assert_close(model.first.k(other), expected)


def test_other_dtypes_are_left_alone():
    assert FastLinears(Model()).layers == []


@torch.no_grad()
def test_a_forward_of_others_stays():
    model, x = Model().bfloat16(), torch.randn(1, 3, 16, dtype=torch.bfloat16)
    hooked = model.first.q.forward = lambda y: 2 * torch.nn.functional.linear(y, model.first.q.weight)
    expected, few = model(x), FastLinears(model)
    for _ in range(2):
        with few():
            torch.testing.assert_close(model(x), expected, atol=2e-2, rtol=2e-2)
    assert model.first.q.forward is hooked


@torch.no_grad()
def test_a_turned_weight_is_left_alone():
    """Its storage holds the columns one after another, so it cannot be joined by its place in it."""
    model, x = Model().bfloat16(), torch.randn(1, 3, 16, dtype=torch.bfloat16)
    model.first.q.weight.data = model.first.q.weight.data.t()
    expected, few = model(x), FastLinears(model)
    for _ in range(2):
        with few():
            torch.testing.assert_close(model(x), expected, atol=2e-2, rtol=2e-2)
    assert model.first.q not in few.layers


@torch.no_grad()
def test_a_model_with_joined_weights_is_saved_whole(tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    ids = torch.arange(5)[None]
    few = FastLinears(model)
    with few():
        model(ids)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    saved, kept = again.state_dict(), model.state_dict()
    assert saved.keys() == kept.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in kept.items())
