"""The CUDA branches of `decode` without a GPU: their arithmetic in Triton's interpreter, their host reads on meta tensors."""

import importlib
import os
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from decode.engine import Engine, _Run
from decode.graphs import FixedStep, GraphEngine
from decode.noise import Noise
from decode.settings import Settings
from tests.decode.test_graphs import PLANS, make_draft, prompts_of, summary
from tests.tiny import tiny_target

KERNELS = {
    "tree_attention": "decode.attention",
    "kv_commit": "decode.cache",
    "tree_verify": "decode.verify",
    "grouped_residual": "headtrain.heads.medusa",
}


@pytest.fixture
def launches(monkeypatch):
    """Every branch for a GPU is taken, and the public functions launch their kernels. Counts the launches by name."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1 and no GPU")
    counts = dict.fromkeys(KERNELS, 0)

    def counted(name, launch):
        def run(*args):
            counts[name] += 1
            return launch(*args)

        return run

    for name, user in KERNELS.items():
        package = importlib.import_module(f"headtrain_kernels.{name}")
        launch = getattr(package, f"launch_{name}")
        monkeypatch.setattr(f"{user}.runs_kernels", lambda tensor: True)
        monkeypatch.setattr(
            package, name, counted(name, partial(launch, stream=0) if name == "tree_verify" else launch)
        )
    return counts


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "gumbel"])
@pytest.mark.parametrize("engine", [Engine, partial(GraphEngine, capture=False)], ids=["eager", "fixed"])
@pytest.mark.parametrize(
    "draft, plan, lengths", [("plain", None, (5,)), ("eagle3", "static", (4, 7)), ("medusa", "chain", (4, 7))]
)
def test_kernels_give_the_tokens_of_torch(launches, monkeypatch, draft, plan, lengths, engine, temperature):
    model = tiny_target("llama", head_dim=64)
    arguments = (model, make_draft(draft, model), PLANS.get(plan))
    settings = Settings(max_new_tokens=6, temperature=temperature, seed=1, ignore_eos=True)
    outputs = engine(*arguments).generate(prompts_of(lengths), settings)
    monkeypatch.undo()
    assert summary(outputs) == summary(Engine(*arguments).generate(prompts_of(lengths), settings))
    expected = {"tree_attention", "tree_verify"} | ({"kv_commit"} if plan == "static" else set())
    expected |= {"grouped_residual"} if draft == "medusa" else set()
    assert {name for name, count in launches.items() if count} == expected


def test_a_window_a_cap_and_levels(launches, monkeypatch):
    """gemma2's layers on the kernel, drafted by a model that runs its own tree level by level."""
    model = tiny_target("gemma2", head_dim=64, num_hidden_layers=2)
    arguments = model, make_draft("model", tiny_target("llama", head_dim=64)), PLANS["static"]
    settings = Settings(max_new_tokens=5, ignore_eos=True)
    outputs = GraphEngine(*arguments, capture=False).generate(prompts_of((14,)), settings)
    monkeypatch.undo()
    assert launches["tree_attention"] > 0
    assert summary(outputs) == summary(Engine(*arguments).generate(prompts_of((14,)), settings))


class Recorder:
    """In the place of a Triton kernel: notes the launch."""

    def __init__(self, name, launched):
        self.name, self.launched = name, launched

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and size > 0 for size in grid), f"{self.name}: grid {grid}"
        return lambda *args, **kwargs: self.launched.append(self.name)


@pytest.fixture
def launched(launches, monkeypatch):
    """For meta tensors, whose data no host can read: launchers check their arguments, kernels are noted and not run."""
    launched: list[str] = []
    for name in KERNELS:
        package = importlib.import_module(f"headtrain_kernels.{name}")
        for item in [item for item in vars(package) if item.startswith("_") and item.endswith("_kernel")]:
            monkeypatch.setattr(package, item, Recorder(item, launched))
    monkeypatch.setattr("headtrain_kernels.tree_attention.num_processors", lambda device: 132)
    return launched


def meta_step(draft_name, plan, batch, temperature):
    """A step on meta tensors, as if behind prompts of five tokens."""
    with torch.device("meta"):
        model = tiny_target("llama", head_dim=64)
        draft = make_draft(draft_name, model)
        engine = GraphEngine(model, draft, plan, capture=False)
        tokens = torch.zeros(batch, 6, dtype=torch.int64)
        cache = engine.forward.new_cache(batch, 64)
        _, features = engine.forward(cache, tokens[:, :5], torch.arange(5).expand(batch, 5), None)
        cache.commit(tokens[:, :5], [5] * batch, moved=False)
        settings = Settings(temperature=temperature, top_p=0.9, ignore_eos=True)
        run = _Run(
            settings, engine._rule(settings), settings.processors(), frozenset({2}), [[1] * 5] * batch,
            [SimpleNamespace(tokens=[1])] * batch, None, list(range(batch)), Noise(0, list(range(batch)), "meta"), cache,
            tokens[:, 0],
        )  # fmt: skip
        if draft is not None:
            # the draft's own prompt counts on the host, as it may: it is not part of a step
            with mock.patch.object(torch.Tensor, "tolist", lambda self: [5] * batch):
                run.state, run.guesses = draft.begin(features, tokens, cache.lengths, 64)
        return FixedStep(engine, run, 512, capture=False)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "gumbel"])
@pytest.mark.parametrize(
    "draft, plan", [("plain", None), ("medusa", "static"), ("eagle3", "dynamic"), ("eagle3", "chain")]
)
def test_a_step_never_waits_for_the_device(launched, monkeypatch, draft, plan, temperature, batch):
    step = meta_step(draft, PLANS.get(plan), batch, temperature)
    step._step()  # fills tables that last
    launched.clear()

    def copies(*args, **kwargs):
        raise AssertionError("torch.tensor in a step: a copy from the host that no capture allows")

    monkeypatch.setattr(torch, "tensor", copies)
    step._step()
    assert launched.count("_choose_kernel") == launched.count("_walk_kernel") == 1
    assert launched.count("_kv_commit_kernel") == (1 if plan in ("static", "dynamic") else 0)
    assert launched.count("_tree_attention_kernel") >= step.engine.model.config.num_hidden_layers


def test_a_step_that_reads_the_device_raises(launched):
    """The control."""
    step = meta_step("plain", None, 1, 0.0)
    step.run.rule = SimpleNamespace(verify=lambda tree, logits, *rest: logits.argmax(-1).tolist())
    with pytest.raises(RuntimeError, match="meta"):
        step._step()
