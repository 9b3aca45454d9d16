"""The best checkpoint by measured acceptance length: chosen, published, kept over a resume, and early stop."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import headtrain.trainer as trainer_module
from decode.errors import UserError
from headtrain.best import Best, publish_best, read_best, resume_best, save_best
from headtrain.checkpoint import list_checkpoints, load_head
from headtrain.recipe import Recipe
from headtrain.target import Target
from headtrain.trainer import train
from tests.folders import read_log, recipe_dict


def test_the_earlier_of_equals_stays_and_misses_are_counted():
    best = Best()
    assert [best.judge(step, figure) for step, figure in ((1, 1.5), (2, 1.5), (3, 1.4), (4, 1.6))] == [1, 0, 0, 1]
    assert (best.step, best.acceptance_length, best.misses, best.evaluations) == (4, 1.6, 0, 4)
    best.judge(5, 1.0)
    assert best.exhausted(1) and not best.exhausted(2) and not best.exhausted(None)
    assert Best(**json.loads(json.dumps(best.state()))) == best


def test_folder_of_the_best(tmp_path):
    best = Best(step=3, acceptance_length=1.25, evaluations=2)
    save_best(tmp_path / "best", best, lambda folder: (folder / "weights").write_text("3") and None)
    assert publish_best(tmp_path / "best", tmp_path / "head") == read_best(tmp_path / "head") == (3, 1.25)
    assert (tmp_path / "head" / "weights").read_text() == "3"
    assert resume_best(tmp_path / "best", best.state(), saved=True) == best
    resume_best(tmp_path / "best", {}, saved=True)
    assert not (tmp_path / "best").exists(), "what another run left"
    with pytest.raises(UserError, match=r"best head .* eval\.choose=last"):
        resume_best(tmp_path / "best", best.state(), saved=True)


def run(target_folder, chats, folder, monkeypatch, figures, steps=6, **evaluation):
    """Trains with an evaluation each step that measures `figures[step - 1]`; returns lines of evaluations."""
    calls = []

    def measure(head, target, config):
        last = next(reversed(read_log(folder)), {"step": 0})["step"]
        calls.append(last)
        return {"acceptance_length": figures[last - 1], "acceptance_by_depth": [0.5]}

    monkeypatch.setattr(trainer_module, "quick_acceptance", measure)
    raw = recipe_dict(target_folder, chats, folder, steps=steps, keep=20)
    raw["eval"] = {"prompts": str(chats), "every": 1, **evaluation}
    train(Recipe.from_dict(raw))
    return [line for line in read_log(folder) if "acceptance_length" in line]


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(a, b) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("choose, step", [("best", 4), (None, 4), ("last", 6)])
def test_the_chosen_head_is_published(tmp_path, target_folder, chats, monkeypatch, fresh_accelerator, choose, step):
    lines = run(target_folder, chats, tmp_path, monkeypatch, [1.1, 1.0, 1.2, 1.5, 1.4, 1.5], choose=choose)
    assert [line["best_step"] for line in lines] == [1, 1, 3, 4, 4, 4]
    for done in (4, 6):  # the other one is the negative control
        expected = weights(tmp_path / "checkpoints" / f"step-{done:07d}")
        assert same(weights(tmp_path / "head"), expected) == (done == step)
    assert (tmp_path / "best").exists() == (choose != "last")
    assert (tmp_path / "curves.png").exists()
    load_head(tmp_path / "head", Target.load(str(target_folder), "float32"))


def test_early_stop_and_resume_go_on_as_an_unbroken_run(
    tmp_path, target_folder, chats, monkeypatch, fresh_accelerator, capsys
):
    figures = [1.1, 1.4, 1.3, 1.2, 1.35, 1.0, 9.0, 9.0]
    whole = run(target_folder, chats, tmp_path / "whole", monkeypatch, figures, steps=8, patience=4)
    assert [line["step"] for line in whole] == [1, 2, 3, 4, 5, 6], "four evaluations behind step 2"
    assert "of step 2, acceptance length 1.400, the best of 6 evaluations" in capsys.readouterr().err
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", cut)
    for folder in list_checkpoints(cut)[2:] + [cut / "head"]:  # killed behind step 4
        shutil.rmtree(folder)
    assert run(target_folder, chats, cut, monkeypatch, figures, steps=8, patience=4) == whole
    assert same(weights(cut / "head"), weights(tmp_path / "whole" / "head"))
    again = run(target_folder, chats, cut, monkeypatch, figures, steps=8, patience=4)
    assert again == whole, "a run that stopped early is only published again"
    assert same(weights(cut / "head"), weights(tmp_path / "whole" / "head"))


@pytest.mark.parametrize("evaluation, words", [({"choose": "best"}, "eval.choose"), ({"patience": 2}, "eval.patience")])
def test_options_that_need_prompts(tmp_path, target_folder, chats, evaluation, words):
    with pytest.raises(UserError, match=words):
        Recipe.from_dict({**recipe_dict(target_folder, chats, tmp_path), "eval": evaluation})
