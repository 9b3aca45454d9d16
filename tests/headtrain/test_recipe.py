import subprocess
import sys

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from decode.errors import UserError
from headtrain import recipe as recipe_module
from headtrain.heads import base
from headtrain.recipe import (
    DataConfig,
    EvalConfig,
    Recipe,
    Section,
    TargetConfig,
    TrackingConfig,
    TrainConfig,
    load_recipe,
)


class FakeConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    num_heads: int = 3
    rates: tuple[float, ...] = (0.5,)
    layers: int | str = "auto"


class Fake:
    Config = FakeConfig


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "families", lambda: ["fake", "other"])
    monkeypatch.setattr(base, "load_family", lambda name: Fake)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "r.yaml").write_text(GOOD)
    return tmp_path


GOOD = """
target: {model: model}
head:
  family: fake
  rates: [0.25, 1]
data:
  train: chats.jsonl
train:
  learning_rate: 1e-3
  precision: no
output: runs/x
"""


def error_of(*overrides, text=None, path="r.yaml") -> str:
    if text is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    with pytest.raises(UserError) as error:
        load_recipe(path, overrides)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message, message
    return message


def test_sections_and_defaults():
    recipe = load_recipe("r.yaml")
    assert recipe.target == TargetConfig(model="model")
    assert (recipe.head.family, recipe.head.config) == ("fake", FakeConfig(rates=(0.25, 1.0)))
    assert recipe.data == DataConfig(train=("chats.jsonl",)) and recipe.data.max_length == 2048
    assert recipe.train == TrainConfig(epochs=1, learning_rate=1e-3, precision="no")
    assert (recipe.eval, recipe.tracking, recipe.output) == (EvalConfig(), TrackingConfig(), "runs/x")


def test_numbers_and_words_follow_yaml_1_2():
    assert load_recipe("r.yaml", ["train.learning_rate=2e-4"]).train.learning_rate == 2e-4
    assert load_recipe("r.yaml", ["train.learning_rate=1"]).train.learning_rate == 1.0
    assert load_recipe("r.yaml", ["tracking.name=no"]).tracking.name == "no"
    assert load_recipe("r.yaml", ["tracking.name=12:30"]).tracking.name == "12:30"
    assert load_recipe("r.yaml", ["tracking.name=2024-01-02"]).tracking.name == "2024-01-02"
    assert load_recipe("r.yaml", ["tracking.name='1e3'"]).tracking.name == "1e3"
    assert load_recipe("r.yaml", ["data.seed=0x10"]).data.seed == 16


def test_overrides():
    recipe = load_recipe("r.yaml", ["data.train=[chats.jsonl, org/name:train]", "head.num_heads=5", "train.steps=7"])
    assert recipe.data.train == ("chats.jsonl", "org/name:train")
    assert recipe.head.config.num_heads == 5 and (recipe.train.steps, recipe.train.epochs) == (7, None)
    assert load_recipe("r.yaml", ["tracking.wandb=true"]).tracking.wandb is True
    assert load_recipe("r.yaml", ["train.clip_norm="]).train.clip_norm is None
    assert load_recipe("r.yaml", ["tracking.name=a=b"]).tracking.name == "a=b"
    assert load_recipe("r.yaml", ["eval={prompts: prompts.jsonl, every: 5}"]).eval.every == 5
    assert load_recipe("r.yaml", ["data.seed=1", "data.seed=2"]).data.seed == 2


def test_empty_section_keeps_its_defaults(folder):
    (folder / "r.yaml").write_text(GOOD + "eval:\ntracking:\n")
    assert load_recipe("r.yaml").eval == EvalConfig()
    assert load_recipe("r.yaml", ["tracking.wandb=true"]).tracking.wandb


def test_save_is_the_resolved_recipe(folder):
    recipe = load_recipe("r.yaml", ["tracking.name=no", "data.template_kwargs={enable_thinking: false, date: '1e3'}"])
    recipe.save("saved.yaml")
    assert load_recipe("saved.yaml") == recipe
    plain = yaml.safe_load((folder / "saved.yaml").read_text())
    assert plain["head"] == {"family": "fake", "num_heads": 3, "rates": [0.25, 1.0], "layers": "auto"}
    assert set(plain["train"]) == set(TrainConfig.model_fields)
    assert sorted(path.name for path in folder.glob(".*")) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(st.characters(codec="utf-8"), max_size=12),
    rate=st.floats(1e-12, 1e3),
    seed=st.integers(-(2**40), 2**40),
)
def test_every_value_survives_saving(name, rate, seed):
    raw = yaml.safe_load(GOOD) | {"tracking": {"name": name}, "train": {"learning_rate": rate, "seed": seed}}
    recipe = Recipe.from_dict(raw)
    recipe.save("saved.yaml")
    assert load_recipe("saved.yaml") == recipe


