"""The step with fixed shapes: the tokens of `Engine`, reuse without a capture, no host in the step, the kernels' branch."""

import itertools

import pytest
import torch

from decode.draft import ModelDraft, NgramDraft
from decode.engine import Engine
from decode.graphs import SMALLEST_TIER, FixedCache, FixedStep, GraphEngine
from decode.settings import Settings
from decode.tree import Chain, Dynamic, Static
from headtrain.heads.base import load_family
from headtrain.target import Target
from tests.templates import byte_tokenizer
from tests.tiny import VOCAB_SIZE, tiny_target

PLANS = {
    "chain": Chain(3),
    "static": Static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic": Dynamic(3, 3, 10),
}
DRAFTS = ("plain", "model", "medusa", "eagle1", "eagle3", "hydra")
VOCABULARY = [i for i in range(VOCAB_SIZE) if i % 4]


def make_draft(name, model, seed=0):
    """A random draft of a family; random heads guess badly, the smaller model is the target with noise on its weights."""
    if name == "plain":
        return None
    torch.manual_seed(seed)
    if name == "model":
        twin = tiny_target(model.config.model_type, **{"head_dim": model.config.head_dim})
        for weight in twin.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
        return ModelDraft(twin, VOCAB_SIZE)
    target, family = Target(model), load_family(name)
    options = {"medusa": {"heads": 3}, "hydra": {"heads": 3}, "eagle1": {}, "eagle3": {"vocabulary": len(VOCABULARY)}}
    vocabulary = torch.tensor(VOCABULARY) if name == "eagle3" else None
    return family.build(family.Config(**options[name]), target, vocabulary).eval().requires_grad_(False)


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def summary(outputs):
    return [(output.tokens, output.finish, output.accepted) for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_same_replies_as_the_engine(draft, plan, temperature):
    """One row and three; stops end rows at different steps."""
    if draft == "plain" and plan != "chain":
        pytest.skip("no tree")
    model = tiny_target("llama")
    settings = Settings(max_new_tokens=24, temperature=temperature, seed=3)
    arguments = (model, make_draft(draft, model), None if draft == "plain" else PLANS[plan])
    fixed = GraphEngine(*arguments, capture=False)
    for lengths in ((9,), (1, 30, 12)):
        expected = Engine(*arguments).generate(prompts_of(lengths), settings)
        outputs = fixed.generate(prompts_of(lengths), settings)
        assert fixed.eager_because is None
        assert summary(outputs) == summary(expected)
        if draft == "model":
            assert sum(itertools.chain(*(output.accepted for output in outputs))) > 0


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "qwen3"])
def test_windows_caps_and_sinks(family):
    model = tiny_target(family)
    settings = Settings(max_new_tokens=30, ignore_eos=True)
    arguments = model, make_draft("model", model), PLANS["static"]
    prompts = prompts_of((5, 20))
    fixed = GraphEngine(*arguments, capture=False)
    assert summary(fixed.generate(prompts, settings)) == summary(Engine(*arguments).generate(prompts, settings))


def test_one_step_serves_other_prompts_seeds_and_lengths():
    """Nothing of the run that a step was made for may be left in it."""
    model = tiny_target("llama")
    arguments = model, make_draft("eagle3", model), PLANS["static"]
    fixed = GraphEngine(*arguments, capture=False)
    for seed, limit in ((0, 40), (7, 5), (2**40, 33)):
        prompts = prompts_of((4 + limit, 11), seed=limit)
        settings = Settings(max_new_tokens=limit, temperature=0.9, top_k=40, top_p=0.95, seed=seed)
        expected = Engine(*arguments).generate(prompts, settings, [5, 3])
        assert summary(fixed.generate(prompts, settings, [5, 3])) == summary(expected)
    assert len(fixed._steps) == 1
    fixed.generate(prompts_of((SMALLEST_TIER, 3)), Settings(max_new_tokens=3, temperature=0.9, top_k=40, top_p=0.95))
    assert len(fixed._steps) == 2, "a longer context needs another tier"


def test_addresses_never_change():
    model = tiny_target("llama")
    draft = make_draft("hydra", model)
    engine = GraphEngine(model, draft, PLANS["static"], capture=False)
    engine.generate(prompts_of((4, 9)), Settings(max_new_tokens=12))
    (step,) = engine._steps.values()
    before = {path: (id(value), getattr(value, "data_ptr", int)()) for path, value in step.home.items()}
    engine.generate(prompts_of((8, 2), seed=1), Settings(max_new_tokens=12))
    assert before == {path: (id(value), getattr(value, "data_ptr", int)()) for path, value in step.home.items()}
    assert isinstance(step.run.cache, FixedCache) and step.run.cache.capacity == SMALLEST_TIER


