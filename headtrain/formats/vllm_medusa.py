"""The Medusa layout of vLLM (releases before 0.33): `blocks.{head}.layers.{block}.*`, `lm_heads.{head}.weight`, and
`token_map`, absolute target ids of a smaller draft vocabulary.

With `original_lm_head` one matrix serves all heads. Without `medusa_fc_bias` the biases would be dropped silently.
"""

import re
from typing import Any

import torch
from torch import Tensor

from decode.errors import UserError
from headtrain.formats.base import Checkpoint, Format, Portable, require
from headtrain.formats.medusa import count
from headtrain.formats.outline import with_weights
from headtrain.target import Target

BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
OURS = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


class VLLM(Format):
    name = "vllm-medusa"
    families = ("medusa",)

    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        return any(BLOCK.fullmatch(name) for name in names)

    def rename(self, name: str, settings: dict[str, Any]) -> str:
        match = OURS.fullmatch(name)
        if match is None:
            return name
        head, block, linear, kind = match.groups()
        return f"blocks.{head}.layers.{block}.{kind}" if linear else f"lm_heads.{head}.weight"

    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        where, config, tensors = checkpoint.where, checkpoint.config, dict(checkpoint.tensors)
        pairs = [(int(m[1]), int(m[2])) for name in tensors if (m := BLOCK.fullmatch(name))]
        require(bool(pairs), where, "missing blocks.0.layers.0.weight")
        heads, layers = count(pairs, checkpoint, ("num_heads", "num_hidden_layers"))
        biased = any(name.startswith("blocks.") and name.endswith(".bias") for name in tensors)
        said = bool(config.get("medusa_fc_bias", False))
        require(said == biased, where, f"medusa_fc_bias is {said}, but biases are {'there' if biased else 'missing'}")
        if not biased:
            for h, b in pairs:
                weight = tensors[f"blocks.{h}.layers.{b}.weight"]
                tensors[f"blocks.{h}.layers.{b}.bias"] = weight.new_zeros(weight.shape[0])
        size = target.vocab_size
        order = self._read_map(tensors, config, size, where)
        rows = size if order is None else len(order)
        settings: dict[str, Any] = {"heads": heads, "layers": layers, "vocabulary": None if order is None else rows}
        if config.get("original_lm_head"):
            shared = tensors.pop("lm_heads.0.weight", tensors.pop("lm_head.weight", None))
            require(shared is not None, where, "missing lm_heads.0.weight")
            assert shared is not None
            found = self._sort_rows(shared, order, size)
            expected = self._target_rows(target, tensors.get("token_map"), found.dtype)
            same = found.shape == expected.shape and torch.equal(found, expected)
            require(same, where, f"original_lm_head is true, but lm_heads.0.weight is not the lm_head of {target.name}")
            self._check_scale(config, target, where)
        else:
            settings["own_lm_head"] = True
            for h in range(heads):
                if (own := tensors.get(f"lm_heads.{h}.weight")) is not None:
                    tensors[f"lm_heads.{h}.weight"] = self._sort_rows(own, order, size)
            scale = config.get("logit_scale", 1.0)
            require(scale == 1.0, where, f"logit_scale is {scale}; heads with their own lm_head have none here")
        return Portable("medusa", settings, [target.num_layers], tensors)

    def _read_map(self, tensors: dict[str, Tensor], config: dict[str, Any], size: int, where: Any) -> Tensor | None:
        """Puts ascending ids into the tensors; returns the order [Vd] in which the file's rows then stand, or None."""
        truncated = config.get("truncated_vocab_size", size)
        if "token_map" not in tensors:
            require(
                truncated == size, where, f"truncated_vocab_size is {truncated}, but no token_map says which tokens"
            )
            return None
        ids = tensors["token_map"].long()
        good = ids.dim() == 1 and len(ids) == truncated < size and len(ids.unique()) == len(ids)
        good = good and int(ids.min()) >= 0 and int(ids.max()) < size
        require(good, where, f"token_map {list(ids.shape)} is not {truncated} different ids below {size}")
        tensors["token_map"], order = ids.sort()
        return order

    def _sort_rows(self, weight: Tensor, order: Tensor | None, size: int) -> Tensor:
        """Rows of the draft's columns in ascending order of their tokens."""
        if order is None or len(weight) == size:
            return weight
        return weight[order]

    def _target_rows(self, target: Target, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        weight = with_weights(target).lm_head_weight.detach().to("cpu", dtype)
        return weight if ids is None else weight[ids]

    def _scale(self, target: Target) -> float:
        """What the target multiplies its logits by."""
        config = target.config
        return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

    def _check_scale(self, config: dict[str, Any], target: Target, where: Any) -> None:
        said, expected = config.get("logit_scale", 1.0), self._scale(target)
        if abs(said - expected) > 1e-6:
            raise UserError(f"{where}: logit_scale is {said}, but {target.name} scales its logits by {expected}")

    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        tensors = {self.rename(name, head.settings): x for name, x in head.tensors.items()}
        ids = head.tensors.get("token_map")
        own = head.settings.get("own_lm_head", False)
        dtype = head.tensors["0.0.linear.weight"].dtype
        if not own:
            tensors["lm_heads.0.weight"] = self._target_rows(target, ids, dtype)
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "truncated_vocab_size": target.vocab_size if ids is None else len(ids),
            "num_heads": head.settings["heads"],
            "num_hidden_layers": head.settings["layers"],
            "medusa_fc_bias": True,
            "original_lm_head": not own,
            "logit_scale": 1.0 if own else self._scale(target),
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        return Checkpoint(config, tensors, warnings=["vLLM 0.33 no longer serves this method; earlier releases do"])


FORMAT = VLLM()
