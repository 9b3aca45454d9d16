"""Tiny random targets, one a family, and a tiny tokenizer: seeded, fp32, built in milliseconds, no download."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 101
CONTEXT = 1024
SHARPNESS = 0.6  # standard deviation of the output rows: a median top probability near 1/2

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**MIXTURE},
    # windows are shorter than the contexts of the tests
    "mistral": {"sliding_window": 12},
    "gemma2": {
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {"sliding_window": 20, "hidden_size": 64},
    "olmo2": {},
    "gpt_neox": {"hidden_size": 64, "num_key_value_heads": 4},
    "gpt_oss": {
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "cohere": {"logit_scale": 0.8},
}
ALIASES = {"gemma3": "gemma3_text"}


def tiny_target(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of `family` in eval mode; `changes` override fields of its config."""
    family = ALIASES.get(family, family)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        head = model.get_output_embeddings().weight
        torch.nn.init.normal_(head, std=SHARPNESS)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    return model.requires_grad_(False)