def test_frozen_rows_stay_where_they_are():
    """A row that ended keeps length and root for any number of late steps."""
    model = tiny_target("llama")
    engine = GraphEngine(model, make_draft("eagle3", model), Chain(3), capture=False)
    run = engine._begin(prompts_of((6, 6)), Settings(max_new_tokens=8, ignore_eos=True), None)
    step = FixedStep(engine, run, SMALLEST_TIER, capture=False)
    step.frozen[1] = True
    lengths, root = step.cache.lengths.clone(), step.run.root.clone()
    for _ in range(20):
        step.launch()
    assert step.cache.lengths[1] == lengths[1] and step.run.root[1] == root[1]
    assert step.cache.lengths[0] > lengths[0] and step.frozen.all()
    held = step.cache.lengths[0].item()
    step.launch()
    assert step.cache.lengths[0] == held


def test_a_row_that_is_not_frozen_differs():
    """The control: without the freeze the late steps move the row."""
    model = tiny_target("llama")
    engine = GraphEngine(model, None, None, capture=False)
    run = engine._begin(prompts_of((6,)), Settings(max_new_tokens=2, ignore_eos=True), None)
    step = FixedStep(engine, run, SMALLEST_TIER, capture=False)
    step.left.fill_(100)
    for _ in range(5):
        step.launch()
    assert step.cache.lengths.item() == 6 + 5


def test_stream_and_stop_strings():
    model, tokenizer = tiny_target("llama"), byte_tokenizer("chatml")
    arguments = model, make_draft("model", model), Chain(3), tokenizer
    settings = Settings(max_new_tokens=40, ignore_eos=True)
    fixed, engine = GraphEngine(*arguments, capture=False), Engine(*arguments)
    prompt = prompts_of((7,))[0]
    reply = engine.generate([prompt], settings)[0].tokens
    parts = list(fixed.stream(prompt, settings))
    assert list(itertools.chain(*parts)) == reply and len(parts) > 2
    stop = next(tokenizer.decode([token]) for token in reply[20:] if tokenizer.decode([token]).isascii())
    settings = Settings(max_new_tokens=40, ignore_eos=True, stop_strings=[stop])
    outputs = fixed.generate([prompt, prompt[:3]], settings)
    assert summary(outputs) == summary(engine.generate([prompt, prompt[:3]], settings))
    assert outputs[0].finish == "stop"


@pytest.mark.parametrize(
    "draft, settings, reason",
    [
        ("model", Settings(max_new_tokens=6, temperature=1.0, rule="rejection"), "rule 'rejection'"),
        ("model", Settings(max_new_tokens=6, repetition_penalty=1.2), "penalties"),
        ("lookup", Settings(max_new_tokens=6), "prompt lookup"),
    ],
)
def test_the_rest_falls_back_with_a_reason(draft, settings, reason):
    model = tiny_target("llama")
    drafting = NgramDraft(VOCAB_SIZE) if draft == "lookup" else make_draft(draft, model)
    fixed = GraphEngine(model, drafting, Chain(2), capture=False)
    outputs = fixed.generate(prompts_of((9, 3)), settings)
    assert reason in fixed.eager_because and not fixed._steps
    assert summary(outputs) == summary(Engine(model, drafting, Chain(2)).generate(prompts_of((9, 3)), settings))
    fixed.generate(prompts_of((9,)), Settings(max_new_tokens=2))
    assert (fixed.eager_because is None) == (draft != "lookup")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures")
def test_a_cpu_decodes_as_the_engine():
    model = tiny_target("llama")
    engine = GraphEngine(model)
    outputs = engine.generate(prompts_of((9, 3)), Settings(max_new_tokens=6))
    assert engine.eager_because == "cpu has no graphs" and not engine._steps
    assert summary(outputs) == summary(Engine(model).generate(prompts_of((9, 3)), Settings(max_new_tokens=6)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "draft, plan", [("plain", None), ("model", "chain"), ("eagle3", "dynamic"), ("medusa", "static")]
)
def test_captured_steps_on_a_gpu(draft, plan, temperature):
    """A graph, replayed for other prompts and seeds, against the eager engine and against plain decoding; float32."""
    with torch.device("cuda"):
        model = tiny_target("llama", head_dim=64).cuda()
        arguments = (model, make_draft(draft, model), PLANS.get(plan))
    fixed, eager, plain = GraphEngine(*arguments), Engine(*arguments), Engine(model)
    for seed, lengths in ((0, (9, 4)), (1, (30, 12)), (2, (300, 1))):
        settings = Settings(max_new_tokens=24, temperature=temperature, seed=seed, ignore_eos=True)
        outputs = fixed.generate(prompts_of(lengths), settings)
        assert fixed.eager_because is None
        assert summary(outputs) == summary(eager.generate(prompts_of(lengths), settings))
        expected = plain.generate(prompts_of(lengths), settings)
        assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    assert len(fixed._steps) == 1 and next(iter(fixed._steps.values())).graph is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_target_that_cannot_be_captured_decodes_eagerly():
    model = tiny_target("llama", head_dim=64).cuda()
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: kwargs["input_ids"].sum().item() and None, with_kwargs=True
    )
    fixed = GraphEngine(model)
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        outputs = fixed.generate(prompts_of((9,)), Settings(max_new_tokens=8))
    assert "cannot be captured" in fixed.eager_because
    hook.remove()
    assert summary(outputs) == summary(Engine(model).generate(prompts_of((9,)), Settings(max_new_tokens=8)))
