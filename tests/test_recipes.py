from pathlib import Path

import pytest

from decode.errors import UserError
from headtrain import checkpoint, trainer
from headtrain.data import build_dataset
from headtrain.recipe import load_recipe
from headtrain.target import Target
from tests.folders import losses, make_target_folder

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """As many layers and tokens as the recipes speak of, but narrow."""
    folder = tmp_path_factory.mktemp("deep") / "target"
    return make_target_folder(folder, num_hidden_layers=30, vocab_size=8200, hidden_size=16, intermediate_size=16)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_builds_a_head(path, deep, chats, tmp_path):
    recipe = load_recipe(path, [f"target.model={deep}", f"data.train={chats}", f"output={tmp_path}"])
    target = Target.load(recipe.target.model, recipe.target.dtype)
    dataset = build_dataset(recipe.data, target.tokenizer, progress=False)
    head = trainer.build_head(recipe, target, dataset)
    assert all(0 <= layer <= target.num_layers for layer in head.target_layers)
    size = getattr(recipe.head.config, "vocabulary", None)
    assert head.vocabulary is None if size is None else len(head.vocabulary) == size


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_opens_with_its_command(path):
    opening = [line for line in path.read_text().splitlines()[:6] if line.startswith("#")]
    assert any(f"train.py recipes/{path.name}" in line for line in opening)


def test_a_key_that_is_not_there_is_refused(deep, chats):
    with pytest.raises(UserError, match="unknown key"):
        load_recipe(RECIPES[0], [f"target.model={deep}", f"data.train={chats}", "head.hats=3"])


@pytest.mark.parametrize("head", [None, "{family: medusa, heads: 2}"])
def test_debug_trains(head, target_folder, chats, tmp_path, fresh_accelerator):
    overrides = [f"target.model={target_folder}", f"data.train={chats}", f"output={tmp_path / 'run'}"]
    overrides += [] if head is None else [f"head={head}"]
    folder = trainer.train(load_recipe(RECIPES[0].with_name("debug.yaml"), overrides))
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4]
    checkpoint.load_head(folder, Target.load(str(target_folder), "float32"))
