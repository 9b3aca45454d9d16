"""The original Medusa layout: `{head}.{block}.linear.*` and, where each head owns one, `{head}.{blocks}.weight` [V, H].

Heads and blocks are counted from the tensors: published configs name too few. Its readers make all blocks of a head one
and the same module.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from headtrain.formats.base import Checkpoint, Format, Portable, require
from headtrain.target import Target

BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
OWN = re.compile(r"(\d+)\.(\d+)\.weight")
INSIDE = re.compile(r"medusa_heads?\.\d+\.\d+\.linear\.weight")


def count(pairs: Iterable[tuple[int, int]], checkpoint: Checkpoint, keys: tuple[str, str]) -> tuple[int, int]:
    """Heads and blocks of each from (head, block) pairs; a config that says otherwise gives a warning."""
    found = sorted(pairs)
    heads, blocks = found[-1][0] + 1, max(block for _, block in found) + 1
    whole = found == [(h, b) for h in range(heads) for b in range(blocks)]
    require(whole, checkpoint.where, f"heads and blocks have gaps or differ: {found[:12]}; copy the whole head")
    for key, number in zip(keys, (heads, blocks), strict=True):
        said = checkpoint.config.get(key, number)
        if said != number:
            checkpoint.warnings.append(f"config.json says {key} {said}, the tensors hold {number}: {number} are used")
    return heads, blocks


def refuse_different_blocks(layers: list[dict[str, Tensor]], where: str) -> None:
    """Raises UserError unless the tensors of all these blocks are equal, which readers make one module."""
    for other in layers[1:]:
        if any(not torch.equal(layers[0][key], other[key]) for key in layers[0]):
            raise UserError(
                f"--format {where}: cannot express blocks that differ: its readers load them into one shared module, so"
                " the last would replace the rest; train with fewer head.layers"
            )


class Original(Format):
    name = "medusa"
    families = ("medusa",)
    weights = "medusa_lm_head.safetensors"

    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        if any(INSIDE.fullmatch(name) for name in names):
            raise UserError("its heads lie inside a whole model that was tuned with them, which no head here can hold")
        return any(BLOCK.fullmatch(name) for name in names)

    def rename(self, name: str, settings: dict[str, Any]) -> str:
        return name

    def target_name(self, config: dict[str, Any]) -> str | None:
        return config.get("base_model_name_or_path")

    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        names = checkpoint.tensors
        pairs = [(int(m[1]), int(m[2])) for name in names if (m := BLOCK.fullmatch(name))]
        require(bool(pairs), checkpoint.where, "missing 0.0.linear.weight")
        heads, layers = count(pairs, checkpoint, ("medusa_num_heads", "medusa_num_layers"))
        settings = {"heads": heads, "layers": layers, "own_lm_head": any(OWN.fullmatch(name) for name in names)}
        return Portable("medusa", settings, [target.num_layers], dict(names))

    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        reason = "cannot express a draft vocabulary; export --format vllm-medusa"
        require("token_map" not in head.tensors, f"--format {self.name}", reason)
        heads, layers = head.settings["heads"], head.settings["layers"]
        for h in range(heads):
            blocks = [
                (head.tensors[f"{h}.{b}.linear.weight"], head.tensors[f"{h}.{b}.linear.bias"]) for b in range(layers)
            ]
            refuse_different_blocks([{"weight": weight, "bias": bias} for weight, bias in blocks], self.name)
        own = head.settings.get("own_lm_head", False)
        scaled = any(getattr(target.config, key, None) for key in ("logit_scale", "logits_scaling"))
        require(own or not scaled, f"--format {self.name}", "cannot express a target that scales its logits")
        config = {
            "medusa_num_heads": heads,
            "medusa_num_layers": layers,
            "base_model_name_or_path": target.name,
            **({} if own else {"version": "2"}),
        }
        return Checkpoint(config, dict(head.tensors))


FORMAT = Original()
