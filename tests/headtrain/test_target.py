"""Loading, and the target's features and logits against transformers' own forward."""

import json
import os

import pytest
import torch

from decode.errors import UserError
from headtrain.masks import encode
from headtrain.target import Target
from tests.folders import make_target_folder
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
