"""Tiny model folders, chats and recipes on disk, and processes that train on them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from headtrain.data import Dataset, build_dataset
from headtrain.recipe import DataConfig, Recipe
from headtrain.target import Target
from tests.templates import byte_tokenizer
from tests.tiny import tiny_target

WORDS = ["the", "tree", "grows", "a", "branch", "and", "cuts", "it", "while", "rain", "falls", "on", "old", "stones"]
ROOT = Path(__file__).parents[1]


def make_target_folder(folder: Path, style: str | None = "chatml", family: str = "llama", **changes: Any) -> Path:
    """A random target with a byte-level tokenizer of that style (None: without a tokenizer)."""
    tokenizer = byte_tokenizer(style or "chatml")
    model = tiny_target(family, **{"vocab_size": len(tokenizer), "num_hidden_layers": 3, **changes})
    model.save_pretrained(folder)
    if style is not None:
        tokenizer.save_pretrained(folder)
    return folder


def write_chats(path: Path, number: int = 12, seed: int = 0) -> Path:
    """Single-turn conversations of different lengths, one JSON object a line."""
    random = np.random.default_rng(seed)

    def text(low: int, high: int) -> str:
        return " ".join(random.choice(WORDS, random.integers(low, high)))

    rows = [
        {"messages": [{"role": "user", "content": text(1, 4)}, {"role": "assistant", "content": text(2, 9)}]}
        for _ in range(number)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe_dict(target: Path, chats: Path, output: Path, **train: Any) -> dict[str, Any]:
    return {
        "target": {"model": str(target), "dtype": "float32"},
        "head": {"family": "eagle3", "vocabulary": None, "steps": 2},
        "data": {"train": str(chats)},
        "train": {
            "steps": 8,
            "batch_tokens": 256,
            "learning_rate": 1e-2,
            "warmup": 0.0,
            "precision": "no",
            "log_every": 1,
            "save_every": 2,
            **train,
        },
        "output": str(output),
    }


def make_recipe(target: Path, chats: Path, output: Path, **train: Any) -> Recipe:
    return Recipe.from_dict(recipe_dict(target, chats, output, **train))


def write_recipe(path: Path, target: Path, chats: Path, output: Path, **train: Any) -> Path:
    """JSON is YAML."""
    path.write_text(json.dumps(recipe_dict(target, chats, output, **train)))
    return path


def load_parts(target: Path, chats: Path, **data: Any) -> tuple[Target, Dataset]:
    loaded = Target.load(str(target), "float32")
    return loaded, build_dataset(DataConfig(train=(str(chats),), **data), loaded.tokenizer, progress=False)


def read_log(run: Path) -> list[dict[str, Any]]:
    """Complete lines of a run's log."""
    path = run / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_log(run) if "loss" in line}


def wait_until(condition: Callable[[], bool], seconds: float = 60.0, pause: float = 0.002) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(pause)
    return False


def _train(recipe: str, overrides: Sequence[str], environment: dict[str, str], errors: str | None) -> None:
    """In a child: what `python train.py RECIPE ...` does."""
    os.environ.update(environment)
    if errors is not None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    from train import main

    raise SystemExit(main([recipe, *overrides]))


def start_training(recipe: Path, overrides: Sequence[str] = (), environment=None, errors: Path | None = None):
    """A process of its own, forked from a server that has imported what training needs, so that it starts at once."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["headtrain.trainer", "accelerate", "transformers.models.llama.modeling_llama"])
    arguments = (str(recipe), list(overrides), environment or {}, errors and str(errors))
    process = context.Process(target=_train, args=arguments, daemon=True)
    process.start()
    return process


def start_ranks(recipe: Path, world: int, overrides: Sequence[str] = (), errors: Path | None = None) -> list:
    """`world` processes with the environment that torchrun gives them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"LOCAL_WORLD_SIZE": str(world), "ACCELERATE_USE_CPU": "true"}
    return [
        start_training(
            recipe,
            overrides,
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            errors and errors.with_suffix(f".{rank}"),
        )
        for rank in range(world)
    ]
