"""Exactness on the real model: SmolLM2-135M-Instruct in float32, with the shipped head and an untrained one."""

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from decode.engine import Engine
from decode.settings import Settings
from decode.tree import Chain, Dynamic, Static
from headtrain.checkpoint import load_head
from headtrain.heads.base import load_family
from headtrain.target import Target
from tests.folders import ROOT

pytestmark = pytest.mark.slow

PLANS = {
    "chain": Chain(3),
    "static": Static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic": Dynamic(3, 4, 12),
}
TEXT = (
    "Speculative decoding drafts several tokens with a small model and lets the large model check all of them in one"
    " forward pass, so that the answer is the same and arrives sooner. "
)


@lru_cache
def target() -> Target:
    command = [sys.executable, str(ROOT / "scripts" / "get_target.py")]
    folder = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]
    return Target.load(folder, "float32")


@lru_cache
def draft(family: str):
    if family == "eagle3":
        return load_head(Path(ROOT) / "recipes" / "pretrained" / "smollm2-135m-eagle3", target())
    family_class = load_family(family)
    torch.manual_seed(0)
    return family_class.build(family_class.Config(), target()).eval()


def prompt(length: int) -> list[int]:
    ids = target().tokenizer(TEXT * 40).input_ids
    return ids[:length]


@pytest.mark.parametrize("length", [1, 7, 64, 600])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_parity(family, temperature, plan, length):
    """Token for token in float32, at every temperature; drafts are accepted, so the trees are really used."""
    settings = Settings(max_new_tokens=48, temperature=temperature, seed=length, ignore_eos=True)
    plain = Engine(target().model).generate([prompt(length)], settings)[0]
    fast = Engine(target().model, draft(family), PLANS[plan]).generate([prompt(length)], settings)[0]
    assert fast.tokens == plain.tokens
    if length >= 64 and family == "eagle3":
        assert len(fast.accepted) < len(plain.accepted)


def test_rows_of_a_batch_do_not_touch_each_other():
    settings = Settings(max_new_tokens=32, temperature=0.7)
    prompts = [prompt(length) for length in (5, 200, 33)]
    engine = Engine(target().model, draft("eagle3"), PLANS["dynamic"])
    together = engine.generate(prompts, settings)
    alone = [engine.generate([ids], settings, [row])[0] for row, ids in enumerate(prompts)]
    assert [output.tokens for output in together] == [output.tokens for output in alone]
