"""The original EAGLE-1 layout, which HASS and EAGLE-2 share: `fc`, `layers.0.*` without input norm, the embedding saved.

`lm_head` and final norm are the target's; the feature is the target's last hidden state behind its norm.
"""

from typing import Any

from headtrain.formats.base import Checkpoint, Format, Portable, require
from headtrain.formats.fused_layer import EMBEDDING, read_embedding
from headtrain.formats.outline import check_layer, layer_keys, with_weights
from headtrain.target import Target


class Original(Format):
    name = "eagle1"
    families = ("eagle1",)

    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        layer = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names
        return layer and "layers.0.hidden_norm.weight" not in names and "hidden_norm.weight" not in names

    def rename(self, name: str, settings: dict[str, Any]) -> str:
        return name

    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        where, config, tensors = checkpoint.where, checkpoint.config, dict(checkpoint.tensors)
        check_layer(config, target, where)
        biased = [name for name in tensors if name.endswith("_proj.bias")]
        require(not biased, where, f"{', '.join(biased[:3])}: attention with biases, which a head here does not have")
        bias = "fc.bias" in tensors
        said = config.get("bias", bias)
        require(said == bias, where, f"bias is {said}, but fc.bias is {'there' if bias else 'missing'}")
        require(not read_embedding(checkpoint, target), where, f"{EMBEDDING} is not that of {target.name}")
        tensors.pop(EMBEDDING, None)
        return Portable("eagle1", {"bias": bias}, [target.num_layers], tensors)

    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        reason = "cannot express a draft vocabulary: its readers use the target's whole lm_head"
        require("token_map" not in head.tensors, f"--format {self.name}", reason)
        dtype = head.tensors["fc.weight"].dtype
        bias = "fc.bias" in head.tensors
        config = {**layer_keys(target, dtype), "architectures": ["LlamaForCausalLM"], "bias": bias}
        saved = with_weights(target).embedding.weight.detach().to("cpu", dtype)
        if bias:
            warning = (
                "vLLM builds fc without a bias and does not use fc.bias; train with head.bias: false to serve it there"
            )
        else:
            warning = "SGLang 0.5.23 builds fc with a bias, which this head does not have"
        return Checkpoint(config, {**head.tensors, EMBEDDING: saved}, warnings=[warning])


FORMAT = Original()
