"""What the public layouts of EAGLE-3 heads share: names, the offset map of the draft vocabulary, boundaries, embeddings.

A boundary b is the input of the target's layer b, which is the output of layer b - 1; layouts that count outputs write
b - 1. The map is d2t: target id = draft id + d2t[draft id], and t2d marks the target ids that have a draft id.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from headtrain.formats.base import Checkpoint, Portable, require
from headtrain.formats.outline import layer_keys, own_layer, with_weights
from headtrain.target import Target

EMBEDDING = "embed_tokens.weight"
DEFAULT_IDS = "[2, n/2, n-3]"


def default_boundaries(target: Target) -> list[int]:
    """What readers assume where a config names no layers; [] for targets too shallow for it."""
    n = target.num_layers
    layers = [2, n // 2, n - 3]
    return layers if 0 < layers[0] < layers[1] < layers[2] else []


def check_boundaries(layers: Any, target: Target, fc: Tensor, where: Path) -> list[int]:
    """The boundaries, if they are ascending ones of the target and as many as the fusing matrix takes."""
    n = target.num_layers
    whole = isinstance(layers, Sequence) and all(type(b) is int and 0 <= b <= n for b in layers)
    ascending = whole and len(layers) > 0 and all(a < b for a, b in zip(layers, layers[1:], strict=False))
    require(ascending, where, f"boundaries {layers} are not ascending ones of a target with {n} layers")
    fused = fc.shape[1] / target.hidden_size
    require(
        fused == len(layers), where, f"fc.weight {list(fc.shape)} fuses {fused:g} features, the config names {layers}"
    )
    return list(layers)


def read_map(checkpoint: Checkpoint, target: Target, marks: bool = True) -> dict[str, Tensor]:
    """d2t [Vd] and t2d [V], checked. `marks`: the layout saves t2d too."""
    where, tensors = checkpoint.where, checkpoint.tensors
    require("lm_head.weight" in tensors, where, "missing lm_head.weight; a server would fill it with random numbers")
    rows, size = len(tensors["lm_head.weight"]), target.vocab_size
    said = checkpoint.config.get("draft_vocab_size")
    require(said in (None, rows), where, f"draft_vocab_size is {said}, but lm_head.weight has {rows} rows")
    require(rows <= size, where, f"lm_head.weight has {rows} rows, but {target.name} has {size} tokens")
    if rows == size and "d2t" not in tensors and "t2d" not in tensors:
        return {"d2t": torch.zeros(rows, dtype=torch.int64), "t2d": torch.ones(size, dtype=torch.bool)}
    require("d2t" in tensors, where, f"missing d2t: nothing says which of {size} tokens its {rows} columns are")
    require(not marks or "t2d" in tensors, where, "missing t2d")
    d2t = tensors["d2t"].long()
    require(d2t.shape == (rows,), where, f"d2t has shape {list(d2t.shape)}, expected [{rows}]")
    ids = d2t + torch.arange(rows)
    t2d = tensors["t2d"].bool() if "t2d" in tensors else torch.zeros(size, dtype=torch.bool)
    require(t2d.shape == (size,), where, f"t2d has shape {list(t2d.shape)}, expected [{size}]")
    hint = "; these look like ids instead of offsets" if rows < size and bool((d2t.diff() > 0).all()) else ""
    inside = bool((ids >= 0).all() and (ids < size).all() and (ids.diff() > 0).all())
    require(inside, where, f"d2t + index are not ascending ids of the target{hint}")
    if "t2d" not in tensors:
        t2d[ids] = True
    agree = int(t2d.sum()) == rows and bool(t2d[ids].all())
    require(agree, where, f"d2t and t2d disagree: t2d marks {int(t2d.sum())} tokens, d2t names {rows}{hint}")
    require(rows == size or bool(d2t.any()), where, "d2t is all zeros: the map was never written")
    return {"d2t": d2t, "t2d": t2d}


def read_embedding(checkpoint: Checkpoint, target: Target) -> dict[str, Tensor]:
    """The head's own embedding; {} where none is saved or it is the target's."""
    saved = checkpoint.tensors.get(EMBEDDING)
    if saved is None:
        return {}
    weight = with_weights(target).embedding.weight.to(saved.dtype)
    if saved.shape == weight.shape and torch.equal(saved, weight):
        return {}
    return {EMBEDDING: saved}


def read_head(
    checkpoint: Checkpoint, target: Target, layers: list[int] | None, flags: dict[str, Any], marks: bool = True
) -> Portable:
    """A head from tensors under their public names. `layers`: its boundaries, None where the config names none; `flags`:
    settings of the family that the layout's config decides; `marks`: see `read_map`."""
    where, config, tensors = checkpoint.where, checkpoint.config, dict(checkpoint.tensors)
    own_geometry = own_layer(config, target, where)
    of = config.get("target_hidden_size") or target.hidden_size
    require(
        of == target.hidden_size, where, f"is of a target with hidden size {of}, {target.name} has {target.hidden_size}"
    )
    tied = config.get("tie_word_embeddings", False)
    require(not tied, where, "tie_word_embeddings is true, but the lm_head is its own; correct config.json")
    require("fc.weight" in tensors, where, "missing fc.weight")
    require("fc.bias" not in tensors, where, "fc.bias: an EAGLE-3 head has none here, and no server reads it")
    default = default_boundaries(target)
    require(bool(layers or default), where, f"names no layers, and {target.name} is too shallow for {DEFAULT_IDS}")
    boundaries = check_boundaries(layers or default, target, tensors["fc.weight"], where)
    for name in (EMBEDDING, "d2t", "t2d"):
        tensors.pop(name, None)
    own = read_embedding(checkpoint, target)
    tensors |= read_map(checkpoint, target, marks) | own
    rows = len(tensors["d2t"])
    settings = {"layers": boundaries, "vocabulary": None if rows == target.vocab_size else rows, **flags}
    if own:
        settings["own_embedding"] = True
    if own_geometry:
        settings["layer"] = own_geometry
        lone = "hidden" in own_geometry and not own
        require(not lone, where, f"missing {EMBEDDING}: its hidden size is not that of {target.name}")
        listed = ", ".join(f"{key} {value}" for key, value in own_geometry.items())
        checkpoint.warnings.append(f"its layer differs from that of {target.name}: {listed}")
    return Portable("eagle3", settings, boundaries, tensors)


