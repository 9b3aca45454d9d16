"""`headtrain export` and `headtrain import`: heads to public layouts and back, without the target's weights where its
config is enough. Both write a folder whole or not at all."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from decode.errors import UserError
from headtrain.checkpoint import describe_head, read_config, write_folder
from headtrain.formats.base import Checkpoint, Format, Portable, check_tensors, detect, load_format
from headtrain.formats.files import read_checkpoint, read_safetensors
from headtrain.formats.outline import outline
from headtrain.heads.base import Head, load_family
from headtrain.target import Target


def skeleton(head: Portable, target: Target, where: Path) -> Head:
    """The module that the tensors belong to, without data. Raises UserError for settings that it does not know."""
    family = load_family(head.family)
    try:
        settings = family.Config(**head.settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    with torch.device("meta"):
        return family.restore(settings, head.layers, target, {n: tuple(x.shape) for n, x in head.tensors.items()})


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in module.state_dict().items()}


def export_head(folder: Path, layout: str, out: Path, target: str | None = None, embedding: bool = False) -> list[str]:
    """Write a head of ours in a public layout. Returns warnings, a line each.

    Raises UserError where the layout cannot hold the family or a setting of the head, with the reason.
    """
    found, to = read_config(folder), load_format(layout)
    if found["family"] not in to.families:
        raise UserError(
            f"--format {layout}: cannot hold a head of family {found['family']}, only {', '.join(to.families)}"
        )
    model = outline(target or found["target"]["name"])
    require_same_target(found["target"], model, folder)
    tensors = read_safetensors(folder / "model.safetensors")
    head = Portable(found["family"], found["head"], list(found["layers"]), tensors)
    check_tensors(tensors, shapes(skeleton(head, model, folder)), folder)
    to.check(head, model.num_layers)
    checkpoint = to.write(head, model, embedding)
    checkpoint.config.setdefault("headtrain", manifest(head, found, checkpoint, to))
    write_folder(out, lambda staging: fill(staging, checkpoint, to))
    return checkpoint.warnings


def require_same_target(described: dict[str, Any], target: Target, folder: Path) -> None:
    """Raises UserError unless shapes of the target are those that the head was made for."""
    sizes = {
        "model_type": target.config.model_type,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }
    for key, value in sizes.items():
        if described.get(key) != value:
            raise UserError(
                f"{folder}: the head was made for {described.get('name')} with {key} {described.get(key)}, but"
                f" {target.name} has {value}; give its own --target"
            )


def feature(boundary: int, num_layers: int) -> str:
    """A boundary in words."""
    return "last hidden state, after the final norm" if boundary == num_layers else f"input of layer {boundary}"


def manifest(head: Portable, found: dict[str, Any], checkpoint: Checkpoint, to: Format) -> dict[str, Any]:
    """What this head is in plain words, for people; no reader depends on it."""
    vocabulary = head.tensors.get("d2t", head.tensors.get("token_map"))
    digest = hashlib.sha256(vocabulary.numpy().tobytes()).hexdigest()[:16] if vocabulary is not None else None
    return {
        "format": to.name,
        "family": head.family,
        "features": [feature(b, found["target"]["num_layers"]) for b in head.layers],
        "vocabulary": digest,
        "embedding": "saved" if "embed_tokens.weight" in checkpoint.tensors else "the target's",
        "target": found["target"],
    }


def fill(folder: Path, checkpoint: Checkpoint, to: Format) -> None:
    about = checkpoint.config.pop("headtrain", None)
    tensors = {name: x.contiguous() for name, x in checkpoint.tensors.items()}
    save_file(tensors, folder / to.weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.config, indent=2) + "\n")
    (folder / "headtrain.json").write_text(json.dumps(about, indent=2) + "\n")


def import_head(
    source: Path, out: Path, target: str | None = None, layout: str | None = None, pickle: bool = False
) -> tuple[Format, list[str]]:
    """Write a public checkpoint as a head of ours. Returns its layout and warnings, a line each.

    `layout` overrides what keys and config say; `pickle` allows `.bin` and `.pt`, read with `weights_only=True`. Raises
    UserError that lists missing, unexpected and misshaped tensors, for a config that contradicts the tensors, and for
    what no family here can represent.
    """
    checkpoint = read_checkpoint(source, pickle)
    names = set(checkpoint.tensors)
    try:
        of = load_format(layout) if layout else detect(names, checkpoint.config, source)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(("--format", str(source))) else f"{source}: {text}") from error
    name = target or of.target_name(checkpoint.config)
    if name is None:
        raise UserError(f"--target: {source} does not say which target it belongs to; name the target's folder")
    model = outline(name)
    head = of.read(checkpoint, model)
    module = skeleton(head, model, source)
    expected = {of.rename(key, head.settings): shape for key, shape in shapes(module).items()}
    check_tensors(head.tensors, expected, source)
    head.tensors = {key: head.tensors[of.rename(key, head.settings)] for key in shapes(module)}
    write_folder(out, lambda staging: fill_ours(staging, module, head, model))
    return of, checkpoint.warnings


def fill_ours(folder: Path, module: Head, head: Portable, target: Target) -> None:
    def own(x: Tensor) -> Tensor:
        return x.contiguous().clone()  # published files may hold one tensor under two names

    save_file({name: own(x) for name, x in head.tensors.items()}, folder / "model.safetensors")
    module.load_state_dict(head.tensors, assign=True)  # no copy: the config describes the vocabulary among them
    config = describe_head(module, head.family, target)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
