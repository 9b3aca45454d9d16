"""Folders that are complete or absent, and heads that load strictly."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import headtrain.checkpoint as checkpoint
from decode.errors import UserError
from headtrain.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    load_head,
    prune_checkpoints,
    require_same_head,
    save_checkpoint,
    save_head,
    write_folder,
)
from headtrain.heads.base import load_family
from headtrain.target import Target
from tests.folders import make_target_folder


def make_head(target: Target, **settings):
    family = load_family("eagle3")
    torch.manual_seed(0)
    return family.build(family.Config(**{"vocabulary": None, "steps": 2, **settings}), target)


@pytest.fixture(scope="module")
def target(target_folder) -> Target:
    return Target.load(str(target_folder), "float32")


@pytest.fixture
def saved(tmp_path, target):
    folder = tmp_path / "head"
    save_head(folder, make_head(target), "eagle3", target)
    return folder


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_refused(folder, target, *parts: str) -> None:
    with pytest.raises(UserError) as error:
        load_head(folder, target)
    text = str(error.value)
    assert "\n" not in text and str(folder) in text and all(part in text for part in parts), text


def test_round_trip(saved, target):
    head, loaded = make_head(target), load_head(saved, target)
    assert loaded.target_layers == head.target_layers and not loaded.training
    for name, value in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_reduced_vocabulary_round_trip(tmp_path, target):
    family = load_family("eagle3")
    vocabulary = torch.tensor([0, 3, 7, 100, target.vocab_size - 1])
    head = family.build(family.Config(vocabulary=5, steps=2), target, vocabulary)
    save_head(tmp_path / "head", head, "eagle3", target, dtype=torch.bfloat16)
    loaded = load_head(tmp_path / "head", target)
    assert loaded.vocabulary.tolist() == vocabulary.tolist()
    assert loaded.fc.weight.dtype == torch.float32
    assert torch.equal(loaded.fc.weight, head.fc.weight.bfloat16().float())


def reduced_head(target, ids=(0, 3, 7, 100)):
    family = load_family("eagle3")
    return family.build(family.Config(vocabulary=len(ids), steps=2), target, torch.tensor(ids))


def edit_config(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    changed = {key: value for key, value in {**config, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(changed))


def test_vocabulary_of_another_head_is_refused(tmp_path, target):
    save_head(tmp_path / "head", reduced_head(target), "eagle3", target)
    save_head(tmp_path / "other", reduced_head(target, (0, 3, 8, 100)), "eagle3", target)
    kept = (tmp_path / "head" / "model.safetensors").read_bytes()
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "head" / "model.safetensors")
    assert_refused(tmp_path / "head", target, "draft vocabulary of 4 tokens", "other data")
    (tmp_path / "head" / "model.safetensors").write_bytes(kept)
    for value in (None, {}, {"size": 3, "hash": 5}, "x"):
        edit_config(tmp_path / "head", vocabulary=value)
        assert_refused(tmp_path / "head", target, "draft vocabulary")
    edit_config(tmp_path / "head", vocabulary="absent")  # as in heads of before
    assert load_head(tmp_path / "head", target).vocabulary.tolist() == [0, 3, 7, 100]


def test_resume_with_another_vocabulary_is_refused(tmp_path, target):
    head = reduced_head(target)
    save_checkpoint(tmp_path / "step-1", head, "eagle3", target, None, make_optimizer(head), {"step": 1})
    require_same_head(tmp_path / "step-1", reduced_head(target), "eagle3", target)
    other = reduced_head(target, (0, 3, 8, 100))
    with pytest.raises(UserError, match=r"^output: .*step-1: .*draft vocabulary of 4 tokens.*`output`$"):
        require_same_head(tmp_path / "step-1", other, "eagle3", target)
    edit_config(tmp_path / "step-1", vocabulary="absent")
    require_same_head(tmp_path / "step-1", other, "eagle3", target)


def test_missing_extra_and_misshaped_tensors(saved, target):
    rewrite(saved, lambda tensors: tensors.pop("norm.weight"))
    assert_refused(saved, target, "missing norm.weight")
    rewrite(saved, lambda tensors: tensors.update({"norm.weight": torch.ones(7), "stranger": torch.ones(1)}))
    assert_refused(saved, target, "unexpected stranger", "norm.weight has shape [7], expected [32]")


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_truncated_tensors(saved, target, size):
    os.truncate(saved / "model.safetensors", size)
    assert_refused(saved, target, "model.safetensors", "not a complete safetensors file")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file(saved, target, name):
    (saved / name).unlink()
    assert_refused(saved, target, f"{name} is missing")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"format": 1}', b"\xff\xfe\x00"])
def test_config_that_is_none(saved, target, text):
    (saved / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused(saved, target, "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("format", 99), ("family", "nosuch"), ("head", {"stpes": 2}), ("head", []), ("layers", "x"), ("target", 3)],
)
def test_config_with_other_values(saved, target, key, value):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(UserError) as error:
        load_head(saved, target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"hidden_size": 48}, "hidden_size"), ({"num_hidden_layers": 4}, "num_layers"), ({"vocab_size": 500}, "vocab")],
)
def test_head_of_another_target(tmp_path, saved, changes, key):
    other = Target.load(str(make_target_folder(tmp_path / "other", **changes)), "float32")
    assert_refused(saved, other, key)


def test_head_of_another_tokenizer(tmp_path, saved, target):
    folder = make_target_folder(tmp_path / "other", "llama3", vocab_size=target.vocab_size)
    assert_refused(saved, Target.load(str(folder), "float32"), "tokenizer")


def fail_at(monkeypatch, number: int) -> None:
    """The disk is full at the `number`-th file of tensors, which stays half-written."""
    real, calls = checkpoint.save_file, []

    def save_file_full(tensors, path):
        calls.append(path)
        if len(calls) == number:
            path.write_bytes(b"half")
            raise OSError(28, os.strerror(28))
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file_full)


def make_optimizer(head) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    for p in head.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("number", [1, 2])
def test_full_disk_leaves_the_old_checkpoint(tmp_path, target, monkeypatch, number):
    head = make_head(target)
    optimizer = make_optimizer(head)
    folder = tmp_path / "checkpoints" / "step-0000001"

    def save():
        save_checkpoint(folder, head, "eagle3", target, None, optimizer, {"step": 1})

    save()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    head.fc.weight.data.add_(1)
    fail_at(monkeypatch, number)
    with pytest.raises(UserError, match="No space left") as error:
        save()
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(folder.parent) == [folder.name]
    monkeypatch.undo()
    save()
    assert torch.equal(load_file(folder / "model.safetensors")["fc.weight"], head.fc.weight)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_any_failure_leaves_no_half_written_folder(tmp_path, error):
    def fill(staging):
        (staging / "a").write_text("half")
        raise error

    with pytest.raises(type(error)):
        write_folder(tmp_path / "head", fill)
    assert os.listdir(tmp_path) == []


def test_unwritable_place(tmp_path, target):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write there") as error:
        save_head(tmp_path / "file" / "head", make_head(target), "eagle3", target)
    assert "\n" not in str(error.value)


def test_checkpoint_round_trip(tmp_path, target):
    head = make_head(target)
    optimizer = make_optimizer(head)
    save_checkpoint(tmp_path / "step-1", head, "eagle3", target, None, optimizer, {"step": 1, "more": [2]})
    fresh = make_head(target)
    other = torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad], lr=1e-2)
    assert load_checkpoint(tmp_path / "step-1", fresh, other) == {"step": 1, "more": [2]}
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), fresh.parameters(), strict=True))
    expected, found = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert found.keys() == expected.keys()
    for index, entry in expected.items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(found[index][key]), torch.as_tensor(value)), (index, key)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "state.json", "model.safetensors"])
def test_damaged_checkpoint(tmp_path, target, name):
    head = make_head(target)
    optimizer = make_optimizer(head)
    save_checkpoint(tmp_path / "step-1", head, "eagle3", target, None, optimizer, {"step": 1})
    os.truncate(tmp_path / "step-1" / name, 5)
    with pytest.raises(UserError) as error:
        load_checkpoint(tmp_path / "step-1", head, optimizer)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_optimizer_of_other_parameters(tmp_path, target):
    head = make_head(target)
    optimizer = make_optimizer(head)
    save_checkpoint(tmp_path / "step-1", head, "eagle3", target, None, optimizer, {"step": 1})
    fewer = torch.optim.AdamW([head.fc.weight], lr=1e-2)
    with pytest.raises(UserError, match="optimizer"):
        load_checkpoint(tmp_path / "step-1", head, fewer)


def test_list_and_prune(tmp_path):
    for step in (1, 10, 2, 9):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step}" / "state.json").write_text("{}")
    (tmp_path / "checkpoints" / "step-11").mkdir()  # never finished: not a checkpoint
    (tmp_path / "checkpoints" / ".step-12-abc").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1", "step-2", "step-9", "step-10"]
    prune_checkpoints(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-9", "step-10"]
    assert not (tmp_path / "checkpoints" / ".step-12-abc").exists()
    shutil.rmtree(tmp_path / "checkpoints")
    assert list_checkpoints(tmp_path) == []
