"""The target without its weights: what conversions need of it is its config and its tokenizer."""

from pathlib import Path
from typing import Any

import torch

from decode.errors import UserError, one_line
from headtrain.layers import Geometry, LayerConfig
from headtrain.target import Target


def outline(name: str) -> Target:
    """A target whose tensors have shapes and no data. Raises UserError for what is no target."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = Path(name).expanduser()
    place = str(folder) if folder.exists() else name
    try:
        config = AutoConfig.from_pretrained(place)
        tokenizer = AutoTokenizer.from_pretrained(place)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--target: {name} is no target that can be read ({one_line(error)})") from error
    return Target(model, tokenizer, name=place)


def with_weights(target: Target) -> Target:
    """The same target with its weights, in the dtype they are saved in."""
    return Target.load(target.name, "auto") if target.device.type == "meta" else target


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a config in the new spelling, from either: `rope_parameters`, or `rope_theta` and
    `rope_scaling`. Raises ValueError where the two disagree."""
    new = config.get("rope_parameters")
    if isinstance(new, dict) and "full_attention" in new:
        new = new["full_attention"]
    scaling = dict(config.get("rope_scaling") or {})
    scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type")) or "default"
    old = {"rope_theta": config.get("rope_theta", 10000.0), **scaling}
    if not new:
        return _plain(old)
    if "rope_theta" in config and _plain(old) != _plain({"rope_theta": 10000.0, **new}):
        raise ValueError(f"rope_parameters {new} and rope_theta with rope_scaling {old} disagree")
    return _plain({"rope_theta": 10000.0, "rope_type": "default", **new})


def _plain(rope: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing."""
    idle = {"partial_rotary_factor": 1.0}
    return {key: value for key, value in rope.items() if value is not None and idle.get(key) != value}


def rope_keys(target: Target, own: dict[str, Any] | None = None) -> dict[str, Any]:
    """The target's rotary parameters, or the layer's own, in both spellings, for readers of either."""
    rope = rope_of({"rope_parameters": dict(own or target.config.rope_parameters)})
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" and len(scaling) == 1 else scaling,
    }


def layer_keys(target: Target, dtype: torch.dtype, own: dict[str, Any] | None = None) -> dict[str, Any]:
    """A Llama config of one layer in the target's geometry, as draft heads are published. `own`: where it differs."""
    changes = LayerConfig(**own) if own else None
    g, config = Geometry.of(target, changes), target.config
    tokens = {key: getattr(config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "model_type": "llama",
        **tokens,
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "intermediate_size": g.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": g.num_heads,
        "num_key_value_heads": g.num_kv_heads,
        "head_dim": g.head_dim,
        "rms_norm_eps": g.eps,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **rope_keys(target, changes.rope if changes else None),
    }


def own_layer(config: dict[str, Any], target: Target, where: Path) -> dict[str, Any]:
    """Where the layer that a config describes differs from the target's, as the settings of `LayerConfig`."""
    g = Geometry.of(target)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"{where}: hidden_act is {activation}; heads here use silu")
    hidden, heads = config.get("hidden_size", g.hidden), config.get("num_attention_heads", g.num_heads)
    try:
        found: dict[str, Any] = {
            "hidden": hidden,
            "intermediate": config.get("intermediate_size", g.intermediate),
            "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or hidden // heads,
            "eps": config.get("rms_norm_eps", 1e-6),
        }
        rope, expected = rope_of(config), rope_of({"rope_parameters": dict(target.config.rope_parameters)})
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{where}: {error}; correct config.json") from error
    own = {key: value for key, value in found.items() if not _same(value, getattr(g, key))}
    return own | ({} if rope == expected else {"rope": rope})


def _same(a: Any, b: Any) -> bool:
    return abs(a - b) < 1e-3 * abs(b) if isinstance(a, float) and isinstance(b, float) else a == b


def check_layer(config: dict[str, Any], target: Target, where: Path) -> None:
    """Raises UserError unless the layer that a config describes is exactly the target's."""
    if own := own_layer(config, target, where):
        key, value = next(iter(own.items()))
        raise UserError(
            f"{where}: its layer differs from that of {target.name}: {key} is {value}; a head of this family takes its"
            " layer from the target, give its own --target"
        )
