"""DFlash as z-lab, SpecForge and ModelOpt write it: a small Qwen3 without embedding and lm_head, which are the target's.

`dflash_config.target_layer_ids` counts outputs of layers. The rotary base must be the target's, whose features become the
keys of the draft. vLLM and SGLang serve it.
"""

import re
from typing import Any

from headtrain.formats.base import Checkpoint, Format, Portable, require
from headtrain.formats.fused_layer import check_boundaries, to_outputs
from headtrain.formats.outline import check_layer, layer_keys
from headtrain.target import Target

LAYER = re.compile(r"layers\.(\d+)\.input_layernorm\.weight")


class DFlash(Format):
    name = "dflash"
    families = ("dflash",)

    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= names

    def rename(self, name: str, settings: dict[str, Any]) -> str:
        return name

    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        config, where, tensors = checkpoint.config, checkpoint.where, checkpoint.tensors
        own = config.get("dflash_config") or {}
        ids, mask, block = own.get("target_layer_ids"), own.get("mask_token_id"), config.get("block_size")
        ids = ids if isinstance(ids, list) and all(type(i) is int for i in ids) else []
        require(bool(ids), where, "names no target_layer_ids")
        require(type(mask) is int and type(block) is int, where, "names no mask_token_id or no block_size")
        n = config.get("num_target_layers", target.num_layers)
        require(n == target.num_layers, where, f"num_target_layers is {n}, {target.name} has {target.num_layers}")
        kinds = set(config.get("layer_types") or ()) - {"full_attention"}
        require(not kinds, where, f"has layers of {', '.join(sorted(kinds))}; heads here attend to all positions")
        require("markov_head.markov_w1.weight" not in tensors, where, "is DSpark, whose Markov head is not known here")
        check_layer(config, target, where)
        depth = len({match[1] for name in tensors if (match := LAYER.fullmatch(name))})
        said = config.get("num_hidden_layers", depth)
        if said != depth:
            checkpoint.warnings.append(f"config.json says {said} layers, its tensors are of {depth}")
        require("fc.weight" in tensors, where, "missing fc.weight")
        boundaries = check_boundaries([i + 1 for i in ids], target, tensors["fc.weight"], where)
        settings = {"layers": boundaries, "block": block, "decoder_layers": depth, "mask_token": mask}
        return Portable("dflash", settings, boundaries, tensors)

    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        where, settings = f"--format {self.name}", head.settings
        require(
            "token_map" not in head.tensors, where, "cannot express a draft vocabulary: it uses the target's lm_head"
        )
        depth = settings["decoder_layers"]
        config = {
            **layer_keys(target, head.tensors["fc.weight"].dtype),
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "num_hidden_layers": depth,
            "layer_types": ["full_attention"] * depth,
            "sliding_window": None,
            "use_sliding_window": False,
            "block_size": settings["block"],
            "num_target_layers": target.num_layers,
            "dflash_config": {
                "mask_token_id": settings["mask_token"],
                "target_layer_ids": to_outputs(head.layers, target.num_layers, self.name),
            },
        }
        return Checkpoint(config, dict(head.tensors))


FORMAT = DFlash()