def test_save_leaves_nothing_half_written(folder, monkeypatch):
    recipe = load_recipe("r.yaml")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recipe_module.os, "fsync", full)
    with pytest.raises(UserError, match="saved.yaml: cannot write the recipe .No space left"):
        recipe.save("saved.yaml")
    monkeypatch.undo()
    assert not (folder / "saved.yaml").exists() and not list(folder.glob(".saved*"))
    with pytest.raises(UserError, match="cannot write the recipe"):
        recipe.save(folder / "absent" / "saved.yaml")


def test_values_do_not_change():
    recipe = load_recipe("r.yaml")
    with pytest.raises(Exception, match="frozen"):
        recipe.train.steps = 3


BAD_VALUES = {
    "trian.steps=3": "trian (from the command line): unknown key, found {'steps': 3}; did you mean train?",
    "train.lerning_rate=3": "train.lerning_rate (from the command line): unknown key, found 3; did you mean train.le",
    "data.batch_tokens=3": "unknown key, found 3; did you mean train.batch_tokens?",
    "tracking.zzz=3": "unknown key, found 3; valid keys are wandb, tensorboard, trackio, project, name",
    "train.learning_rate=fast": "train.learning_rate (from the command line): should be a valid number, found 'fast'",
    "train.learning_rate=0": "train.learning_rate (from the command line): should be greater than 0, found 0",
    "train.learning_rate=.inf": "should be a finite number, found inf",
    "train.steps=true": "train.steps (from the command line): should be a valid integer, found True",
    "train.steps=1.5": "train.steps (from the command line): should be a valid integer",
    "train.decay=cosin": "should be 'cosine', 'linear' or 'constant', found 'cosin'; did you mean cosine?",
    "train.betas=[0.9]": "train.betas[1] (from the command line): missing",
    "train.warmup=2.5": "train.warmup (from the command line): should be whole steps, or a share below 1, found 2.5",
    "train=3": "train (from the command line): should be a section with keys, found 3",
    "tracking.wandb=yes": "should be a valid boolean, found 'yes'",
    "data.train=[]": "data.train (from the command line): ",
    "data.train=[{a: 1}]": "data.train[0] (from the command line): should be a valid string, found {'a': 1}",
    "data.train=": "data.train (from the command line): should be text or a list of texts, found None",
    "data.train.x=3": "the override 'data.train.x=3' goes below data.train, which is 'chats.jsonl', not a section",
    "output=": "output (from the command line): should be a valid string, found None",
    "steps": "the override 'steps' is not key=value",
    "=3": "the override '=3' is not key=value",
    "train..steps=3": "the override 'train..steps=3' is not key=value",
    "train.steps=[": "the override 'train.steps=[' line 1: not valid YAML",
    "head.family=fale": "head.family (from the command line): unknown family, found 'fale'; did you mean fake?",
    "head.family=": "head.family (from the command line): missing; choose one of fake, other",
    "head=fake": "head (from the command line): should be a section with the key family, found 'fake'",
    "head.num_head=3": "head.num_head (from the command line): unknown key, found 3; did you mean head.num_heads?",
    "head.num_heads=x": "head.num_heads (from the command line): should be a valid integer",
    "head.rates=[1, x]": "head.rates[1] (from the command line): should be a valid number",
    "head.layers=[1]": "head.layers (from the command line): should be a valid integer, found [1] (and 1 more)",
    "data.train=[chats.jsonl, gone.jsonl]": "data.train (from the command line): no such file: gone.jsonl",
    "data.train=data/gone.jsonl": "no such file: data/gone.jsonl",
    "data.eval=gone": "data.eval (from the command line): no such file: gone",
    "eval.prompts=gone.jsonl": "eval.prompts (from the command line): no such file: gone.jsonl",
    "target.model=gone": "target.model (from the command line): no such folder: gone",
    "target.model=chats.jsonl": "target.model (from the command line): chats.jsonl is a file",
    "target.model=": "target.model (from the command line): should be a valid string",
    "output=chats.jsonl": "output (from the command line): chats.jsonl is a file",
}


