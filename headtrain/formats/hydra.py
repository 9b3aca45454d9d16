"""The Hydra layout: `hydra_mlp.{head}.*`, `hydra_lm_head.{head}.*`, and with `prefix-mlp` the `prefix_embeding_layer.*` (its
typo is part of the name), a one-layer Llama with final norm whose embedding is saved and never used.

Dropouts take the even places of `prefix-mlp`. Its readers make all blocks behind a head's first one module.
"""

import re
from typing import Any

import torch
from torch import Tensor

from headtrain.formats.base import Checkpoint, Format, Portable, require
from headtrain.formats.medusa import count, refuse_different_blocks
from headtrain.formats.outline import with_weights
from headtrain.target import Target

PREFIX = "prefix_embeding_layer."
UNUSED = PREFIX + "embed_tokens.weight"
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
OURS = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(?:1\.)?((?:linear|res_connection)\..+)")


class Original(Format):
    name = "hydra"
    families = ("hydra",)
    weights = "hydra_lm_head.safetensors"

    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        return any(name.startswith("hydra_mlp.") for name in names)

    def rename(self, name: str, settings: dict[str, Any]) -> str:
        prefix = bool(settings["prefix"])
        if match := OURS.fullmatch(name):
            head, block, rest = match.groups()
            return f"hydra_mlp.{head}.{2 * int(block) + 1 if prefix else block}.{rest}"
        if name.startswith("hydra_lm_head.") and prefix:
            _, head, kind = name.split(".")
            return f"hydra_lm_head.{head}.1.{kind}"
        if name.startswith("prefix.norm."):
            return PREFIX + name.removeprefix("prefix.")
        return name.replace("prefix.", PREFIX + "layers.0.", 1) if name.startswith("prefix.") else name

    def target_name(self, config: dict[str, Any]) -> str | None:
        return config.get("base_model_name_or_path")

    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        where, config, tensors = checkpoint.where, checkpoint.config, dict(checkpoint.tensors)
        require(
            config.get("grounded_heads", True), where, "grounded_heads is false: such heads are Medusa's, not Hydra's"
        )
        offset = config.get("hidden_state_offset", 0)
        require(offset == 0, where, f"hidden_state_offset is {offset}; heads here read the last hidden state")
        prefix = any(name.startswith(PREFIX) for name in tensors)
        expected = "prefix-mlp" if prefix else "mlp"
        architecture = config.get("hydra_head_arch", expected)
        require(
            architecture == expected, where, f"hydra_head_arch is {architecture}, but the tensors are of {expected}"
        )
        tensors.pop(UNUSED, None)
        places = [(int(m[1]), int(m[2])) for name in tensors if (m := BLOCK.fullmatch(name))]
        first, step = (1, 2) if prefix else (0, 1)
        require(bool(places), where, f"missing hydra_mlp.0.{first}.linear.weight")
        aligned = all(place >= first and (place - first) % step == 0 for _, place in places)
        require(aligned, where, f"blocks stand at {sorted(places)[:6]}, which is not the order of {expected}")
        pairs = [(head, (place - first) // step) for head, place in places]
        heads, layers = count(pairs, checkpoint, ("hydra_num_heads", "hydra_num_layers"))
        settings = {"heads": heads, "layers": layers, "prefix": prefix, "prefix_norm": prefix, "own_lm_head": True}
        if self._shares_target(tensors, settings, target):
            settings["own_lm_head"] = False
            tensors = {name: x for name, x in tensors.items() if not name.startswith("hydra_lm_head.")}
        return Portable("hydra", settings, [target.num_layers], tensors)

    def _matrix(self, head: int, settings: dict[str, Any]) -> tuple[str, str]:
        """Names of a head's matrix of logits and its bias."""
        weight, bias = (self.rename(f"hydra_lm_head.{head}.{kind}", settings) for kind in ("weight", "bias"))
        return weight, bias

    def _shares_target(self, tensors: dict[str, Tensor], settings: dict[str, Any], target: Target) -> bool:
        """Whether every head's matrix is the target's lm_head, without bias."""
        names = [self._matrix(h, settings) for h in range(settings["heads"])]
        if any(not {weight, bias} <= tensors.keys() or bool(tensors[bias].any()) for weight, bias in names):
            return False
        rows = with_weights(target).lm_head_weight.detach().cpu()
        matrices = [tensors[weight] for weight, _ in names]
        return all(x.shape == rows.shape and torch.equal(x, rows.to(x.dtype)) for x in matrices)

    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        where, settings = f"--format {self.name}", head.settings
        require(
            "token_map" not in head.tensors, where, "cannot express a draft vocabulary: it has a row for every token"
        )
        prefix, normed = settings["prefix"], settings.get("prefix_norm", False)
        reason = "cannot express a prefix layer without its final norm: its readers always have one"
        require(normed or not prefix, where, reason + "; train with head.prefix_norm: true")
        heads, layers = settings["heads"], settings["layers"]
        for h in range(heads):
            kinds = ("weight", "bias")
            later = [{k: head.tensors[f"hydra_mlp.{h}.{b}.1.linear.{k}"] for k in kinds} for b in range(1, layers)]
            refuse_different_blocks(later, self.name)
        tensors = {self.rename(name, settings): x for name, x in head.tensors.items()}
        dtype = head.tensors["hydra_mlp.0.0.linear.weight"].dtype
        model = with_weights(target)
        if not settings.get("own_lm_head", False):
            changed = any(
                getattr(target.config, key, None)
                for key in ("logit_scale", "logits_scaling", "final_logit_softcapping")
            )
            require(not changed, where, "cannot express a target that scales or caps its logits")
            rows = model.lm_head_weight.detach().to("cpu", dtype)
            for h in range(heads):
                weight, bias = self._matrix(h, settings)
                tensors |= {weight: rows.clone(), bias: rows.new_zeros(len(rows))}
        if prefix:
            tensors[UNUSED] = model.embedding.weight.detach().to("cpu", dtype)
        config = {
            "hydra_num_heads": heads,
            "hydra_num_layers": layers,
            "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": target.name,
        }
        return Checkpoint(config, tensors)


FORMAT = Original()
