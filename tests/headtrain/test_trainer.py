"""Whole runs on a tiny target: losses, accumulation, several processes, kills, and bad ends."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decode.errors import UserError
from headtrain.checkpoint import list_checkpoints, load_head
from headtrain.recipe import TrainConfig
from headtrain.target import Target
from headtrain.trainer import Trainer, build_head, learning_rate, make_accelerator, train
from tests.folders import (
    ROOT,
    load_parts,
    losses,
    make_recipe,
    read_log,
    start_ranks,
    start_training,
    wait_until,
    write_recipe,
)


def run_cli(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def assert_one_line(text: str, *parts: str) -> None:
    lines = text.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("headtrain: "), text
    assert all(part in text for part in parts), text


def test_command_line_run(tmp_path, target_folder, chats):
    recipe = write_recipe(tmp_path / "recipe.yaml", target_folder, chats, tmp_path / "unused")
    run = tmp_path / "run"
    done = run_cli(str(recipe), f"output={run}", "train.steps=12", "train.keep=2", "train.save_every=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == str(run / "head")
    assert "step 12/12" in done.stderr
    log = read_log(run)
    assert [line["step"] for line in log] == list(range(1, 13))
    assert {"loss", "acceptance", "learning_rate", "tokens_per_second", "epoch"} <= log[0].keys()
    assert len(log[0]["acceptance"]) == 2 and all(0 <= value <= 1 for value in log[0]["acceptance"])
    assert log[-1]["loss"] < 0.95 * log[0]["loss"]
    assert [path.name for path in list_checkpoints(run)] == ["step-0000010", "step-0000012"]
    assert sorted(path.name for path in (run / "head").iterdir()) == [
        "config.json",
        "model.safetensors",
        "recipe.yaml",
    ]
    assert not list(run.rglob(".*")), "temporary files stayed"
    load_head(run / "head", Target.load(str(target_folder), "float32"))


def test_command_line_error_is_one_line(tmp_path, target_folder, chats):
    (tmp_path / "file").write_text("")
    recipe = write_recipe(tmp_path / "recipe.yaml", target_folder, chats, tmp_path / "file" / "run")
    process = start_training(recipe, errors=tmp_path / "errors")
    process.join(200)
    assert process.exitcode == 2
    assert_one_line((tmp_path / "errors").read_text(), "output", str(tmp_path / "file" / "run"))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_loss_falls(tmp_path, target_folder, chats, precision, fresh_accelerator):
    train(make_recipe(target_folder, chats, tmp_path, steps=15, precision=precision, save_every=None))
    values = losses(tmp_path)
    assert values[15] < 0.95 * values[1]
    assert {x.dtype for x in load_file(tmp_path / "head" / "model.safetensors").values() if x.is_floating_point()} == {
        torch.float32
    }


def make_trainer(target_folder: Path, chats: Path, run: Path, **settings) -> Trainer:
    recipe = make_recipe(target_folder, chats, run, **settings)
    target, dataset = load_parts(target_folder, chats)
    torch.manual_seed(0)
    head = build_head(recipe, target, dataset)
    return Trainer(recipe, run, make_accelerator(recipe, run), target, dataset, head)


def take_steps(trainer: Trainer, steps) -> tuple[list[float], dict[str, torch.Tensor]]:
    from headtrain.trainer import Window

    values = []
    for step, micro_batches in enumerate(steps, start=1):
        window = Window()
        trainer.step(step, micro_batches, window)
        values.append(float(window.sums[0]))
    trainer.tracker.close()
    return values, {name: p.detach().clone() for name, p in trainer.head.named_parameters()}


@pytest.mark.parametrize("uneven", [False, True])
def test_accumulation_is_one_big_batch(tmp_path, target_folder, chats, uneven, fresh_accelerator):
    """The loss is normalised over all trained tokens of the step, however the rows are laid out."""
    cut = 1 if uneven else 3
    big = [[[0, 1, 2, 3, 4, 5]], [[6, 7, 8, 9, 10, 11]], [[0, 2, 4, 6, 8, 10]]]
    small = [[rows[:cut], rows[cut:]] for (rows,) in big]
    settings = {"clip_norm": None, "learning_rate": 1e-3}
    expected, weights = take_steps(make_trainer(target_folder, chats, tmp_path / "big", **settings), big)
    found, others = take_steps(make_trainer(target_folder, chats, tmp_path / "small", **settings), small)
    assert found == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=1e-4)
    # Negative control: a mean of the micro-batches' means is another number as soon as they differ in size.
    if uneven:
        first = make_trainer(target_folder, chats, tmp_path / "means", **settings)
        means = [take_steps_once(first, [rows]) for rows in small[0]]
        assert abs(sum(means) / 2 - expected[0]) > 1e-4


def take_steps_once(trainer: Trainer, micro_batches) -> float:
    total, *_ = trainer.model(trainer.features.batch(micro_batches[0]))
    return float(total.detach() / trainer._trained_tokens(micro_batches))


def test_two_processes_take_the_steps_of_one(tmp_path, target_folder, chats):
    recipe = write_recipe(tmp_path / "recipe.yaml", target_folder, chats, tmp_path / "unused", steps=4)
    alone = [f"output={tmp_path / 'one'}", "train.accumulation=2"]
    together = [f"output={tmp_path / 'two'}", "train.accumulation=1"]
    errors = tmp_path / "errors"
    processes = [start_training(recipe, alone, errors=errors), *start_ranks(recipe, 2, together, errors)]
    for process in processes:
        process.join(200)
    shown = "".join(path.read_text() for path in tmp_path.glob("errors*"))
    assert [process.exitcode for process in processes] == [0, 0, 0], shown
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(found) == [1, 2, 3, 4]
    assert found == pytest.approx(expected, rel=1e-4)
    one, two = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-3)
    reports = [(tmp_path / f"errors.{rank}").read_text() for rank in range(2)]
    assert "step 4/4" in reports[0] and "step" not in reports[1]
    # Processes that did not know of each other would take twice as many steps in an epoch, and both would report.
    assert [x["epoch"] for x in read_log(tmp_path / "two")] == [x["epoch"] for x in read_log(tmp_path / "one")]


def unbroken(tmp_path, target_folder, chats, steps: int) -> tuple[Path, dict[int, float]]:
    recipe = write_recipe(tmp_path / "recipe.yaml", target_folder, chats, tmp_path / "unbroken", steps=steps)
    process = start_training(recipe)
    process.join(200)
    assert process.exitcode == 0
    return recipe, losses(tmp_path / "unbroken")


def kill_and_resume(recipe: Path, run: Path, at: int, delay: float, expected: dict[int, float]) -> None:
    command = [f"output={run}"]
    process = start_training(recipe, command)
    assert wait_until(lambda: bool(losses(run)) and max(losses(run)) >= at)
    process.join(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the run ended before it was killed; give it more steps"
    for folder in list_checkpoints(run):
        assert {"model.safetensors", "optimizer.safetensors", "config.json", "state.json"} <= set(os.listdir(folder))
    again = start_training(recipe, command)
    again.join(200)
    assert again.exitcode == 0
    assert losses(run) == expected
    assert [line["step"] for line in read_log(run)] == sorted(expected)
    assert not list((run / "checkpoints").glob(".*"))


def test_killed_run_repeats_the_losses(tmp_path, target_folder, chats):
    recipe, expected = unbroken(tmp_path, target_folder, chats, 30)
    assert len(expected) == 30
    for at in (1, 4, 7):
        kill_and_resume(recipe, tmp_path / f"run-{at}", at, 0.0, expected)
    heads = [load_file(tmp_path / name / "head" / "model.safetensors") for name in ("unbroken", "run-7")]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


@pytest.mark.slow
def test_fifty_random_kills(tmp_path, target_folder, chats):
    recipe, expected = unbroken(tmp_path, target_folder, chats, 60)
    chance = random.Random(0)
    for index in range(50):
        kill_and_resume(recipe, tmp_path / f"run-{index}", chance.randint(1, 30), chance.uniform(0, 0.05), expected)


def test_log_lines_go_on_between_checkpoints(tmp_path, target_folder, chats, fresh_accelerator):
    """A log line covers all its steps, those in front of the checkpoint too."""
    recipe = make_recipe(target_folder, chats, tmp_path, steps=6, log_every=3, save_every=2, keep=3)
    train(recipe)
    expected = losses(tmp_path)
    for folder in list_checkpoints(tmp_path)[1:]:
        shutil.rmtree(folder)
    train(recipe)
    assert losses(tmp_path) == expected and list(expected) == [3, 6]


def test_what_a_kill_left_is_put_in_order(tmp_path, target_folder, chats, fresh_accelerator):
    recipe = make_recipe(target_folder, chats, tmp_path, steps=2)
    train(recipe)
    (tmp_path / ".head-abc").mkdir()
    (tmp_path / ".best-abc").mkdir()
    (tmp_path / "checkpoints" / "step-0000002").rename(tmp_path / "checkpoints" / ".step-0000002-abc-old")
    train(recipe)
    assert not list(tmp_path.rglob(".*"))
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["step-0000002"]


def test_resume_with_other_length_is_refused(tmp_path, target_folder, chats, fresh_accelerator):
    train(make_recipe(target_folder, chats, tmp_path, steps=2))
    with pytest.raises(UserError, match="2 steps in all"):
        train(make_recipe(target_folder, chats, tmp_path, steps=3))


def test_resume_with_other_head_is_refused(tmp_path, target_folder, chats, fresh_accelerator):
    from headtrain.recipe import Recipe
    from tests.folders import recipe_dict

    train(make_recipe(target_folder, chats, tmp_path, steps=2))
    raw = recipe_dict(target_folder, chats, tmp_path, steps=2)
    raw["head"]["decay"] = 0.5
    with pytest.raises(UserError, match="head"):
        train(Recipe.from_dict(raw))


def test_resume_with_the_vocabulary_of_other_data_is_refused(tmp_path, target_folder, chats, fresh_accelerator):
    from headtrain.recipe import Recipe
    from tests.folders import recipe_dict

    raw = recipe_dict(target_folder, chats, tmp_path / "run", steps=2)
    raw["head"]["vocabulary"] = 12
    train(Recipe.from_dict(raw))
    other = tmp_path / "other.jsonl"
    other.write_text(chats.read_text().replace("the", "zzz").replace("tree", "zzzz"))
    raw["data"]["train"] = str(other)
    with pytest.raises(UserError, match="draft vocabulary of 12 tokens .* chosen from other data"):
        train(Recipe.from_dict(raw))


def test_not_finite_names_step_rows_and_tensor(tmp_path, target_folder, chats, fresh_accelerator):
    trainer = make_trainer(target_folder, chats, tmp_path)
    trainer.head.midlayer.mlp.up_proj.weight.data[0, 0] = float("nan")
    before = trainer.head.fc.weight.detach().clone()
    with pytest.raises(UserError) as error:
        take_steps(trainer, [[[3, 5]]])
    text = str(error.value)
    assert "\n" not in text and "step 1" in text and "midlayer.mlp.up_proj.weight" in text
    assert "chats.jsonl:4" in text and "chats.jsonl:6" in text
    assert torch.equal(trainer.head.fc.weight, before), "no step was taken"


def test_not_finite_loss_stops(tmp_path, target_folder, chats, fresh_accelerator, monkeypatch):
    from headtrain.heads.base import HeadLoss

    trainer = make_trainer(target_folder, chats, tmp_path)
    zero = torch.zeros(2)
    nan = trainer.head.fc.weight.sum() * float("nan")
    monkeypatch.setattr(type(trainer.head), "loss", lambda self, batch, target: HeadLoss(nan, zero, zero))
    with pytest.raises(UserError, match=r"fc\.weight is not finite at step 1 .*chats\.jsonl:1"):
        take_steps(trainer, [[[0]]])


def test_full_disk_stops_with_one_line(tmp_path, target_folder, chats, fresh_accelerator, monkeypatch):
    import headtrain.checkpoint as checkpoint

    real, saved = checkpoint.save_file, []

    def save_file(tensors, path):
        if len(saved) == 3:  # the optimizer's file of the second checkpoint
            raise OSError(28, os.strerror(28))
        saved.append(path)
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    recipe = make_recipe(target_folder, chats, tmp_path, steps=6)
    with pytest.raises(UserError, match="No space left") as error:
        train(recipe)
    assert "\n" not in str(error.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000002"]
    monkeypatch.undo()
    train(recipe)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_learning_rate():
    config = TrainConfig(learning_rate=1.0, warmup=4.0, decay="linear", steps=14)
    rates = [learning_rate(config, step, 14) for step in range(1, 16)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[5:] == pytest.approx([1 - k / 10 for k in range(1, 11)])
    cosine = TrainConfig(learning_rate=2.0, warmup=0.0, decay="cosine", steps=10)
    assert learning_rate(cosine, 1, 10) == 2.0
    assert learning_rate(cosine, 6, 10) == pytest.approx(1.0)
    assert learning_rate(cosine, 11, 10) == pytest.approx(0.0)


def test_log_lines_are_json(tmp_path, target_folder, chats, fresh_accelerator):
    train(make_recipe(target_folder, chats, tmp_path, steps=3, log_every=2))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 3]