@pytest.mark.parametrize("override", BAD_VALUES)
def test_bad_values(override):
    assert BAD_VALUES[override] in error_of(override)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["train.epochs=2", "train.steps=3"], ["train.epochs", "train.steps"]),
        (["train.steps=3", "train.warmup=5"], ["train.warmup", "train.steps"]),
        (["eval.every=5"], ["eval.every", "eval.prompts"]),
        (["target.revision=main"], ["target.revision", "target.model"]),
        (["data.eval=chats.jsonl"], ["data.eval", "data.train"]),
    ],
)
def test_contradictions_name_both_keys(overrides, names):
    message = error_of(*overrides)
    assert all(name in message for name in names)


BAD_FILES = {
    "empty": ("", "the recipe is empty"),
    "comments": ("# nothing\n", "the recipe is empty"),
    "a list": ("- target\n", "expected sections such as target, head and data, found ['target']"),
    "syntax": ("target:\n  model: model\n data: [\n", "r.yaml line 3: not valid YAML"),
    "tab": ("target:\n\tmodel: x\n", "r.yaml line 2: not valid YAML"),
    "twice": (
        "output: a\ntarget: {model: x}\noutput: b\n",
        "r.yaml line 3: not valid YAML: the key output appears twice",
    ),
    "twice below": ("train:\n  steps: 3\n  steps: 4\n", "r.yaml line 3: not valid YAML: the key steps appears twice"),
    "tag": ("target: !!python/object:os.system {}\n", "r.yaml line 1: not valid YAML"),
    "list as key": ("? [a]\n: 1\n", "r.yaml line 1: not valid YAML"),
    "no data": ("target: {model: model}\nhead: {family: fake}\noutput: x\n", "data: missing; add it to the recipe"),
    "no head": ("target: {model: model}\ndata: {train: chats.jsonl}\noutput: x\n", "head: missing"),
    "typo explains": (
        GOOD.replace("target:", "tarqet:"),
        "tarqet: unknown key, found {'model': 'model'}; did you mean target?",
    ),
    "number as key": (GOOD + "1: 2\n", "r.yaml: 1: unknown key, found 2"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case):
    text, message = BAD_FILES[case]
    assert message in error_of(text=text)


def test_unreadable_files(folder):
    assert "no such recipe; give the path of a YAML file, such as recipe.yaml" not in error_of(path="gone.yaml")
    (folder / "tiny-fake.yaml").write_text(GOOD)
    assert "such as tiny-fake.yaml" in error_of(path="tiny-fale.yaml")
    assert "is a folder" in error_of(path="model")
    (folder / "latin.yaml").write_bytes(b"output: \xff\n")
    assert "is not UTF-8" in error_of(path="latin.yaml")


def test_paths_of_another_machine_can_be_left_unchecked():
    raw = yaml.safe_load(GOOD) | {"target": {"model": "elsewhere"}, "train": {}}
    with pytest.raises(UserError, match="target.model: no such folder"):
        Recipe.from_dict(raw)
    assert Recipe.from_dict(raw, check_paths=False).target.model == "elsewhere"


def test_hub_names_are_left_to_the_loader():
    recipe = load_recipe(
        "r.yaml", ["target.model=org/some-model", "target.revision=v1", "data.train=org/name/config:split"]
    )
    assert recipe.target.model == "org/some-model"


def test_anchors_and_merge_keys_work(folder):
    text = GOOD.replace(
        "train:\n  learning_rate", "eval: &e\n  limit: 3\ntracking:\n  project: p\ntrain:\n  learning_rate"
    )
    (folder / "r.yaml").write_text(text.replace("eval: &e", "eval:\n  <<: {limit: 4}"))
    assert load_recipe("r.yaml").eval.limit == 3


def test_each_field_has_one_line():
    sections = [item for item in vars(recipe_module).values() if isinstance(item, type) and issubclass(item, Section)]
    assert len(sections) == 9
    for section in sections:
        for name, field in section.model_fields.items():
            assert field.description and "\n" not in field.description, f"{section.__name__}.{name}"


def test_recipe_loads_no_torch():
    code = "import sys, headtrain.recipe; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    root = recipe_module.__file__.rsplit("/", 2)[0]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
