"""Loading, and the target's features and logits against transformers' own forward."""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.errors import UserError
from headtrain.masks import encode
from headtrain.recipe import Recipe
from headtrain.target import Target
from headtrain.trainer import train
from tests.folders import losses, make_target_folder, recipe_dict
from tests.tiny import FAMILIES, tiny_target


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_features_and_logits(family):
    model = tiny_target(family)
    target = Target(model)
    ids = torch.randint(3, 100, (2, 30), generator=torch.Generator().manual_seed(0))
    layers = (0, 1, target.num_layers)
    features, hidden = target.features(ids, layers)
    out = model(ids, output_hidden_states=True)
    torch.testing.assert_close(features, torch.cat([out.hidden_states[b] for b in layers], -1))
    torch.testing.assert_close(hidden, out.hidden_states[-1])
    torch.testing.assert_close(target.logits(hidden), out.logits, rtol=1e-4, atol=1e-4)
    rows = torch.tensor([5, 50, 7])
    chosen = target.logits(hidden, target.lm_head_weight[rows])
    torch.testing.assert_close(chosen, out.logits[..., rows], rtol=1e-4, atol=1e-4)
    assert target.norm is not None and target.vocab_size == 101
    assert not any(p.requires_grad for p in model.parameters()) and not features.requires_grad


def test_right_padding_changes_nothing():
    target = Target(tiny_target("llama"))
    ids = torch.randint(3, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    features, hidden = target.features(ids, (1,))
    padded, others = target.features(torch.cat([ids, torch.zeros(1, 5, dtype=torch.long)], 1), (1,))
    torch.testing.assert_close(padded[:, :12], features)
    torch.testing.assert_close(others[:, :12], hidden)


def test_loads_in_the_asked_dtype(target_folder):
    assert Target.load(str(target_folder)).dtype == torch.float32  # auto: that of the checkpoint
    target = Target.load(str(target_folder), "bfloat16")
    assert target.dtype == torch.bfloat16 and not target.model.training
    assert target.tokenizer.chat_template and target.name == str(target_folder)


def test_device_map_gives_the_same_losses(tmp_path, target_folder, chats, fresh_accelerator):
    raw = recipe_dict(target_folder, chats, tmp_path / "plain", steps=3)
    train(Recipe.from_dict(raw))
    raw["target"]["device_map"], raw["output"] = "auto", str(tmp_path / "spread")
    train(Recipe.from_dict(raw))
    assert losses(tmp_path / "spread") == losses(tmp_path / "plain") and len(losses(tmp_path / "plain")) == 3


def test_device_map_reaches_transformers(target_folder, monkeypatch):
    seen = []
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *a, **k: seen.append(k["device_map"]) or load(*a, **k)
    )
    Target.load(str(target_folder), "float32")
    target = Target.load(str(target_folder), "float32", device_map="auto")
    assert seen == [None, "auto"] and target.device == torch.device("cpu")
    assert target.embedding is target.model.get_input_embeddings()  # no copy where it is at home
    assert target.lm_head_weight is target.model.get_output_embeddings().weight


def test_embedding_and_lm_head_of_another_device_are_copied_once():
    """`meta` stands for the second device: it has no numbers, but its tensors refuse to meet those of the CPU."""
    target = Target(tiny_target("llama"))
    target._home = torch.device("meta")
    assert target.device.type == "meta" and target.model.get_output_embeddings().weight.device.type == "cpu"
    assert target.embedding is target.embedding and target.embedding.weight.device.type == "meta"
    assert target.lm_head_weight is target.lm_head_weight and target.lm_head_weight.shape == (101, 32)
    features, hidden = target.features(torch.ones(1, 4, dtype=torch.long), (0, 1))
    assert features.device.type == hidden.device.type == "meta"
    assert target.logits(hidden).device.type == "meta"


def test_target_left_on_the_disk_is_refused(target_folder, monkeypatch):
    load = AutoModelForCausalLM.from_pretrained

    def offloaded(*arguments, **options):
        model, found = load(*arguments, **options)
        model.model.layers[1].to("meta")
        return model, found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", offloaded)
    with pytest.raises(UserError, match=r"^target\.device_map: .*does not fit on the devices"):
        Target.load(str(target_folder), "float32", device_map="auto")


def assert_refused(folder, *parts: str) -> None:
    with pytest.raises(UserError) as error:
        Target.load(str(folder), "float32")
    text = str(error.value)
    assert "\n" not in text and text.startswith("target.model: ") and str(folder) in text, text
    assert all(part in text for part in parts), text


def test_empty_folder(tmp_path):
    assert_refused(tmp_path, "config.json")


def test_folder_without_tokenizer(tmp_path):
    assert_refused(make_target_folder(tmp_path / "bare", style=None, vocab_size=101), "tokenizer")


def test_folder_without_weights(tmp_path):
    folder = make_target_folder(tmp_path / "light")
    (folder / "model.safetensors").unlink()
    assert_refused(folder, "cannot load")


def test_truncated_weights(tmp_path):
    folder = make_target_folder(tmp_path / "cut")
    os.truncate(folder / "model.safetensors", 1000)
    assert_refused(folder, "cannot load")


def test_weights_of_another_shape_or_missing(tmp_path):
    folder = make_target_folder(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    assert_refused(folder, "layers.3")
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    assert_refused(folder)


def test_config_that_is_not_json(tmp_path):
    folder = make_target_folder(tmp_path / "torn")
    (folder / "config.json").write_text("{")
    assert_refused(folder)


def test_tokenizer_without_chat_template(tmp_path):
    folder = make_target_folder(tmp_path / "mute")
    for path in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        if path.suffix == ".jinja":
            path.unlink(missing_ok=True)
        else:
            content = json.loads(path.read_text())
            content.pop("chat_template", None)
            path.write_text(json.dumps(content))
    target = Target.load(str(folder), "float32")
    with pytest.raises(UserError, match="no chat template"):
        encode(target.tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
