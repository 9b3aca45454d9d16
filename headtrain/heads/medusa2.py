"""Medusa-2 (arXiv 2401.10774): Medusa heads and a low-rank adapter of the target (LoRA, arXiv 2106.09685), trained jointly.

In the first share of the steps only the heads learn. Behind it the adapter learns too, from the heads' losses and from a
base term on every trained token: divergence from the frozen target, or cross entropy with the text. The adapter sits
in the target's own modules, so building or loading such a head changes the target: decoding is exact against the
adapted target. A target has one adapter; a head that is loaded later replaces it. lm_head stays frozen, because the
heads go through it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from decode.errors import UserError
from headtrain.checkpoint import save_head
from headtrain.heads.base import Batch, HeadLoss
from headtrain.heads.medusa import Medusa, MedusaConfig
from headtrain.losses import distill, teacher_logits, token_teacher
from headtrain.target import Target

PARTS = ("lora_A", "lora_B")


class Medusa2Config(MedusaConfig):
    heads_first: float = Field(0.5, ge=0, le=1, description="share of the steps that trains the heads alone")
    head_weight: float = Field(0.2, ge=0, description="weight of the heads' losses beside the base term")
    base: Literal["kl", "token"] = Field("kl", description="base term: stay near the frozen target, or near the text")
    rank: int = Field(32, ge=1, description="rank of the adapter")
    alpha: float = Field(16.0, gt=0, description="the adapter's output is scaled by alpha / rank")
    dropout: float = Field(0.05, ge=0, lt=1, description="dropout in front of the adapter")
    modules: list[str] | None = Field(None, description="names of the adapted linear layers; null: all but lm_head")


class Medusa2(Medusa):
    Config: ClassVar[Any] = Medusa2Config
    config: Medusa2Config
    shards = False  # the adapter is used where it sits, in the target

    def __init__(self, config: Medusa2Config, target: Target, vocabulary: Tensor | None):
        if getattr(target.config, "final_logit_softcapping", None):
            raise UserError(
                "head.family: the target soft-caps its logits, which the base term does not know; use medusa"
            )
        super().__init__(config, target, vocabulary)
        self.lora = add_adapter(target, config)  # layers of the target by name
        weights = {
            f"{name}/{part}": getattr(lora, part)["default"].weight for name, lora in self.lora for part in PARTS
        }
        self.adapter = nn.ParameterDict({name.replace(".", "/"): weight for name, weight in weights.items()})

    def packs(self) -> bool:
        return False

    def loss(self, batch: Batch, target: Target) -> HeadLoss:
        """The heads' loss; behind `heads_first` the base term plus head_weight * decay times it.

        Both are sums over tokens: of the base term over all that are trained, each taught at the position before it.
        """
        if self.progress <= self.config.heads_first and self.training:
            out = super().loss(batch, target)
            # A distributed wrapper wants to see every parameter used.
            idle = torch.stack([weight.sum() for weight in self.adapter.values()]).sum() * 0
            return replace(out, total=out.total + idle)
        hidden = self.adapted(batch.input_ids)  # [B, T, H], with gradients
        heads = super().loss(replace(batch, features=hidden, hidden=hidden.detach()), target)
        base = self.base_term(batch, hidden, target)
        return replace(heads, total=base + self.config.head_weight * self.config.decay * heads.total)

    def base_term(self, batch: Batch, hidden: Tensor, target: Target) -> Tensor:
        b, i = batch.loss_mask[:, 1:].nonzero(as_tuple=True)  # position i predicts the trained token i + 1
        if self.config.base == "kl":
            with torch.no_grad(), self.frozen():
                teacher = teacher_logits(target, self.run_target(batch.input_ids)[b, i], None)
        else:
            teacher = token_teacher(batch.input_ids[b, i + 1], target.vocab_size)
        config = target.config
        scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        weights = torch.ones(1, len(b), device=hidden.device)
        return distill(scale * hidden[b, i][None], target.lm_head_weight, teacher, weights)[0]

    def run_target(self, input_ids: Tensor) -> Tensor:
        """The target's last hidden states [B, T, H]; rows are right padded."""
        with self.target.fast_linears():
            return self.target.model.base_model(input_ids=input_ids, use_cache=False)[0]

    def adapted(self, input_ids: Tensor) -> Tensor:
        """The same with the adapter's dropout while training; elsewhere the target is as it decodes."""
        dropouts = [lora.lora_dropout for _, lora in self.lora]
        for dropout in dropouts:
            dropout.train(self.training)
        try:
            return self.run_target(input_ids)
        finally:
            for dropout in dropouts:
                dropout.eval()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While entered, the target is the one that was loaded."""
        for _, lora in self.lora:
            lora.enable_adapters(False)
        try:
            yield
        finally:
            for _, lora in self.lora:
                lora.enable_adapters(True)

    def save_beside(self, folder: Path, dtype: torch.dtype | None) -> None:
        """`adapter/` in the layout of peft."""
        folder = folder / "adapter"
        folder.mkdir()
        tensors = {
            f"base_model.model.{name}.{part}.weight": getattr(lora, part)["default"].weight.detach()
            for name, lora in self.lora
            for part in PARTS
        }
        tensors = {name: x.to("cpu", dtype or x.dtype).contiguous() for name, x in tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.target.name,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "lora_dropout": self.config.dropout,
            "target_modules": [name for name, _ in self.lora],
            "bias": "none",
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

    def merge(self, folder: Path) -> None:
        """`target`: a plain model with the adapter in its weights; `head`: plain Medusa heads for it.

        The target in memory is merged too, and this head is of no further use.
        """
        for _, lora in self.lora:
            lora.merge()
        remove_adapter(self.target.model)
        self.target.model.save_pretrained(folder / "target")
        if self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder / "target")
        self.target.name = str(folder / "target")
        config = MedusaConfig(**{name: getattr(self.config, name) for name in MedusaConfig.model_fields})
        plain = Medusa(config, self.target, self.token_map).to(self.target.device)
        plain.load_state_dict({k: v for k, v in self.state_dict().items() if not k.startswith("adapter.")})
        save_head(folder / "head", plain, "medusa", self.target, dtype=self.target.dtype)


def add_adapter(target: Target, config: Medusa2Config) -> list[tuple[str, Any]]:
    """Put a fresh adapter, which changes nothing yet, into the target's linear layers; returns them by name.

    Raises UserError for a module that the target does not have.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise UserError(f"head.family: this one needs peft ({error}); pip install peft") from error
    model = target.model
    remove_adapter(model)
    output = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not output]
    known = sorted({name.rpartition(".")[2] for name in linear})
    chosen = linear
    if config.modules is not None:
        for wanted in config.modules:
            if not any(matches(name, wanted) for name in linear):
                raise UserError(
                    f"head.modules: {wanted!r} is no linear layer that can be adapted; the target has {', '.join(known)}"
                )
        chosen = [name for name in linear if any(matches(name, wanted) for wanted in config.modules)]
    lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=chosen)  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(0)  # a cache of hidden states knows the target by its weights: each fresh adapter is the same
        inject_adapter_in_model(lora, model)
    model.eval()
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]
    assert [name for name, _ in layers] == chosen, f"adapted {len(layers)} layers, expected {len(chosen)}"
    for _, layer in layers:
        for part in PARTS:
            getattr(layer, part).float()
    return layers


def remove_adapter(model: Any) -> None:
    """Put the linear layers back where an adapter stands around them."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, module.get_base_layer())
    vars(model).pop("peft_config", None)


def matches(name: str, wanted: str) -> bool:
    """A module is named by its path or by the end of it."""
    return name == wanted or name.endswith(f".{wanted}")
