"""The log of a run, and what a resumed one does with its lines."""

import json

import pytest

from decode.errors import UserError
from headtrain.recipe import Recipe, TrackingConfig
from headtrain.tracking import Tracker, flatten, tracker_names
from headtrain.trainer import train
from tests.folders import losses, recipe_dict


class Accelerator:
    def __init__(self, main: bool = True):
        self.is_main_process, self.logged, self.ended = main, [], False

    def log(self, numbers, step):
        self.logged.append((step, numbers))

    def end_training(self):
        self.ended = True


def test_lines_and_other_trackers(tmp_path):
    accelerator = Accelerator()
    tracker = Tracker(tmp_path, accelerator, 0)
    tracker.log({"loss": 1.5, "acceptance": [0.5, 0.25]}, 3)
    line = (tmp_path / "log.jsonl").read_text()
    assert json.loads(line) == {"step": 3, "loss": 1.5, "acceptance": [0.5, 0.25]} and line.endswith("\n")
    assert accelerator.logged == [(3, {"loss": 1.5, "acceptance/0": 0.5, "acceptance/1": 0.25})]
    tracker.close()
    assert accelerator.ended


def test_only_the_main_process_writes(tmp_path):
    tracker = Tracker(tmp_path, Accelerator(main=False), 0)
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert not (tmp_path / "log.jsonl").exists()


def test_resuming_drops_later_and_torn_lines(tmp_path):
    lines = [json.dumps({"step": step, "loss": 0.0}) for step in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, "3", "[]", '{"x": 1}', '{"step": null}', '{"step": 2, "lo']))
    tracker = Tracker(tmp_path, Accelerator(), 2)
    tracker.log({"loss": 1.0}, 3)
    tracker.close()
    found = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert found == [{"step": 1, "loss": 0.0}, {"step": 2, "loss": 0.0}, {"step": 3, "loss": 1.0}]


def test_a_fresh_run_starts_an_empty_log(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')
    Tracker(tmp_path, Accelerator(), 0).close()
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_log_that_cannot_be_written(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(UserError, match="log.jsonl"):
        Tracker(tmp_path, Accelerator(), 0)


def test_full_disk_while_logging(tmp_path):
    tracker = Tracker(tmp_path, Accelerator(), 0)
    tracker.file.close()
    tracker.file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(UserError, match="No space left"):
        tracker.log({"loss": 1.0}, 1)


def test_trackers_by_name(monkeypatch):
    assert tracker_names(TrackingConfig()) == []
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    with pytest.raises(UserError, match="pip install trackio"):
        tracker_names(TrackingConfig(trackio=True))


def test_flatten():
    assert flatten({"a": 1.0, "b": [2.0, 3.0], "c": []}) == {"a": 1.0, "b/0": 2.0, "b/1": 3.0}


def test_wandb_without_login(monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"tracking\.wandb: no account .* WANDB_MODE=offline"):
        tracker_names(TrackingConfig(wandb=True))
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert tracker_names(TrackingConfig(wandb=True)) == ["wandb"]


def test_files_of_offline_trackers(monkeypatch, tmp_path, target_folder, chats, fresh_accelerator):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    wandb.teardown()  # it remembers the environment of its first use in this process
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    raw = recipe_dict(target_folder, chats, tmp_path, steps=3)
    raw["tracking"] = {"wandb": True, "tensorboard": True}
    train(Recipe.from_dict(raw))
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"learning_rate" in content and b"acceptance/1" in content
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = tmp_path.rglob("events.out.tfevents.*")
    scalars = EventAccumulator(str(events)).Reload().Scalars("loss")
    assert {event.step: event.value for event in scalars} == pytest.approx(losses(tmp_path), rel=1e-5)
