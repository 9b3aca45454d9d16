"""What a run needs, against counts made by hand."""

import time

import pytest
import torch

from headtrain.data import build_dataset
from headtrain.estimate import PeakMemory, measure_run
from headtrain.inspect import load_tokenizer
from headtrain.trainer import prepare
from tests.folders import make_recipe

MEGABYTE = 1 << 20


@pytest.fixture
def recipe(target_folder, chats, tmp_path, fresh_accelerator):
    return make_recipe(target_folder, chats, tmp_path / "run", steps=6, save_every=6)


def estimate(recipe, steps=2):
    return measure_run(recipe, build_dataset(recipe.data, load_tokenizer(recipe.target)), steps)


def test_counts(recipe, tmp_path):
    found = estimate(recipe)
    assert not (tmp_path / "run").exists(), "an estimate writes nothing into the run's folder"
    trainer = prepare(recipe)
    head, target = trainer.head, trainer.target
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    assert found.trained_parameters == trained and found.gradients == 4 * trained
    assert found.optimizer == pytest.approx(8 * trained, rel=0.01)  # two moments in float32, and a counter each
    assert found.target_parameters == sum(p.numel() for p in target.model.parameters())
    states = len(head.target_layers) + 1
    assert found.cache == states * target.hidden_size * target.dtype.itemsize * len(trainer.dataset.ids)
    assert found.measured == 2
    assert found.activations >= 0, "a step this small may fit into memory that the process already has"
    assert found.memory == found.weights + found.gradients + found.optimizer + found.activations


def test_time_covers_every_place_of_the_run(recipe):
    found = estimate(recipe, steps=3)
    trainer = prepare(recipe)
    lengths = trainer.dataset.lengths
    steps = [rows for rows, _ in zip(trainer.steps(), range(trainer.num_steps), strict=False)]
    total = sum(len(rows) * max(lengths[rows]) for micro_batches in steps for rows in micro_batches)
    assert found.seconds * found.tokens_per_second == pytest.approx(total)
    assert estimate(recipe, steps=50).measured == trainer.num_steps - 1, "no more steps than the run has"


def test_peak_memory_sees_what_is_freed_again():
    with PeakMemory(torch.device("cpu")) as memory:
        held = torch.ones(64 * MEGABYTE, dtype=torch.uint8)
        time.sleep(0.1)
        del held
    with PeakMemory(torch.device("cpu")) as nothing:
        time.sleep(0.02)
    assert memory.bytes > 32 * MEGABYTE > nothing.bytes
