"""What SpecForge trains and exports: `midlayer.*`, always with d2t and t2d; layer ids count outputs.

`norm_output` here says whether the norm stands in front of lm_head (default true); what is fed back is never normed. It
is left out of exports, because servers read it as feeding the normed state back.
"""

from typing import Any

from headtrain.formats.base import Checkpoint, Format, Portable, require
from headtrain.formats.fused_layer import read_head, refuse, to_outputs, write_head
from headtrain.formats.sglang import IDS, feature_norm, read_ids
from headtrain.target import Target


class SpecForge(Format):
    name = "specforge"
    families = ("eagle3",)

    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        newer = "LlamaForCausalLMEagle3" in (config.get("architectures") or []) or "eagle_config" in config
        return "midlayer.self_attn.q_proj.weight" in names and newer

    def rename(self, name: str, settings: dict[str, Any]) -> str:
        return name

    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        normed = checkpoint.config.get("norm_output", True)
        require(
            normed, checkpoint.where, "norm_output is false: no norm in front of lm_head, which no head here can do"
        )
        return read_head(
            checkpoint, target, read_ids(checkpoint), {"fusion_norm": feature_norm(set(checkpoint.tensors))}
        )

    def check(self, head: Portable, num_layers: int) -> None:
        refuse(head, self.name, feedback="raw", normed_residual=False)
        require(
            head.settings.get("fusion_norm") in (None, "each"),
            "--format specforge",
            "cannot express fusion_norm 'joint' (only null or 'each')",
        )
        to_outputs(head.layers, num_layers, self.name)

    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        outputs = to_outputs(head.layers, target.num_layers, self.name)
        checkpoint = write_head(head, target, embedding, self.rename)
        checkpoint.tensors |= {name: head.tensors[name] for name in ("d2t", "t2d")}
        checkpoint.config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {IDS: outputs, "use_aux_hidden_state": True},
        }
        if head.settings.get("fusion_norm") == "each":
            checkpoint.config["fc_norm"] = True
        return checkpoint


FORMAT = SpecForge()