def write_head(head: Portable, target: Target, embedding: bool, rename, marks: bool = True) -> Checkpoint:
    """Config of one layer and renamed tensors; the map is left out where the draft knows the whole vocabulary."""
    tensors = {rename(name, head.settings): x for name, x in head.tensors.items()}
    rows = len(head.tensors["d2t"])
    if rows == target.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    elif not marks:
        del tensors["t2d"]
    fc = head.tensors["fc.weight"]
    if embedding and EMBEDDING not in tensors:
        tensors[EMBEDDING] = with_weights(target).embedding.weight.detach().to("cpu", fc.dtype).contiguous()
    config = {
        **layer_keys(target, fc.dtype, head.settings.get("layer")),
        "draft_vocab_size": rows,
        "target_hidden_size": target.hidden_size,
    }
    return Checkpoint(config, tensors)


def refuse(head: Portable, where: str, **plain: Any) -> None:
    """Raises UserError where a setting is not the only one that the layout can express."""
    for key, value in plain.items():
        found = head.settings.get(key, value)
        if found != value:
            raise UserError(
                f"--format {where}: cannot express {key} {found!r} (only {value!r}): its readers know no such"
            )


def to_outputs(layers: list[int], num_layers: int, where: str) -> list[int]:
    """Boundaries as indices of layers whose output they are."""
    if layers[-1] == num_layers:
        raise UserError(
            f"--format {where}: cannot express boundary {num_layers}, the state behind the target's final norm: its readers take"
            " the outputs of layers, before that norm; train with head.layers below it"
        )
    if layers[0] == 0:
        raise UserError(f"--format {where}: cannot express boundary 0, the embedding: it is no layer's output")
    return [b - 1 for b in layers]
