"""A real consumer: speculators' own classes load our export and draft what we draft.

Its pins may clash with ours, so it runs in the python that HEADTRAIN_SPECULATORS_PYTHON names (default: this one).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.checkpoint import load_head
from headtrain.formats.convert import export_head
from headtrain.target import Target
from tests.headtrain.formats.heads import make_head, save

ROOT = Path(__file__).parents[3]
SMOLLM2 = Path("~/.cache/headtrain/SmolLM2-135M-Instruct").expanduser()
SHIPPED = ROOT / "recipes/pretrained/smollm2-135m-eagle3"
PYTHON = os.environ.get("HEADTRAIN_SPECULATORS_PYTHON", sys.executable)
TEXT = (
    "Speculative decoding drafts a few tokens with a small head and lets the large model verify them in one pass. The"
    " answer stays the same; only the time changes. Write it down: twelve apples, four pears and a lemon."
)
TOLERANCE = 1e-4  # float32, 600 to 2304 terms a dot product


@pytest.fixture(scope="module")
def consumer() -> Path:
    found = subprocess.run([PYTHON, "-c", "import speculators"], capture_output=True, text=True, timeout=300)
    if found.returncode:
        pytest.skip(f"{PYTHON} has no speculators; name one that has in HEADTRAIN_SPECULATORS_PYTHON")
    return Path(__file__).with_name("consume_speculators.py")


def theirs(consumer: Path, export: Path, features, tokens) -> torch.Tensor:
    """[2, S, V] logits of steps 0 and 1 from speculators' classes."""
    inputs, output = export.parent / "inputs.safetensors", export.parent / "outputs.safetensors"
    save_file({"features": features.contiguous(), "tokens": tokens.contiguous()}, inputs)
    done = subprocess.run(
        [PYTHON, str(consumer), str(export), str(inputs), str(output)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(output)["logits"]


@torch.no_grad()
def ours(head, target: Target, features, tokens) -> torch.Tensor:
    """The same by drafting: at every slot, `begin` on the text so far, then `extend` by the text's next token."""
    num_slots = tokens.shape[1]
    ids = torch.cat([tokens.new_zeros(1, 1), tokens], 1)  # the first token is never consumed
    columns = torch.arange(target.vocab_size) if head.vocabulary is None else head.vocabulary
    spread = torch.full((2, num_slots, target.vocab_size), float("-inf"))
    for n in range(1, num_slots):
        state, first = head.begin(features[:, :n], ids[:, : n + 1], torch.tensor([n]), num_slots + 8)
        second = head.extend(state, ids[:, n + 1 : n + 2], torch.zeros(1, 1, dtype=torch.int64))
        spread[0, n - 1, columns], spread[1, n - 1, columns] = first[0, 0], second[0, 0]
    return spread[:, : num_slots - 1]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of logits; inf where one drafts a token that the other cannot."""
    same = a.isinf() == b.isinf()
    return float((a - b)[~a.isinf()].abs().max()) if bool(same.all()) else float("inf")


@pytest.fixture(scope="module")
def smollm2() -> Target:
    if not SMOLLM2.exists():
        pytest.skip(f"{SMOLLM2} is absent; scripts/get_target.py makes it")
    return Target.load(str(SMOLLM2), "float32")


@pytest.mark.slow
def test_the_shipped_head_drafts_the_same(tmp_path, consumer, smollm2):
    head = load_head(SHIPPED, smollm2)
    ids = torch.tensor([smollm2.prompt_ids([{"role": "user", "content": TEXT}])])
    features, _ = smollm2.features(ids, head.target_layers)
    features, tokens = features[:, :-1], ids[:, 1:]
    export_head(SHIPPED, "speculators", tmp_path / "export", str(SMOLLM2))
    expected = ours(head, smollm2, features, tokens)
    found = theirs(consumer, tmp_path / "export", features, tokens)[:, : expected.shape[1]]
    assert distance(found, expected) < TOLERANCE

    # negative control: a permuted map proposes other tokens
    path = tmp_path / "export" / "model.safetensors"
    tensors = load_file(path)
    columns = torch.arange(len(tensors["d2t"]))
    permuted = (tensors["d2t"] + columns).roll(1)
    save_file({**tensors, "d2t": permuted - columns}, path, metadata={"format": "pt"})
    found = theirs(consumer, tmp_path / "export", features, tokens)[:, : expected.shape[1]]
    assert distance(found, expected) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"vocabulary": None},
        {"feedback": "normed", "fusion_norm": "each"},
        {"fusion_norm": "joint", "normed_residual": True},
        {"own_embedding": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_every_flag_means_the_same(tmp_path, consumer, target_folder, settings):
    target = Target.load(str(target_folder), "float32")
    save(make_head("eagle3", target, **settings), "eagle3", target, tmp_path / "head")
    head = load_head(tmp_path / "head", target)
    torch.manual_seed(0)
    ids = torch.randint(3, target.vocab_size, (1, 12))
    features, _ = target.features(ids, head.target_layers)
    export_head(tmp_path / "head", "speculators", tmp_path / "export", str(target_folder))
    expected = ours(head, target, features[:, :-1], ids[:, 1:])
    found = theirs(consumer, tmp_path / "export", features[:, :-1], ids[:, 1:])[:, : expected.shape[1]]
    assert distance(found, expected) < TOLERANCE
