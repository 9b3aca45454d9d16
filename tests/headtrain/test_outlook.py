"""Sizes read from configs and files against the models themselves, and costs and profiles from where they lie."""

import json

import pytest
from transformers import AutoModelForCausalLM

from decode.errors import UserError
from headtrain.outlook import Question, _draft_size, find_costs, find_profiles, parse_count, target_sizes
from headtrain.predict import DEVICES, Measured, Profile, Roofline, predict, save_profiles
from headtrain.trainer import train
from tests.folders import make_recipe, make_target_folder

STEP_MS = {"verify": {"1": 10.0, "8": 12.0}, "commit": 1.0, "extend": {"2": 0.5}}


@pytest.fixture(scope="module")
def head_folder(target_folder, chats, tmp_path_factory):
    return train(make_recipe(target_folder, chats, tmp_path_factory.mktemp("run") / "run", steps=1, save_every=1))


def test_counts():
    assert [parse_count(text, "x") for text in ("8B", "135m", "7e9", "1.5T")] == [8e9, 135e6, 7e9, 1.5e12]
    for text in ("", "B", "-1", "nan", "inf", "8X"):
        with pytest.raises(UserError, match="x: .* is no positive number"):
            parse_count(text, "x")


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_without_weights(tied, tmp_path):
    folder = make_target_folder(tmp_path / "target", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    parameters, cache = target_sizes(str(folder), bytes_each=2)
    looked_up = 0 if tied else model.get_input_embeddings().weight.numel()
    assert parameters == sum(p.numel() for p in model.parameters()) - looked_up
    assert cache == 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, head size, bytes
    with pytest.raises(UserError, match="give --parameters and --cache-bytes"):
        target_sizes(str(tmp_path / "gone"), 2)


def test_sizes_of_a_head(head_folder, tmp_path):
    costs = find_costs(Question(head_folder, device="h100", dtype="float32"))
    assert isinstance(costs, Roofline) and costs.device == DEVICES["h100"]
    assert 0 < costs.draft_parameters < costs.parameters and costs.cache_bytes == 2 * 3 * 2 * 16 * 4
    with pytest.raises(UserError, match="cannot be read .*give --draft-parameters"):
        _draft_size(Question(tmp_path))


def test_own_devices():
    asked = Question(bandwidth=3350, tflops=989, memory=80, parameters="70B", draft_parameters="1B", dtype="float16")
    costs = find_costs(asked)
    assert 1e3 * costs.verify(1, 1, 0) == pytest.approx(41.8, abs=0.05)
    rows, warnings = predict(Profile.constant(0.8, 5), costs, depths=[5])
    assert rows[0].tokens_per_step == pytest.approx(3.68928) and "need 142.0 GB of 80.0 GB" in warnings[0]


def test_costs_as_tuned(head_folder):
    (head_folder / "tree.json").write_text(json.dumps({"sampled": {"step_ms": STEP_MS}}))
    assert find_costs(Question(head_folder)) == Measured(STEP_MS)
    (head_folder / "tree.json").write_text(json.dumps({"greedy": {}}))
    with pytest.raises(UserError, match="no step times; run `headtrain tune"):
        find_costs(Question(head_folder))
    (head_folder / "tree.json").unlink()


def test_saved_profiles_are_not_measured_again(head_folder, monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("headtrain.target.Target.load", load)
    save_profiles(head_folder, [Profile(((0.5,),), 0.0), Profile(((0.25,),), 1.0)])
    found = find_profiles(Question(head_folder, temperatures=[1.0, 0.0]), print)
    assert [profile.chain for profile in found] == [[0.25], [0.5]]
    given = find_profiles(Question(acceptance="0.7,0.5", temperatures=[0.0, 1.0]), print)
    assert [(p.temperature, p.chain) for p in given] == [(0.0, [0.7, 0.5]), (1.0, [0.7, 0.5])]
