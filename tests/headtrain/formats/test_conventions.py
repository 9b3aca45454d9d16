"""Conventions that break silently where they are not converted, and the refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.errors import UserError
from headtrain.checkpoint import load_head
from headtrain.formats.convert import export_head, import_head
from headtrain.formats.outline import outline, rope_keys, rope_of
from headtrain.heads.base import Batch, load_family
from headtrain.target import Target
from tests.folders import make_target_folder
from tests.headtrain.formats.heads import drafts, make_head, save

LAYERS = 8
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_target_folder(tmp_path_factory.mktemp("deep") / "target", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def target(folder) -> Target:
    return Target.load(str(folder), "float32")


@pytest.fixture
def exported(tmp_path, target):
    """A function: a random head in a layout, its folder."""

    def make(layout: str, family: str = "eagle3", **settings: Any) -> Path:
        save(make_head(family, target, **settings), family, target, tmp_path / "head")
        export_head(tmp_path / "head", layout, tmp_path / "export")
        return tmp_path / "export"

    return make


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change(folder: Path, **keys: Any) -> None:
    """Set keys of config.json; None removes one."""
    config = {**read(folder), **keys}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_tensors(folder: Path, edit, name: str = "model.safetensors") -> None:
    tensors = load_file(folder / name)
    edit(tensors)
    save_file({k: x.contiguous() for k, x in tensors.items()}, folder / name)


def refused(source: Path, target: Path, *parts: str, **options: Any) -> str:
    out = source.parent / "refused"
    with pytest.raises(UserError) as error:
        import_head(source, out, str(target), **options)
    text = str(error.value)
    assert "\n" not in text and not out.exists() and all(part in text for part in parts), text
    return text


def layers_of(source: Path, target: Path, **options: Any) -> list[int]:
    out = source.parent / "imported"
    import_head(source, out, str(target), **options)
    layers = read(out)["layers"]
    shutil.rmtree(out)
    return layers


# auxiliary layers


@pytest.mark.parametrize("layout", ["sglang", "specforge", "modelopt"])
def test_nested_ids_count_outputs(exported, folder, layout):
    source = exported(layout, layers=[1, 3, 6])
    config = read(source)
    assert config["eagle_config"][IDS] == [0, 2, 5]
    assert config.get(IDS) == ([1, 3, 6] if layout == "sglang" else None)  # the key of vLLM counts inputs
    change(source, eagle_config={**config["eagle_config"], IDS: [1, 4, 6]}, **{IDS: None})
    assert layers_of(source, folder, layout=layout) == [2, 5, 7]


def test_speculators_ids_count_inputs(exported, folder):
    source = exported("speculators", layers=[1, 3, 6])
    assert read(source)[IDS] == [1, 3, 6]
    change(source, **{IDS: [2, 5, 8]})
    assert layers_of(source, folder) == [2, 5, 8]


@pytest.mark.parametrize("layout", ["eagle3", "specforge", "sglang", "speculators"])
def test_absent_ids_mean_early_middle_and_late(exported, folder, layout):
    source = exported(layout)
    change(source, eagle_config=None, **{IDS: None})
    assert layers_of(source, folder, layout=layout) == [2, 4, 5]


def test_disagreeing_ids_and_wrong_numbers_are_refused(exported, folder):
    source = exported("sglang", layers=[1, 3, 6])
    change(source, **{IDS: [0, 2, 5]})
    refused(source, folder, "other layers", layout="sglang")
    for ids, part in (
        ([1, 3], "fuses 3"),
        ([3, 1, 6], "not ascending"),
        ([1, 3, 9], "not ascending"),
        ("x", "expected a list"),
    ):
        change(source, eagle_config=None, **{IDS: ids})
        refused(source, folder, part, layout="sglang")


def test_final_state_is_no_layers_output(tmp_path, target):
    save(make_head("eagle3", target, layers=[2, 4, LAYERS]), "eagle3", target, tmp_path / "head")
    for layout in ("sglang", "specforge", "modelopt"):
        with pytest.raises(UserError, match=f"boundary {LAYERS}.*final norm"):
            export_head(tmp_path / "head", layout, tmp_path / "export")
    with pytest.raises(UserError, match=r"boundaries \[2, 4, 8\]: its reader takes \[2, 4, 5\]"):
        export_head(tmp_path / "head", "eagle3", tmp_path / "export")
    (warning,) = export_head(tmp_path / "head", "speculators", tmp_path / "export")
    assert "before that norm" in warning


# the map of the draft vocabulary


@pytest.mark.parametrize("layout", ["eagle3", "specforge", "sglang", "speculators", "modelopt"])
def test_map_is_an_offset(tmp_path, exported, target, layout):
    tensors = load_file(exported(layout) / "model.safetensors")
    ids = load_head(tmp_path / "head", target).vocabulary
    assert torch.equal(tensors["d2t"] + torch.arange(40), ids)
    if "t2d" in tensors:
        assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)


def absolute(tensors):
    tensors["d2t"] += torch.arange(40)


def permuted(tensors):
    ids = (tensors["d2t"] + torch.arange(40)).roll(1)
    tensors["d2t"] = ids - torch.arange(40)


def unwritten(tensors):
    tensors["d2t"].zero_()
    tensors["t2d"].fill_(True)


def contiguous(tensors):
    tensors["d2t"].zero_()
    tensors["t2d"].zero_()[:40] = True


BROKEN = {
    "absolute": (absolute, "ids instead of offsets"),
    "permuted": (permuted, "not ascending ids"),
    "unwritten": (unwritten, "t2d marks"),
    "contiguous": (contiguous, "all zeros"),
    "shifted": (lambda t: t.update(t2d=t["t2d"].roll(1)), "disagree"),
    "marked": (lambda t: t["t2d"].logical_not_(), "disagree"),
    "lost": (lambda t: t.pop("d2t"), "missing d2t"),
    "lost marks": (lambda t: t.pop("t2d"), "missing t2d"),
    "short": (lambda t: t.update(d2t=t["d2t"][1:]), "d2t has shape [39]"),
    "rows": (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][1:]}), "draft_vocab_size is 40"),
    "no lm_head": (lambda t: t.pop("lm_head.weight"), "missing lm_head.weight"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_maps_are_refused(exported, folder, broken):
    source = exported("speculators")
    edit, part = BROKEN[broken]
    change_tensors(source, edit)
    refused(source, folder, part)


def test_token_map_holds_ids_in_any_order(tmp_path, exported, folder, target):
    source = exported("vllm-medusa", "medusa", heads=2, vocabulary=30, own_lm_head=True)
    head = load_head(tmp_path / "head", target)
    assert torch.equal(load_file(source / "model.safetensors")["token_map"], head.vocabulary)
    order = torch.randperm(30)

    def shuffle(tensors):
        for name in ("token_map", "lm_heads.0.weight", "lm_heads.1.weight"):
            tensors[name] = tensors[name][order]

    change_tensors(source, shuffle)
    import_head(source, tmp_path / "back", str(folder))
    back = load_head(tmp_path / "back", target)
    assert torch.equal(back.vocabulary, head.vocabulary)
    assert all(torch.equal(a, b) for a, b in zip(drafts(head, target), drafts(back, target), strict=True))
    change_tensors(source, lambda t: t["token_map"].fill_(3))
    refused(source, folder, "token_map")


# norms, biases, embeddings


def test_norm_output_means_two_things(exported, folder, target):
    source = exported("sglang", feedback="normed")
    assert read(source)["norm_output"] is True
    refused(source, folder, str(source), "--format sglang", "--format specforge")
    for layout, feedback in (("sglang", "normed"), ("specforge", "raw")):
        import_head(source, source.parent / layout, str(folder), layout)
        assert read(source.parent / layout)["head"]["feedback"] == feedback
    a, b = (drafts(load_head(source.parent / name, target), target) for name in ("sglang", "specforge"))
    assert torch.equal(a[0], b[0]) and not torch.allclose(a[1], b[1])  # step 0 cannot tell them apart
    change(source, norm_output=False)
    refused(source, folder, "no norm in front of lm_head", layout="specforge")


def test_speculators_writes_every_flag(exported, folder):
    source = exported("speculators", normed_residual=True)
    flags = {key: read(source)[key] for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    assert flags == {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    change(source, norm_before_residual=None)
    refused(source, folder, "norm_before_residual is absent")
    change(source, norm_before_residual=False, fc_norm=True, norm_before_fc=True)
    refused(source, folder, "exclude each other")


INEXPRESSIBLE = [
    ("eagle3", "eagle3", {"feedback": "normed"}, "feedback"),
    ("eagle3", "eagle3", {"fusion_norm": "each"}, "fusion_norm"),
    ("specforge", "eagle3", {"feedback": "normed"}, "feedback"),
    ("specforge", "eagle3", {"fusion_norm": "joint"}, "fusion_norm"),
    ("sglang", "eagle3", {"normed_residual": True}, "normed_residual"),
    ("modelopt", "eagle3", {"fusion_norm": "each"}, "fusion_norm"),
    ("eagle1", "eagle1", {"vocabulary": 30}, "draft vocabulary"),
    ("medusa", "medusa", {"vocabulary": 30}, "draft vocabulary"),
    ("medusa", "medusa", {"layers": 2}, "shared module"),
    ("hydra", "hydra", {"vocabulary": 30, "prefix": False}, "draft vocabulary"),
    ("hydra", "hydra", {"layers": 2}, "without its final norm"),
    ("hydra", "hydra", {"layers": 3, "prefix": False}, "shared module"),
    ("speculators", "medusa", {}, "family medusa"),
    ("medusa", "eagle3", {}, "family eagle3"),
    ("specforg", "eagle3", {}, "did you mean 'specforge'"),
]


@pytest.mark.parametrize(("layout", "family", "settings", "part"), INEXPRESSIBLE)
def test_what_a_layout_cannot_express_is_refused(tmp_path, target, layout, family, settings, part):
    save(make_head(family, target, **settings), family, target, tmp_path / "head")
    with pytest.raises(UserError) as error:
        export_head(tmp_path / "head", layout, tmp_path / "export")
    text = str(error.value)
    assert part in text and "--format" in text and "\n" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_embedding_of_the_target_is_saved_only_on_request(tmp_path, exported, folder, target):
    source = exported("sglang")
    assert "embed_tokens.weight" not in load_file(source / "model.safetensors")
    export_head(tmp_path / "head", "sglang", tmp_path / "with", embedding=True)
    saved = load_file(tmp_path / "with" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(saved, target.embedding.weight)
    import_head(tmp_path / "with", tmp_path / "back", str(folder), "sglang")
    assert read(tmp_path / "back")["head"]["own_embedding"] is False
    change_tensors(tmp_path / "with", lambda t: t["embed_tokens.weight"].mul_(1.5))
    import_head(tmp_path / "with", tmp_path / "own", str(folder), "sglang")
    assert read(tmp_path / "own")["head"]["own_embedding"] is True
    a, b = (drafts(load_head(tmp_path / name, target), target) for name in ("back", "own"))
    # the norm of the embedding undoes a factor, all but its epsilon
    assert torch.allclose(a[0], b[0], atol=1e-3)
    change_tensors(tmp_path / "with", lambda t: t["embed_tokens.weight"].copy_(t["embed_tokens.weight"].roll(1, 0)))
    import_head(tmp_path / "with", tmp_path / "rolled", str(folder), "sglang")
    assert not torch.allclose(a[0], drafts(load_head(tmp_path / "rolled", target), target)[0], atol=1e-3)


def test_tied_config_is_refused(exported, folder):
    source = exported("sglang")
    change(source, tie_word_embeddings=True)
    refused(source, folder, "tie_word_embeddings", layout="sglang")


def test_bias_of_fc(exported, folder):
    source = exported("eagle1", "eagle1")
    assert read(source)["bias"] is True
    change(source, bias=False)
    refused(source, folder, "bias is False, but fc.bias is there")
    change_tensors(source, lambda t: t.pop("fc.bias"))
    change(source, bias=None)
    import_head(source, source.parent / "back", str(folder))
    assert read(source.parent / "back")["head"]["bias"] is False
    change_tensors(source, lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    refused(source, folder, "q_proj.bias", "attention with biases")


def test_bias_of_eagle3_is_refused(exported, folder):
    source = exported("specforge")
    change_tensors(source, lambda t: t.update({"fc.bias": torch.zeros(32)}))
    refused(source, folder, "fc.bias")


def test_vllm_drops_biases_unless_told(exported, folder, tmp_path, target):
    source = exported("vllm-medusa", "medusa", heads=2)
    assert read(source)["medusa_fc_bias"] is True and read(source)["original_lm_head"] is True
    change(source, medusa_fc_bias=None)
    refused(source, folder, "medusa_fc_bias is False, but biases are there")
    change_tensors(source, lambda t: [t.pop(name) for name in list(t) if name.endswith("bias")])
    import_head(source, tmp_path / "back", str(folder))
    assert not load_head(tmp_path / "back", target).state_dict()["0.0.linear.bias"].any()
    change_tensors(source, lambda t: t["lm_heads.0.weight"].mul_(2))
    refused(source, folder, "not the lm_head of")


# heads counted from the tensors


@pytest.mark.parametrize(
    ("layout", "family", "key", "file"),
    [
        ("medusa", "medusa", "medusa_num_heads", "medusa_lm_head.safetensors"),
        ("vllm-medusa", "medusa", "num_heads", "model.safetensors"),
        ("hydra", "hydra", "hydra_num_heads", "hydra_lm_head.safetensors"),
    ],
)
def test_config_that_lies_about_the_number_of_heads(exported, folder, tmp_path, layout, family, key, file):
    settings = {"prefix_norm": True, "layers": 1} if family == "hydra" else {}
    source = exported(layout, family, heads=5, **settings)
    change(source, **{key: 2})
    _, warnings = import_head(source, tmp_path / "back", str(folder))
    (warning,) = [line for line in warnings if key in line]
    assert "says" in warning and "2" in warning and "5 are used" in warning and "\n" not in warning
    assert read(tmp_path / "back")["head"]["heads"] == 5
    second = {"medusa": "2.", "vllm-medusa": "blocks.2.", "hydra": "hydra_mlp.2."}[layout]
    change_tensors(source, lambda t: [t.pop(name) for name in list(t) if name.startswith(second)], file)
    refused(source, folder, "gaps")


def test_shared_blocks_are_imported_apart(exported, folder, tmp_path, target):
    """Published files hold one block under several names."""
    source = exported("medusa", "medusa", heads=2, layers=1)

    def share(tensors):
        for h in range(2):
            for kind in ("weight", "bias"):
                tensors[f"{h}.1.linear.{kind}"] = tensors[f"{h}.0.linear.{kind}"].clone()

    change_tensors(source, share, "medusa_lm_head.safetensors")
    _, warnings = import_head(source, tmp_path / "back", str(folder))
    assert any("medusa_num_layers" in line for line in warnings)
    head = load_head(tmp_path / "back", target)
    assert head.config.layers == 2
    export_head(tmp_path / "back", "medusa", tmp_path / "again")  # equal blocks can be expressed
    with torch.no_grad():
        head.state_dict()["1.1.linear.weight"].add_(1)
    save(head, "medusa", target, tmp_path / "head")
    with pytest.raises(UserError, match="shared module"):
        export_head(tmp_path / "head", "medusa", tmp_path / "again")


def test_heads_inside_a_whole_model_are_refused(exported, folder):
    source = exported("medusa", "medusa")
    file = "medusa_lm_head.safetensors"
    change_tensors(source, lambda t: [t.update({f"medusa_head.{n}": t.pop(n)}) for n in list(t)], file)
    refused(source, folder, "inside a whole model")


# pickles, folders, targets


def test_pickles_are_read_only_when_asked(exported, folder, tmp_path, target):
    source = exported("medusa", "medusa", own_lm_head=True)
    tensors = load_file(source / "medusa_lm_head.safetensors")
    (source / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, source / "medusa_lm_head.pt")
    refused(source, folder, "medusa_lm_head.pt", "--pickle")
    import_head(source, tmp_path / "back", str(folder), pickle=True)
    assert torch.equal(load_head(tmp_path / "back", target).state_dict()["0.1.weight"], tensors["0.1.weight"])


class Evil:
    def __reduce__(self):
        return (Path("/tmp/headtrain-pickle-ran").write_text, ("x",))


def test_pickles_that_run_code_are_refused(exported, folder):
    source = exported("medusa", "medusa")
    (source / "medusa_lm_head.safetensors").unlink()
    torch.save({"0.0.linear.weight": Evil()}, source / "medusa_lm_head.pt")
    refused(source, folder, "medusa_lm_head.pt", "was not run", pickle=True)
    assert not Path("/tmp/headtrain-pickle-ran").exists()
    torch.save([torch.ones(1)], source / "medusa_lm_head.pt")
    refused(source, folder, "medusa_lm_head.pt", "by name", pickle=True)


def test_shards(exported, folder, tmp_path):
    source = exported("speculators")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    parts = {"a.safetensors": dict(list(tensors.items())[:5]), "b.safetensors": dict(list(tensors.items())[5:])}
    for name, part in parts.items():
        save_file(part, source / name)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    path = source / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    import_head(source, tmp_path / "back", str(folder))
    ours = load_file(tmp_path / "head" / "model.safetensors")
    assert all(torch.equal(x, ours[name]) for name, x in load_file(tmp_path / "back" / "model.safetensors").items())
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "ghost": "a.safetensors"}}))
    refused(source, folder, "ghost")
    path.write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    refused(source, folder, "outside the folder")
    path.write_text("[]")
    refused(source, folder, "index.json")


def test_what_is_no_checkpoint(tmp_path, exported, folder):
    refused(tmp_path / "absent", folder, "is no folder")
    source = exported("speculators")
    (source / "model.safetensors").write_bytes(b"xx")
    refused(source, folder, "not a complete safetensors file")
    (source / "model.safetensors").unlink()
    refused(source, folder, "holds no tensors")
    save_file({"w": torch.ones(1)}, source / "model.safetensors")
    change(source, speculators_config=None, speculators_model_type=None)
    refused(source, folder, "layout is unknown", "such as w")
    for text in ("", "[]", "{"):
        (source / "config.json").write_text(text)
        refused(source, folder, "config.json")
    (source / "config.json").unlink()
    refused(source, folder, "config.json is missing")


def test_target_that_is_absent_or_another(tmp_path, exported, folder):
    source = exported("speculators")
    assert import_head(source, tmp_path / "named")[0].name == "speculators"  # the config names its target
    refused(source, tmp_path / "nowhere", "nowhere")
    wide = make_target_folder(tmp_path / "wide", num_hidden_layers=LAYERS, hidden_size=48)
    refused(source, wide, "of a target with hidden size 32")
    shallow = make_target_folder(tmp_path / "shallow")
    refused(source, shallow, "not ascending ones of a target with 3 layers")
    source = exported("sglang")
    with pytest.raises(UserError, match="--target"):
        import_head(source, tmp_path / "unnamed")
    with pytest.raises(UserError, match="num_layers"):
        export_head(tmp_path / "head", "speculators", tmp_path / "x", str(shallow))


# the layer's own geometry and rope


def test_layer_that_differs_from_the_targets_keeps_its_own(tmp_path, exported, folder, target):
    """It drafts as it did for the target that it shares its layer with; a warning names the differences."""
    source = exported("speculators")
    rope = {"rope_type": "default", "rope_theta": 77.0}
    changes = {"num_attention_heads": 2, "rms_norm_eps": 1e-2, "rope_parameters": rope, "head_dim": 32}
    other = make_target_folder(tmp_path / "other", num_hidden_layers=LAYERS, **changes)
    _, (warning,) = import_head(source, tmp_path / "back", str(other))
    assert all(part in warning for part in ("num_heads 4", "head_dim 16", "eps 1e-06", "rope {"))
    loaded = load_head(tmp_path / "back", Target.load(str(other), "float32"))
    loaded.embedding.weight.data.copy_(target.embedding.weight)
    head = load_head(tmp_path / "head", target)
    assert all(torch.equal(a, b) for a, b in zip(drafts(head, target), drafts(loaded, target), strict=True))
    source = exported_again(tmp_path, target)
    refused(source, other, "its layer differs", "num_heads is 4")


def exported_again(tmp_path: Path, target: Target) -> Path:
    """A head of a family that always takes its layer from the target."""
    save(make_head("eagle1", target), "eagle1", target, tmp_path / "first")
    export_head(tmp_path / "first", "eagle1", tmp_path / "first-export")
    return tmp_path / "first-export"


def test_other_hidden_size_needs_its_own_embedding(tmp_path, exported, folder, target):
    layer = {"hidden": 24, "head_dim": 8}
    source = exported("speculators", own_embedding=True, lm_head="random", layer=layer)
    assert read(source)["target_hidden_size"] == 32 and read(source)["transformer_layer_config"]["hidden_size"] == 24
    change_tensors(source, lambda t: t.pop("embed_tokens.weight"))
    refused(source, folder, "missing embed_tokens.weight")
    family = load_family("eagle3")
    with pytest.raises(UserError, match="own_embedding: true"):
        family.build(family.Config(vocabulary=None, layer=layer), target)


def test_rope_in_both_spellings():
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}
    old = {"rope_theta": 500000.0, "rope_scaling": llama3}
    new = {"rope_parameters": {"rope_theta": 500000.0, **llama3}}
    older = {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "llama3", **{k: v for k, v in llama3.items() if k != "rope_type"}},
    }
    assert rope_of(old) == rope_of(new) == rope_of(older) == rope_of({**old, **new})
    assert rope_of({}) == rope_of({"rope_scaling": None, "rope_theta": 10000}) == rope_of({"rope_parameters": {}})
    with pytest.raises(ValueError, match="disagree"):
        rope_of({**new, "rope_theta": 10000.0, "rope_scaling": llama3})


def test_rope_is_written_in_both_spellings(tmp_path):
    scaled = {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}
    folder = make_target_folder(tmp_path / "target", num_hidden_layers=LAYERS, rope_parameters=scaled)
    target = Target.load(str(folder), "float32")
    assert rope_keys(outline(str(folder))) == {
        "rope_parameters": scaled,
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    save(make_head("eagle3", target), "eagle3", target, tmp_path / "head")
    export_head(tmp_path / "head", "sglang", tmp_path / "export")
    for gone in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        shutil.copytree(tmp_path / "export", tmp_path / gone[0])
        change(tmp_path / gone[0], **dict.fromkeys(gone))
        import_head(tmp_path / gone[0], tmp_path / "back", str(folder), "sglang")
    change(tmp_path / "export", rope_scaling=None, rope_parameters=None)
    _, (warning,) = import_head(tmp_path / "export", tmp_path / "back", str(folder), "sglang")
    assert "rope" in warning
    change(tmp_path / "export", rope_parameters={**scaled, "rope_theta": 7.0})
    refused(tmp_path / "export", folder, "disagree", layout="sglang")
    assert read(tmp_path / "rope_theta")["max_position_embeddings"] == target.config.max_position_embeddings


# heads with their own matrices of logits


@pytest.mark.parametrize("family", ["medusa", "hydra"])
def test_own_lm_head_starts_as_the_targets(target, family):
    def build(own: bool):
        kind = load_family(family)
        torch.manual_seed(0)
        return kind.build(kind.Config(heads=2, layers=1, own_lm_head=own), target)

    shared, own = build(False), build(True)
    assert not own.load_state_dict(shared.state_dict(), strict=False).unexpected_keys  # its matrices stay as built
    for a, b in zip(drafts(shared, target), drafts(own, target), strict=True):
        torch.testing.assert_close(a, b)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, target.vocab_size, (2, 9), generator=generator)
    features, hidden = target.features(ids, own.target_layers)
    batch = Batch(ids, torch.ones(2, 9), features, hidden)
    expected, found = shared.loss(batch, target), own.loss(batch, target)
    torch.testing.assert_close(found.total, expected.total)
    torch.testing.assert_close(found.acceptance, expected.acceptance)
    found.total.backward()
    matrices = [x for x in own.parameters() if x.shape[0] == target.vocab_size]
    assert len(matrices) == (2 if family == "medusa" else 4)  # with biases
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in matrices)


def test_dflash_counts_outputs_of_layers(tmp_path, folder, exported):
    out = exported("dflash", "dflash", layers=[1, 6], decoder_layers=1, block=5)
    config = read(out)
    assert config["dflash_config"]["target_layer_ids"] == [0, 5] and config["block_size"] == 5
    assert config["model_type"] == "qwen3" and config["num_target_layers"] == LAYERS
    change(out, num_hidden_layers=9)
    _, warnings = import_head(out, tmp_path / "back", str(folder))
    assert warnings == ["config.json says 9 layers, its tensors are of 1"]
    assert json.loads((tmp_path / "back" / "config.json").read_text())["layers"] == [1, 6]


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"layer_types": ["sliding_attention"]}, ["sliding_attention"]),
        ({"dflash_config": None}, ["target_layer_ids"]),
        ({"dflash_config": {"target_layer_ids": [0, 5]}}, ["mask_token_id"]),
        ({"dflash_config": {"target_layer_ids": [0, 5, 6], "mask_token_id": 1}}, ["fuses 2 features"]),
        ({"block_size": None}, ["block_size"]),
        ({"num_target_layers": 9}, ["num_target_layers is 9"]),
        ({"rope_theta": 5e6, "rope_parameters": None}, ["rope"]),
    ],
)
def test_a_dflash_config_that_no_head_here_is(tmp_path, folder, exported, keys, parts):
    out = exported("dflash", "dflash", layers=[1, 6], decoder_layers=1)
    change(out, **keys)
    with pytest.raises(UserError) as error:
        import_head(out, tmp_path / "back", str(folder))
    assert all(part in str(error.value) for part in [*parts, str(out)]) and not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("settings", "reason"), [({"vocabulary": 30}, "draft vocabulary"), ({"layers": [3, 8]}, "boundary 8")]
)
def test_what_dflash_cannot_express(exported, settings, reason):
    with pytest.raises(UserError, match=reason):
        exported("dflash", "dflash", decoder_layers=1, **settings)
