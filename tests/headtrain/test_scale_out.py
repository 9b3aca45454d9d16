"""Every launch recipe with two processes on CPUs: the steps of one process, one folder, and resumption in any mode."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.checkpoint import list_checkpoints
from headtrain.features import write_cache
from headtrain.heads.eagle3 import default_layers
from tests.folders import (
    ROOT,
    load_parts,
    losses,
    read_log,
    start_training,
    wait_until,
    write_chats,
    write_recipe,
)

RECIPES = ROOT / "recipes" / "accelerate"
TWO = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
LOSS = {"rel": 1e-4}  # float32 sums in another order; the steps of AdamW let them drift apart slowly
WEIGHT = {"rtol": 1e-3, "atol": 1e-3}
SETTINGS = {"steps": 4, "learning_rate": 1e-3}
OVERRIDES = ("head.feature_noise=0.2", "head.lm_head=frozen")  # randomness in each step; a weight that is not trained


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_environment(mode: str, world: int) -> dict[str, str]:
    """The variables that `accelerate launch --config_file recipes/accelerate/MODE.yaml` gives its processes.

    ZeRO-3 keeps small tensors whole, and all are small here, so that is switched off.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    options = ["--config_file", str(RECIPES / f"{mode}.yaml"), "--num_processes", str(world)]
    options += ["--num_machines", "1", "--main_process_port", str(free_port()), "train.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        environment = prepare_deepspeed_cmd_env(args)[1]
        name = Path(environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"])
        config = json.loads((ROOT / name).read_text())
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        with tempfile.NamedTemporaryFile("w", suffix=name.name, delete=False) as file:
            json.dump(config, file)
        environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = file.name
    else:
        environment = prepare_multi_gpu_env(args)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.main_process_port), "LOCAL_WORLD_SIZE": str(world)}
    return {key: value for key, value in environment.items() if os.environ.get(key) != value} | address


def start(mode: str, recipe: Path, overrides, errors: Path, world: int = 2) -> list:
    """One process a rank."""
    if mode == "single":
        return [start_training(recipe, overrides, errors=errors.with_suffix(".0"))]
    shared = launch_environment(mode, world) | {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    return [
        start_training(
            recipe, overrides, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, errors.with_suffix(f".{rank}")
        )
        for rank in range(world)
    ]


def run(mode: str, recipe: Path, output: Path, *overrides: str, world: int = 2) -> Path:
    """Train to the end; one process takes as many micro-batches as two together."""
    share = f"train.accumulation={4 if mode == 'single' else 4 // world}"
    overrides = (share, *OVERRIDES, *overrides, f"output={output}")
    processes = start(mode, recipe, overrides, output.with_suffix(".errors"), world)
    for process in processes:
        process.join(240)
    shown = "".join(path.read_text() for path in output.parent.glob(f"{output.stem}.*"))
    assert [process.exitcode for process in processes] == [0] * len(processes), shown[-6000:]
    return output


def assert_same_run(found: Path, expected: Path) -> None:
    assert losses(found) == pytest.approx(losses(expected), **LOSS)
    assert [x["epoch"] for x in read_log(found)] == [x["epoch"] for x in read_log(expected)]
    one, two = (load_file(folder / "head" / "model.safetensors") for folder in (expected, found))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, **WEIGHT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Three steps of four micro-batches."""
    return write_chats(tmp_path_factory.mktemp("scale") / "chats.jsonl", 40)


@pytest.fixture(scope="module")
def recipe(target_folder, chats) -> Path:
    return write_recipe(chats.with_name("recipe.yaml"), target_folder, chats, Path("unused"), **SETTINGS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, recipe) -> Path:
    return run("single", recipe, tmp_path_factory.mktemp("alone") / "run")


def cut_off(run: Path, copy: Path, step: int) -> Path:
    """A copy of a finished run as a kill behind the checkpoint of `step` leaves it."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("head"))
    for folder in list_checkpoints(copy):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)
    assert [folder.name for folder in list_checkpoints(copy)] == [f"step-{step:07d}"]
    assert read_log(copy)[step - 1]["epoch"] % 1, "mid-epoch is what the test is about"
    return copy


