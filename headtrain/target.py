"""The frozen target: loading, hidden states of chosen layers, embedding, final norm and lm_head."""

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from decode.capture import Capture
from decode.errors import UserError, one_line
from decode.linear import FastLinears
from headtrain.masks import prompt_ids
from headtrain.packing import packed_states

DTYPES: dict[str, Any] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "auto": "auto",
}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class Target:
    """A frozen causal language model with its tokenizer (None for a target that only tests use)."""

    def __init__(
        self, model: Any, tokenizer: Any = None, name: str = "", template_kwargs: dict[str, Any] | None = None
    ):
        self.model: Any = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.template_kwargs = template_kwargs or {}  # variables of the chat template that the head was trained with
        self.config: Any = self.model.config.get_text_config()
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.fast_linears = FastLinears(self.model)
        self._home: torch.device | None = None  # of batches and heads, where the model spans several devices
        self._copies: dict[str, Any] = {}  # on that device

    @classmethod
    def load(
        cls,
        model: str,
        dtype: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        device: torch.device | str = "cpu",
        device_map: str | None = None,
    ) -> "Target":
        """Load from a folder or a Hub name. Raises UserError when the folder lacks a config, weights or a tokenizer.

        With `device_map` transformers spreads the model over all devices; states and heads still live on `device`.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = Path(model).expanduser()
        if not folder.exists() and not HUB_NAME.fullmatch(model):
            raise UserError(f"target: {model} is neither a folder nor a Hub name such as org/name")
        model = str(folder) if folder.exists() else model
        if folder.exists() and not (folder / "config.json").is_file():
            raise UserError(f"target.model: {model} has no config.json; give a transformers model folder or a Hub name")
        options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            tokenizer = AutoTokenizer.from_pretrained(model, **options)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"target.model: no tokenizer in {model} ({one_line(error)}); save one there") from error
        try:
            result: Any = AutoModelForCausalLM.from_pretrained(
                model, dtype=DTYPES[dtype], output_loading_info=True, device_map=device_map, **options
            )
            loaded, found = result
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UserError(f"target.model: cannot load {model} ({one_line(error)})") from error
        if missing := sorted(found["missing_keys"]):  # transformers would fill them with random numbers
            raise UserError(
                f"target.model: {model} lacks {len(missing)} weights, such as {missing[0]}; give a complete folder"
            )
        if device_map is None:
            return cls(loaded.to(torch.device(device)), tokenizer, name=model)
        if any(parameter.is_meta for parameter in loaded.parameters()):  # left on the disk or moved there and back
            raise UserError(f"target.device_map: {model} does not fit on the devices here; use more of them")
        target = cls(loaded, tokenizer, name=model)
        target._home = torch.empty(0, device=device).device  # cuda:0 for cuda, as weights name it
        return target

    @property
    def embedding(self) -> nn.Embedding:
        return self._at_home("embedding", self.model.get_input_embeddings())

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, H]; the embedding's own tensor when the two are tied."""
        return self._at_home("lm_head", self.model.get_output_embeddings()).weight

    def _at_home(self, name: str, module: Any) -> Any:
        """The module itself, or a copy of it, made once, where it lies on another device than the heads."""
        if self._home is None or module.weight.device == self._home:
            return module
        if name not in self._copies:
            from accelerate.hooks import remove_hook_from_module

            self._copies[name] = remove_hook_from_module(copy.deepcopy(module)).to(self._home)
        return self._copies[name]

    @property
    def norm(self) -> nn.Module:
        """The norm between the last layer and lm_head."""
        for name in FINAL_NORMS:
            if hasattr(self.model.base_model, name):
                return getattr(self.model.base_model, name)
        raise AssertionError(f"{type(self.model).__name__} has no final norm under {FINAL_NORMS}")

    @property
    def vocab_size(self) -> int:
        return self.lm_head_weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.lm_head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head_weight.dtype

    def logits(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """Float32 logits of `hidden` [..., H] over the rows of `weight` [V', H] (default: the whole vocabulary)."""
        logits = nn.functional.linear(hidden, self.lm_head_weight if weight is None else weight).float()
        return self.finish_logits(logits)

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What some targets do behind lm_head: a scale (Cohere, Granite), a soft cap (Gemma)."""
        if scale := getattr(self.config, "logit_scale", None):
            logits = logits * scale
        if divisor := getattr(self.config, "logits_scaling", None):
            logits = logits / divisor
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation up to and including the generation prompt."""
        return prompt_ids(self.tokenizer, messages, self.template_kwargs)

    @torch.no_grad()
    def features(
        self, input_ids: Tensor, layers: Sequence[int], documents: tuple[int, ...] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features [B, T, F] of the boundaries `layers` and the final hidden state [B, T, H] after the norm.

        `input_ids` [B, T] is right padded: under a causal mask the padding changes nothing before it.
        `documents`: lengths of the conversations packed into the one row, None for a conversation a row.
        """
        with Capture(self.model, layers) as capture, self.fast_linears():
            if documents is not None:
                hidden = packed_states(self.model, input_ids, documents)
            else:
                hidden = self.model.base_model(input_ids=input_ids, use_cache=False)[0]
            return capture.take().to(self.device), hidden.to(self.device)
