"""The layout of speculators (0.9), which vLLM serves as it is: `layers.0.*`, boundaries, every norm flag written out.

Written flags never rely on a reader's default: those differ between speculators' classes, its trainer and vLLM.
"""

from typing import Any

from headtrain.formats.base import Checkpoint, Format, Portable, require
from headtrain.formats.fused_layer import read_head, write_head
from headtrain.target import Target

VERSION = "0.9.0"
IDS = "eagle_aux_hidden_state_layer_ids"
TOP = ("draft_vocab_size", "target_hidden_size")  # beside transformer_layer_config; the rest of a layer is inside it


class Speculators(Format):
    name = "speculators"
    families = ("eagle3",)

    def matches(self, names: set[str], config: dict[str, Any]) -> bool:
        return "speculators_model_type" in config or "speculators_config" in config

    def rename(self, name: str, settings: dict[str, Any]) -> str:
        return name.replace("midlayer.", "layers.0.", 1)

    def target_name(self, config: dict[str, Any]) -> str | None:
        return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")

    def read(self, checkpoint: Checkpoint, target: Target) -> Portable:
        config, where = checkpoint.config, checkpoint.where
        kind = config.get("speculators_model_type")
        require(kind == "eagle3", where, f"speculators_model_type {kind!r} is not read from this layout, only 'eagle3'")
        layer = config.get("transformer_layer_config")
        require(isinstance(layer, dict), where, "config.json has no transformer_layer_config")
        assert isinstance(layer, dict)
        depth, kind = layer.get("num_hidden_layers", 1), layer.get("model_type", "llama")
        require(depth == 1, where, f"has {depth} layers; a head here has one")
        require(kind == "llama", where, f"its layer is of model_type {kind}; a head here has a llama layer")
        each, joint = bool(config.get("fc_norm")), bool(config.get("norm_before_fc"))
        require(not (each and joint), where, "fc_norm and norm_before_fc exclude each other")
        flags = {
            "fusion_norm": "each" if each else "joint" if joint else None,
            "feedback": "normed" if config.get("norm_output") else "raw",
            # vLLM takes an absent flag as true, speculators' own class as false: only a written one is clear
            "normed_residual": bool(config.get("norm_before_residual", False)),
        }
        require(
            "norm_before_residual" in config, where, "norm_before_residual is absent and its readers disagree on it"
        )
        flat = layer | {key: config[key] for key in TOP if key in config}
        inner = Checkpoint(flat, checkpoint.tensors, where, checkpoint.warnings)
        return read_head(inner, target, config.get(IDS), flags)

    def write(self, head: Portable, target: Target, embedding: bool) -> Checkpoint:
        # Its own loader (0.9) leaves an absent embedding at random numbers, without an error.
        checkpoint = write_head(head, target, True, self.rename)
        layer, settings = checkpoint.config, head.settings
        top = {key: layer.pop(key) for key in TOP}
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": settings.get("steps", 3),
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        architectures = getattr(target.config, "architectures", None) or [type(target.model).__name__]
        checkpoint.config = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": VERSION,
            "dtype": layer["torch_dtype"],
            "tie_word_embeddings": False,
            **top,
            "norm_before_residual": bool(settings.get("normed_residual")),
            "norm_before_fc": settings.get("fusion_norm") == "joint",
            "fc_norm": settings.get("fusion_norm") == "each",
            "norm_output": settings.get("feedback") == "normed",
            "embed_requires_grad": bool(settings.get("own_embedding")),
            IDS: head.layers,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target.name, "architectures": architectures},
            },
            "transformer_layer_config": layer,
        }
        if head.layers[-1] == target.num_layers:
            checkpoint.warnings.append(
                f"boundary {target.num_layers} is the state behind the target's final norm here; vLLM hands on the state"
                " before that norm, so check acceptance there or train with head.layers below it"
            )
        return checkpoint


FORMAT = Speculators()
