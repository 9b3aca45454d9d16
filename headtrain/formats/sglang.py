"""The layout that SGLang serves (0.5.23): `midlayer.*`; `eagle_config` counts layer outputs, the top-level key of the same
name, which vLLM reads, counts boundaries; `norm_output` feeds the normed state back.

The residual is always the un-normed feature there, and a head without lm_head would be filled with random numbers.
"""

from typing import Any

from decode.errors import UserError
from headtrain.formats.base import Checkpoint, Format, Portable
from headtrain.formats.fused_layer import read_head, refuse, to_outputs, write_head
from headtrain.target import Target

IDS = "eagle_aux_hidden_state_layer_ids"


def read_ids(checkpoint: Checkpoint) -> list[int] | None:
    """Boundaries from the nested list of outputs and the top-level list of boundaries, which must agree."""
    nested = (checkpoint.config.get("eagle_config") or {}).get(IDS)
    top = checkpoint.config.get(IDS)
    for value in (nested, top):
        if value is not None and not (isinstance(value, list) and all(type(i) is int for i in value)):
            raise UserError(f"{checkpoint.where}: {IDS} is {value!r}, expected a list of layers; correct config.json")
    boundaries = None if nested is None else [i + 1 for i in nested]
    if top is not None and boundaries is not None and top != boundaries:
        raise UserError(
            f"{checkpoint.where}: {IDS} is {top} (inputs of layers), eagle_config says {nested} (outputs), which are"
            " other layers; correct config.json"
        )
    return top if boundaries is None else boundaries


def feature_norm(names: set[str]) -> str | None:
    """Which norm of the features the tensors hold."""
    return "each" if "fc_norm.0.weight" in names else "joint" if "input_norm.weight" in names else None


class SGLang(Format):
    name = "sglang"
    families = ("eagle3",)

    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        midlayer = "midlayer.self_attn.q_proj.weight" in names
        if midlayer and config.get("norm_output"):
            raise UserError(
                "norm_output is true, which means two things: give --format sglang where the normed state is fed back"
                " (SGLang, vLLM), --format specforge where the norm only stands in front of lm_head (SpecForge)"
            )
        return midlayer and "norm_before_fc" in config  # only servers know this key

    def rename(self, name: str, settings: dict[str, Any]) -> str:
        return name

    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        config = checkpoint.config
        flags = {
            "fusion_norm": feature_norm(set(checkpoint.tensors)),
            "feedback": "normed" if config.get("norm_output") else "raw",
        }
        return read_head(checkpoint, target, read_ids(checkpoint), flags)

    def check(self, head: Portable, num_layers: int) -> None:
        refuse(head, self.name, normed_residual=False)
        to_outputs(head.layers, num_layers, self.name)

    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        outputs = to_outputs(head.layers, target.num_layers, self.name)
        checkpoint = write_head(head, target, embedding, self.rename)
        norm = head.settings.get("fusion_norm")
        checkpoint.config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {IDS: outputs, "use_aux_hidden_state": True},
            IDS: head.layers,
            "num_aux_hidden_states": len(head.layers),
            "norm_before_residual": False,
            "norm_output": head.settings.get("feedback") == "normed",
            "fc_norm": norm == "each",
            "norm_before_fc": norm == "joint",
        }
        return checkpoint


FORMAT = SGLang()