def assert_refused(processes: list, errors: Path, *words: str) -> None:
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [2] * len(processes)
    lines = [x for x in errors.with_suffix(".0").read_text().splitlines() if x.startswith("headtrain: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), lines


QUICK = ("ddp", "zero3", "fsdp2")  # the others are slow


def modes(quick=QUICK) -> list:
    return [pytest.param(mode, marks=[] if mode in quick else pytest.mark.slow) for mode in TWO]


@pytest.mark.parametrize("mode", modes(("ddp", "zero2", "zero3", "fsdp2")))
def test_two_processes_take_the_steps_of_one(tmp_path, recipe, alone, mode):
    """With two micro-batches a step each. Then one process goes on from the checkpoint of the two."""
    together = run(mode, recipe, tmp_path / "run")
    assert_same_run(together, alone)
    assert_same_run(run("single", recipe, cut_off(together, tmp_path / "cut", 2)), alone)


@pytest.mark.parametrize("mode", modes())
def test_two_processes_go_on_from_one(tmp_path, recipe, alone, mode):
    resumed = run(mode, recipe, cut_off(alone, tmp_path / "run", 2))
    assert_same_run(resumed, alone)
    report = (tmp_path / "run.0").read_text()
    assert "resumed behind step 2 of 4" in report and "step 2/4" not in report


def test_wrong_moments_are_seen(tmp_path, recipe, alone):
    """Negative control: the comparison notices a checkpoint whose optimizer starts anew."""
    copy = cut_off(alone, tmp_path / "run", 2)
    path = copy / "checkpoints" / "step-0000002" / "optimizer.safetensors"
    save_file({name: 0 * tensor for name, tensor in load_file(path).items()}, path)
    with pytest.raises(AssertionError):
        assert_same_run(run("single", recipe, copy), alone)


def test_another_global_batch_is_refused(tmp_path, recipe, alone):
    copy = cut_off(alone, tmp_path / "run", 2)
    overrides = [*OVERRIDES, "train.accumulation=3", f"output={copy}"]
    errors = tmp_path / "errors"
    assert_refused(start("single", recipe, overrides, errors), errors, "processes x accumulation", "4", "now 3")


def test_missing_processes_are_one_line(tmp_path, recipe):
    """Told of two processes, but given no rank, each would believe that it is alone."""
    errors = tmp_path / "errors"
    process = start_training(recipe, [f"output={tmp_path}"], {"WORLD_SIZE": "2"}, errors.with_suffix(".0"))
    assert_refused([process], errors, "2 processes were asked for", "group of 1")


def test_mode_left_out_is_one_line(tmp_path, recipe):
    """accelerate leaves DeepSpeed out without a word where it is told to use CPUs."""
    errors = tmp_path / "errors"
    shared = {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "true"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    processes = [
        start_training(
            recipe,
            [f"output={tmp_path}"],
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            errors.with_suffix(f".{rank}"),
        )
        for rank in range(2)
    ]
    assert_refused(processes, errors, "DEEPSPEED was asked for")


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_names_the_head(tmp_path, recipe, monkeypatch, capsys, fresh_accelerator, rank):
    from train import main

    monkeypatch.setenv("RANK", str(rank))
    assert main([str(recipe), "train.steps=1", f"output={tmp_path / 'run'}"]) == 0
    assert capsys.readouterr().out == ("" if rank else f"{tmp_path / 'run' / 'head'}\n")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["single", *TWO])
def test_bfloat16_and_measuring(tmp_path, recipe, alone, target_folder, chats, mode):
    """Real decoding and held-out loss of a head that lies in parts."""
    held_out = write_chats(tmp_path / "held_out.jsonl", 4, seed=1)
    overrides = ["train.precision=bf16", f"eval.prompts={held_out}", "eval.every=2", "eval.limit=2"]
    overrides += ["eval.max_new_tokens=8", f"data.eval={held_out}"]
    log = read_log(run(mode, recipe, tmp_path / "run", *overrides))
    assert [x["loss"] for x in log if "loss" in x] == pytest.approx(list(losses(alone).values()), rel=3e-2)
    assert sum("acceptance_length" in x for x in log) == 2 and (tmp_path / "run" / "best" / "best.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["single", *TWO])
def test_launched_for_real(tmp_path, recipe, alone, mode):
    world = 1 if mode == "single" else 2
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(RECIPES / f"{mode}.yaml")]
    command += ["--num_processes", str(world), "--main_process_port", str(free_port()), "train.py", str(recipe)]
    command += [*OVERRIDES, f"train.accumulation={4 // world}", f"output={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_two_nodes_launched_for_real(tmp_path, recipe, alone):
    port = str(free_port())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nodes = []
    for rank in range(2):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(RECIPES / "two_nodes.yaml")]
        command += ["--num_processes", "2", "--machine_rank", str(rank), "--main_process_port", port]
        command += ["train.py", str(recipe), *OVERRIDES, "train.accumulation=2", f"output={tmp_path / 'run'}"]
        nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    for node in nodes:
        _, errors = node.communicate(timeout=300)
        assert node.returncode == 0, errors[-3000:]
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.slow
def test_fifty_random_kills_in_all_modes(tmp_path, recipe, target_folder, chats):
    """Killed at a random moment, gone on in a random mode, from the cache or not, until fifty kills are through."""
    chance = random.Random(0)
    settings = ["train.steps=600", "train.save_every=3", "train.log_every=2", "train.learning_rate=1e-4"]
    expected = losses(run("single", recipe, tmp_path / "unbroken", *settings))
    target, dataset = load_parts(target_folder, chats)
    list(write_cache(dataset, target, default_layers(target.num_layers), tmp_path / "cache", 200))
    output = tmp_path / "run"
    for index in range(50):
        mode = chance.choice(["single", "single", "ddp", "zero2", "zero3", "fsdp2"])
        cached = chance.choice([[], [f"data.cache={tmp_path / 'cache'}"]])
        share = f"train.accumulation={4 if mode == 'single' else 2}"
        errors = tmp_path / f"errors-{index}"
        processes = start(mode, recipe, [share, *OVERRIDES, *settings, *cached, f"output={output}"], errors)
        done, target_step = max(losses(output), default=0), chance.randint(0, 3)
        wait_until(lambda done=done, more=target_step: max(losses(output), default=0) > done + more, 60)
        time.sleep(chance.uniform(0, 0.1))
        for process in processes:
            assert process.is_alive(), errors.with_suffix(".0").read_text()[-3000:]
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
        for folder in list_checkpoints(output):
            assert {"model.safetensors", "optimizer.safetensors", "config.json", "state.json"} <= {*os.listdir(folder)}
    found = losses(run("single", recipe, output, *settings))
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-3)
    assert not list(output.rglob(".*")), "what the kills left half-written is gone"
