"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused target features, trained by the training-time test.

Slot t consumes token x_{t+1} and the fused feature g_t of position t, so it sits one token ahead of its feature. At
draft step k it predicts x_{t+2+k}, is taught by the target's distribution at position t+1+k, and counts if the
predicted token is trained. Parameter names are those of the published checkpoints.

Presets set what public trainers do otherwise, and EAGLE-3.1 (arXiv 2605.09992); keys given beside a preset win. They
say nothing of the optimizer, and the sliding window of `speculators` (2,048 tokens) is left out.
"""

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from decode.errors import UserError
from headtrain.heads.base import Batch, HeadConfig, HeadLoss
from headtrain.layers import FusingLayer, Geometry, LayerConfig, Norm, OffsetVocabulary, rotary_embedding
from headtrain.losses import LossName, distill, step_weights, teacher_logits
from headtrain.recurrent import Projected, RecurrentHead, predicting_slots
from headtrain.target import Target

PRESETS: dict[str, dict[str, Any]] = {
    "eagle": {
        "vocabulary": 32000,
        "steps": 7,
        "decay": 0.8,
        "mask": "unshifted",
        "outside": "drop",
        "normaliser": "all",
        "lm_head": "random",
    },
    "speculators": {
        "vocabulary": None,
        "steps": 3,
        "decay": 1.0,
        "mask": "consumed",
        "lm_head": "frozen",
        "feedback": "normed",
        "fusion_norm": "joint",
        "normed_residual": True,
        "feature_noise": 0.05,
    },
    "modelopt": {"vocabulary": None, "steps": 3, "decay": 0.9, "mask": "consumed"},
    "eagle3.1": {"feedback": "normed", "fusion_norm": "each"},
}
SHIFTS = {"predicted": 0, "consumed": 1, "unshifted": 2}


class Eagle3Config(HeadConfig):
    preset: Literal["eagle", "speculators", "modelopt", "eagle3.1"] | None = Field(
        None, description="defaults of a public trainer, or of EAGLE-3.1; null: those listed here"
    )
    layers: list[int] | None = Field(None, description="boundaries of the fused features; null: early, middle and late")
    vocabulary: int | None = Field(32000, description="draft vocabulary size; null: the target's whole vocabulary")
    steps: int = Field(7, ge=1, le=16, description="draft steps of the training-time test")
    decay: float = Field(0.8, gt=0, le=1, description="weight decay^k of draft step k")
    loss: LossName = Field("kl", description="distillation loss")
    mask: Literal["predicted", "consumed", "unshifted"] = Field(
        "predicted", description="whose mask weights a prediction: that of the predicted token, or one or two before it"
    )
    outside: Literal["keep", "drop"] = Field(
        "keep", description="what to do where the target's likeliest token is outside the draft vocabulary"
    )
    normaliser: Literal["trained", "all"] = Field("trained", description="mean over the trained tokens, or over all")
    lm_head: Literal["copied", "frozen", "random"] = Field(
        "copied", description="starts from the target's rows and is trained; the same, not trained; or starts at random"
    )
    feedback: Literal["raw", "normed"] = Field("raw", description="state that the next step consumes: before its norm?")
    fusion_norm: Literal["each", "joint"] | None = Field(
        None, description="norm of the features before they are fused: one each, one over all, or null"
    )
    normed_residual: bool = Field(False, description="the layer's residual is the normed feature")
    feature_noise: float = Field(0.0, ge=0, description="uniform noise of this standard deviation on the features")
    own_embedding: bool = Field(False, description="an embedding of its own, trained and saved; else the target's")
    layer: LayerConfig | None = Field(None, description="where the layer differs from the target's; null: nowhere")

    @model_validator(mode="before")
    @classmethod
    def fill_in_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("preset") not in PRESETS:
            return given
        merged = {**PRESETS[given["preset"]], **given}
        if merged["preset"] == "modelopt" and merged["vocabulary"] is None:
            merged.setdefault("lm_head", "frozen")  # trained there only where the vocabulary is reduced
        return merged


def default_layers(num_layers: int) -> list[int]:
    """Early, middle and late boundaries [2, n//2, n-3]; evenly spread where the target is too shallow for that."""
    layers = [2, num_layers // 2, num_layers - 3]
    if layers[0] < layers[1] < layers[2]:
        return layers
    return sorted({max(1, round(num_layers * share)) for share in (1 / 3, 2 / 3, 1)})


def align(loss_mask: Tensor, mask: str) -> Tensor:
    """The mask [B, T or T + 1] under which a prediction of token i counts.

    Behind a row's last trained token there may be padding, so nothing there teaches.
    """
    num_tokens = loss_mask.shape[1]
    aligned = nn.functional.pad(loss_mask, (SHIFTS[mask], 0))[:, : num_tokens + 1]
    before_end = loss_mask.flip(1).cummax(1).values.flip(1)  # 1 up to the last trained token
    teachers = nn.functional.pad(before_end, (1, 0))[:, : aligned.shape[1]]  # token i is taught at position i - 1
    return aligned * teachers


class Eagle3(OffsetVocabulary, RecurrentHead):
    Config = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, g: Geometry, num_features: int, vocab_size: int, draft_vocab_size: int):
        super().__init__()
        self.config, self.g = config, g
        if config.fusion_norm == "each":
            self.fc_norm = nn.ModuleList(Norm(g.features, g.eps) for _ in range(num_features))
        elif config.fusion_norm == "joint":
            self.input_norm = Norm(num_features * g.features, g.eps)
        self.fc = nn.Linear(num_features * g.features, g.hidden, bias=False)
        self.midlayer = FusingLayer(g, config.normed_residual)
        self.norm = Norm(g.hidden, g.eps)
        self.lm_head = nn.Linear(g.hidden, draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(config.lm_head != "frozen")
        self.add_vocabulary(vocab_size, draft_vocab_size)

    def attach(self, target: Target) -> None:
        super().attach(target)
        object.__setattr__(self, "rotary", rotary_embedding(target, self.config.layer))
        if self.config.own_embedding:
            self.embed_tokens = nn.Embedding(len(target.embedding.weight), self.g.hidden)
            if self.g.hidden == self.g.features:
                self.embed_tokens.weight.data.copy_(target.embedding.weight.detach())
            object.__setattr__(self, "embedding", self.embed_tokens)

    @classmethod
    def vocabulary_size(cls, config: Eagle3Config) -> int | None:
        return config.vocabulary

    @classmethod
    def build(cls, config: Eagle3Config, target: Target, vocabulary: Tensor | None = None) -> "Eagle3":
        layers = config.layers or default_layers(target.num_layers)
        rows = target.lm_head_weight if vocabulary is None else target.lm_head_weight[vocabulary]
        g = Geometry.of(target, config.layer)
        if g.hidden != g.features and not (config.own_embedding and config.lm_head == "random"):
            raise UserError(
                f"head.layer.hidden: {g.hidden} is not the target's {g.features}, so nothing of it can be shared; give"
                " own_embedding: true and lm_head: random"
            )
        head = cls(config, g, len(layers), target.vocab_size, len(rows))
        head.target_layers = tuple(layers)
        head.attach(target)
        if config.lm_head != "random":
            head.lm_head.weight.data.copy_(rows.detach())
        if vocabulary is not None:
            head.set_vocabulary(vocabulary)
        return head

    @classmethod
    def restore(
        cls, config: Eagle3Config, layers: list[int], target: Target, shapes: dict[str, tuple[int, ...]]
    ) -> "Eagle3":
        vocab_size, draft_vocab_size = (shapes.get(name, (target.vocab_size,))[0] for name in ("t2d", "d2t"))
        head = cls(config, Geometry.of(target, config.layer), len(layers), vocab_size, draft_vocab_size)
        head.target_layers = tuple(layers)
        head.attach(target)
        return head

    def packs(self) -> bool:
        return self.config.mask == "predicted"  # the others look across the border of two conversations

    def tokens(self, loss_mask: Tensor) -> Tensor:
        if self.config.normaliser == "all":
            return torch.tensor(loss_mask.numel(), device=loss_mask.device)  # the mask is bytes, too small to count
        return align(loss_mask, self.config.mask)[:, 2:].sum()

    def enter(self, features: Tensor) -> Tensor:
        features = features.to(self.fc.weight.dtype)
        if self.config.feature_noise and self.training:
            features = features + (torch.rand_like(features) - 0.5) * (12**0.5 * self.config.feature_noise)
        if self.config.fusion_norm == "each":
            parts = zip(self.fc_norm, features.split(self.g.features, -1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], -1)
        elif self.config.fusion_norm == "joint":
            features = self.input_norm(features)
        return self.fc(features)

    def project(self, embedding: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor]) -> Projected:
        return self.midlayer.residual(state), *self.midlayer.project(embedding, state, rotary)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        state = self.midlayer.finish(residual, attended)
        return self.norm(state) if self.config.feedback == "normed" else state

    def readout(self, state: Tensor) -> Tensor:
        """What lm_head reads of a state that is fed back: always normed."""
        return state if self.config.feedback == "normed" else self.norm(state)

    def logits(self, state: Tensor) -> Tensor:
        return self.lm_head(self.readout(state)).float()

    def loss(self, batch: Batch, target: Target) -> HeadLoss:
        """Sum over draft steps of decay^k times the cross entropy with the target, renormalised on the draft vocabulary."""
        steps = self.config.steps
        b, j, slots, known = predicting_slots(align(batch.loss_mask, self.config.mask), steps, batch.documents)
        hidden = batch.hidden[b, j]  # [N, H]
        if self.config.outside == "drop" and self.vocabulary is not None:
            known = known & self.t2d[likeliest(target, hidden)]
        states = torch.stack(self.unroll(batch, steps))  # [K, B, T - 1, H]
        total, acceptance = distill(
            self.readout(states[torch.arange(steps, device=j.device)[:, None], b, slots]),  # [K, N, H]
            self.lm_head.weight,
            teacher_logits(target, hidden, self.vocabulary),
            step_weights(steps, self.config.decay, j.device)[:, None] * known,
            self.config.loss,
        )
        return HeadLoss(total, acceptance, known.sum(1))


@torch.no_grad()
def likeliest(target: Target, hidden: Tensor, chunk: int = 1024) -> Tensor:
    """The target's likeliest tokens [N] after `hidden` [N, H], a part at a time."""
    parts = [target.logits(part.to(target.dtype)).argmax(-1) for part in hidden.split(chunk)]
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.int64)
