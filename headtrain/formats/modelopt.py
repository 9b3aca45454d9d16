"""What NVIDIA ModelOpt exports for EAGLE-3: `layers.0.*`, d2t and no t2d, and a nested `eagle_config` that counts outputs.

vLLM reads that nested list as boundaries, one layer early; a warning says so.
"""

from typing import Any

from headtrain.formats.base import Checkpoint, Format, Portable, require
from headtrain.formats.fused_layer import read_head, refuse, to_outputs, write_head
from headtrain.formats.sglang import IDS, read_ids
from headtrain.target import Target

CONFIG = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 0,
}


class ModelOpt(Format):
    name = "modelopt"
    families = ("eagle3",)

    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        return {"layers.0.hidden_norm.weight", "fc.weight"} <= names and "eagle_config" in config

    def rename(self, name: str, settings: dict[str, Any]) -> str:
        return name.replace("midlayer.", "layers.0.", 1)

    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        found = checkpoint.config["eagle_config"]
        require(isinstance(found, dict), checkpoint.where, "eagle_config is no object; correct config.json")
        for key, value in CONFIG.items():
            said = found.get(key, value)
            require(said == value, checkpoint.where, f"eagle_config.{key} is {said}; a head here can only be {value}")
        checkpoint.warnings.append(
            "ModelOpt may train with one norm more on the feature than it exports: measure acceptance before relying on it"
        )
        return read_head(checkpoint, target, read_ids(checkpoint), {}, marks=False)

    def check(self, head: Portable, num_layers: int) -> None:
        refuse(head, self.name, feedback="raw", fusion_norm=None, normed_residual=False)
        to_outputs(head.layers, num_layers, self.name)

    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        outputs = to_outputs(head.layers, target.num_layers, self.name)
        checkpoint = write_head(head, target, embedding, self.rename, marks=False)
        checkpoint.config |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS: outputs, **CONFIG}}
        checkpoint.warnings.append(
            "vLLM reads the layer ids of this layout as inputs, one layer early; for vLLM export --format speculators"
        )
        return checkpoint


FORMAT = ModelOpt()
