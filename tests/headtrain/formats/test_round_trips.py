"""Export and import give the same tensors and the same drafts; files hold the published names and shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.errors import UserError
from headtrain.checkpoint import load_head
from headtrain.formats.base import NAMES, detect, load_format
from headtrain.formats.convert import export_head, import_head
from headtrain.target import Target
from tests.folders import make_target_folder
from tests.headtrain.formats.heads import drafts, make_head, save

LAYERS = 8  # deep enough for the boundaries [2, n/2, n-3]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("eagle3", "eagle3", {}),
    ("eagle3", "eagle3", {"vocabulary": None}),
    ("eagle3", "eagle3", {"own_embedding": True}),
    ("specforge", "eagle3", {"layers": [1, 3]}),
    ("specforge", "eagle3", {"fusion_norm": "each", "vocabulary": None}),
    ("sglang", "eagle3", {"layers": [1, 3, 6]}),
    ("sglang", "eagle3", {"feedback": "normed", "fusion_norm": "each"}),
    ("sglang", "eagle3", {"fusion_norm": "joint", "own_embedding": True}),
    ("speculators", "eagle3", {"layers": [0, 3, 8]}),
    ("speculators", "eagle3", {"vocabulary": None, "normed_residual": True}),
    ("speculators", "eagle3", {"feedback": "normed", "fusion_norm": "joint"}),
    ("speculators", "eagle3", {"own_embedding": True, "fusion_norm": "each"}),
    ("modelopt", "eagle3", {}),
    ("modelopt", "eagle3", {"vocabulary": None}),
    (
        "eagle3",
        "eagle3",
        {"layer": {"num_heads": 2, "intermediate": 40, "rope": {"rope_type": "default", "rope_theta": 5e5}}},
    ),
    (
        "sglang",
        "eagle3",
        {"layer": {"hidden": 24, "head_dim": 8, "eps": 1e-3}, "own_embedding": True, "lm_head": "random"},
    ),
    (
        "speculators",
        "eagle3",
        {"layer": {"num_kv_heads": 1, "rope": {"rope_type": "linear", "rope_theta": 99, "factor": 2.0}}},
    ),
    ("eagle1", "eagle1", {}),
    ("eagle1", "eagle1", {"bias": False}),
    ("medusa", "medusa", {"heads": 3}),
    ("medusa", "medusa", {"heads": 2, "own_lm_head": True}),
    ("vllm-medusa", "medusa", {"heads": 3, "layers": 2}),
    ("vllm-medusa", "medusa", {"heads": 2, "vocabulary": 30}),
    ("vllm-medusa", "medusa", {"heads": 2, "vocabulary": 30, "own_lm_head": True}),
    ("hydra", "hydra", {"heads": 3, "layers": 2, "prefix_norm": True}),
    ("hydra", "hydra", {"heads": 2, "layers": 2, "prefix": False, "own_lm_head": True}),
    ("hydra", "hydra", {"heads": 2, "layers": 1, "prefix_norm": True, "own_lm_head": True}),
    ("dflash", "dflash", {"block": 4, "decoder_layers": 2}),
    ("dflash", "dflash", {"layers": [1, 6], "block": 5, "decoder_layers": 1, "mask_token": 7}),
]
IDS = ["-".join([name, *(k if isinstance(v, dict) else f"{k}={v}" for k, v in s.items())]) for name, _, s in CASES]
GIVEN = {"sglang": "sglang"}  # norm_output does not say whose it is; see test_norm_output_means_two_things


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_target_folder(tmp_path_factory.mktemp("deep") / "target", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def target(folder) -> Target:
    return Target.load(str(folder), "float32")


@pytest.mark.parametrize(("layout", "family", "settings"), CASES, ids=IDS)
def test_round_trip(tmp_path, folder, target, layout, family, settings):
    head = make_head(family, target, **settings)
    save(head, family, target, tmp_path / "head")
    export_head(tmp_path / "head", layout, tmp_path / "export")
    found, _ = import_head(tmp_path / "export", tmp_path / "back", str(folder), GIVEN.get(layout))
    assert found.name == layout
    back = load_head(tmp_path / "back", target)
    assert back.target_layers == head.target_layers
    ours, theirs = head.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for a, b in zip(drafts(head, target), drafts(back, target), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", NAMES)
def test_exported_config_and_names_are_detected(tmp_path, target, layout):
    family, settings = next((f, s) for name, f, s in CASES if name == layout)
    save(make_head(family, target, **settings), family, target, tmp_path / "head")
    export_head(tmp_path / "head", layout, tmp_path / "export")
    tensors = load_file(tmp_path / "export" / load_format(layout).weights)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert detect(set(tensors), config, tmp_path).name == layout
    assert json.loads((tmp_path / "export" / "headtrain.json").read_text())["format"] == layout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "head"]  # nothing unfinished is left


# H 32, intermediate 48, 4 heads of 16, 2 KV heads, three features, 40 draft tokens; V comes from the tokenizer
H, INNER, Q, KV, F, VD = 32, 48, 64, 32, 96, 40


def layer(prefix: str, inputs: int = 2 * H) -> dict[str, list[int]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": [Q, inputs],
        f"{prefix}.self_attn.k_proj.weight": [KV, inputs],
        f"{prefix}.self_attn.v_proj.weight": [KV, inputs],
        f"{prefix}.self_attn.o_proj.weight": [H, Q],
        f"{prefix}.mlp.gate_proj.weight": [INNER, H],
        f"{prefix}.mlp.up_proj.weight": [INNER, H],
        f"{prefix}.mlp.down_proj.weight": [H, INNER],
        f"{prefix}.post_attention_layernorm.weight": [H],
    }


def fused(prefix: str) -> dict[str, list[int]]:
    norms = {f"{prefix}.input_layernorm.weight": [H], f"{prefix}.hidden_norm.weight": [H]}
    return {"fc.weight": [H, F], "norm.weight": [H], "lm_head.weight": [VD, H], "d2t": [VD], **layer(prefix), **norms}


def published(layout: str, vocab: int) -> dict[str, list[int]]:
    """The tables of published layouts, at this target's sizes."""
    blocks = {"weight": [H, H], "bias": [H]}
    tables: dict[str, dict[str, list[int]]] = {
        "eagle3": {**fused("midlayer"), "t2d": [vocab]},
        "specforge": {**fused("midlayer"), "t2d": [vocab]},
        "sglang": {**fused("midlayer"), "t2d": [vocab]},
        "speculators": {**fused("layers.0"), "t2d": [vocab], "embed_tokens.weight": [vocab, H]},
        "modelopt": fused("layers.0"),
        "eagle1": {"embed_tokens.weight": [vocab, H], "fc.weight": [H, 2 * H], "fc.bias": [H], **layer("layers.0", H)},
        "medusa": {
            **{f"{h}.0.linear.{kind}": shape for h in range(2) for kind, shape in blocks.items()},
            **{f"{h}.1.weight": [vocab, H] for h in range(2)},
        },
        "vllm-medusa": {
            **{f"blocks.{h}.layers.{b}.{k}": s for h in range(2) for b in range(2) for k, s in blocks.items()},
            **{f"lm_heads.{h}.weight": [30, H] for h in range(2)},
            "token_map": [30],
        },
        "dflash": {
            "fc.weight": [H, 5 * H],
            "hidden_norm.weight": [H],
            "norm.weight": [H],
            **{name: shape for i in range(2) for name, shape in layer(f"layers.{i}", H).items()},
            **{f"layers.{i}.input_layernorm.weight": [H] for i in range(2)},
            **{f"layers.{i}.self_attn.{kind}_norm.weight": [Q // 4] for i in range(2) for kind in "qk"},
        },
        "hydra": {
            **layer("prefix_embeding_layer.layers.0", H),
            "prefix_embeding_layer.layers.0.input_layernorm.weight": [H],
            "prefix_embeding_layer.norm.weight": [H],
            "prefix_embeding_layer.embed_tokens.weight": [vocab, H],
            **{
                f"hydra_mlp.{h}.1.{part}.{kind}": [H, (h + 2) * H] if kind == "weight" else [H]
                for h in range(2)
                for part in ("linear", "res_connection")
                for kind in ("weight", "bias")
            },
            **{f"hydra_mlp.{h}.3.linear.{kind}": shape for h in range(2) for kind, shape in blocks.items()},
            **{
                f"hydra_lm_head.{h}.1.{kind}": [vocab, H][: 2 - i]
                for h in range(2)
                for i, kind in enumerate(["weight", "bias"])
            },
        },
    }
    return tables[layout]


PUBLISHED: dict[str, dict[str, Any]] = {
    "medusa": {"heads": 2, "own_lm_head": True},
    "vllm-medusa": {"heads": 2, "layers": 2, "vocabulary": 30, "own_lm_head": True},
    "hydra": {"heads": 2, "layers": 2, "prefix_norm": True, "own_lm_head": True},
    "dflash": {"decoder_layers": 2},
}


@pytest.mark.parametrize("layout", NAMES)
def test_names_and_shapes_are_the_published_ones(tmp_path, target, layout):
    (family,) = load_format(layout).families
    save(make_head(family, target, **PUBLISHED.get(layout, {})), family, target, tmp_path / "head")
    export_head(tmp_path / "head", layout, tmp_path / "export")
    tensors = load_file(tmp_path / "export" / load_format(layout).weights)
    expected = published(layout, target.vocab_size)
    assert {name: list(x.shape) for name, x in tensors.items()} == expected
    if "t2d" in tensors:
        assert tensors["t2d"].dtype == torch.bool and tensors["d2t"].dtype == torch.int64


LAYER = "post_attention_layernorm.weight", "self_attn.o_proj.weight"
VICTIMS: dict[str, tuple[str, str]] = {  # one tensor to lose and one to bend
    **dict.fromkeys(("eagle3", "specforge", "sglang"), (f"midlayer.{LAYER[0]}", f"midlayer.{LAYER[1]}")),
    **dict.fromkeys(("speculators", "modelopt", "eagle1"), (f"layers.0.{LAYER[0]}", f"layers.0.{LAYER[1]}")),
    "medusa": ("0.0.linear.bias", "1.0.linear.weight"),
    "vllm-medusa": ("blocks.0.layers.0.bias", "blocks.1.layers.1.weight"),
    "hydra": ("hydra_mlp.0.1.linear.bias", "hydra_mlp.1.3.linear.weight"),
    "dflash": ("hidden_norm.weight", "layers.1.mlp.up_proj.weight"),
}


@pytest.mark.parametrize("layout", NAMES)
def test_every_missing_extra_and_misshaped_tensor_is_listed(tmp_path, folder, target, layout):
    (family,) = load_format(layout).families
    save(make_head(family, target, **PUBLISHED.get(layout, {})), family, target, tmp_path / "head")
    export_head(tmp_path / "head", layout, tmp_path / "export")
    path = tmp_path / "export" / load_format(layout).weights
    tensors, (lost, bent) = load_file(path), VICTIMS[layout]
    tensors |= {"stranger.weight": torch.ones(2), bent: tensors[bent][:-1].contiguous()}
    del tensors[lost]
    save_file(tensors, path)
    with pytest.raises(UserError) as error:
        import_head(tmp_path / "export", tmp_path / "back", str(folder), layout)
    text = str(error.value)
    parts = (f"missing {lost}", "unexpected stranger.weight", f"{bent} has shape", str(tmp_path / "export"))
    assert "\n" not in text and all(part in text for part in parts), text
    assert not (tmp_path / "back").exists()
