"""The original EAGLE-3 layout (SafeAILab/EAGLE): `midlayer.*`, offset map, boundaries fixed to [2, n/2, n-3]."""

from typing import Any

from headtrain.formats.base import Checkpoint, Format, Portable, require
from headtrain.formats.fused_layer import DEFAULT_IDS, default_boundaries, read_head, refuse, write_head
from headtrain.target import Target


class Original(Format):
    name = "eagle3"
    families = ("eagle3",)

    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        return "midlayer.self_attn.q_proj.weight" in names

    def rename(self, name: str, settings: dict[str, Any]) -> str:
        return name

    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        return read_head(checkpoint, target, None, {})

    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        refuse(head, self.name, feedback="raw", fusion_norm=None, normed_residual=False)
        default = default_boundaries(target)
        reason = f"cannot express boundaries {head.layers}: its reader takes {default or DEFAULT_IDS} of this target"
        require(head.layers == default, f"--format {self.name}", reason)
        checkpoint = write_head(head, target, embedding, self.rename)
        checkpoint.config["architectures"] = ["LlamaForCausalLM"]
        return checkpoint


FORMAT = Original()
