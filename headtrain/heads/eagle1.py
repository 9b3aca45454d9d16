"""EAGLE-1 (arXiv 2401.15077), and HASS (arXiv 2408.15766) with more than one pass: one layer that guesses the next feature.

Slot t consumes token x_{t+1} and the target's last hidden state h_t, aims at h_{t+1}, and so predicts x_{t+2} through
the target's own lm_head. In pass k > 0 it consumes its own guess of pass k - 1 instead, as it will when drafting; each
pass trains by itself (its inputs are detached). Parameter names are those of the published checkpoints.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from headtrain.heads.base import Batch, HeadConfig, HeadLoss
from headtrain.layers import MLP, Attention, BorrowedVocabulary, Geometry, Norm
from headtrain.losses import FEATURE_LOSSES, FeatureLossName, distill, step_weights, teacher_logits
from headtrain.recurrent import Projected, RecurrentHead, predicting_slots
from headtrain.target import Target


class Eagle1Config(HeadConfig):
    passes: int = Field(1, ge=1, le=8, description="1 is EAGLE-1; 3 is HASS, which trains on its own guesses too")
    decay: float = Field(1.0, gt=0, le=1, description="weight decay^k of pass k")
    feature_loss: FeatureLossName = Field("smooth_l1", description="distance to the target's feature")
    feature_weight: float = Field(1.0, ge=0, description="weight of that distance")
    token_weight: float = Field(0.1, ge=0, description="weight of the cross entropy with the target")
    top_weight: float = Field(0.0, ge=0, description="weight of the cross entropy on the target's 10 likeliest tokens")
    feature_noise: float = Field(0.0, ge=0, description="uniform noise of this standard deviation on the features")
    bias: bool = Field(True, description="bias of the layer that fuses embedding and feature")
    vocabulary: int | None = Field(None, description="draft vocabulary size; null: the target's whole vocabulary")


class Layer(nn.Module):
    """A decoder layer without norm in front of its attention."""

    def __init__(self, g: Geometry):
        super().__init__()
        self.self_attn = Attention(g, g.hidden)
        self.post_attention_layernorm = Norm(g.hidden, g.eps)
        self.mlp = MLP(g)


class Eagle1(BorrowedVocabulary, RecurrentHead):
    Config = Eagle1Config
    config: Eagle1Config

    def __init__(self, config: Eagle1Config, target: Target, vocabulary: Tensor | None):
        super().__init__()
        self.config, self.g = config, Geometry.of(target)
        self.target_layers = (target.num_layers,)
        self.fc = nn.Linear(2 * self.g.hidden, self.g.hidden, bias=config.bias)
        self.layers = nn.ModuleList([Layer(self.g)])
        self.borrow(target, vocabulary)
        self.attach(target)

    @classmethod
    def vocabulary_size(cls, config: Eagle1Config) -> int | None:
        return config.vocabulary

    @classmethod
    def build(cls, config: Eagle1Config, target: Target, vocabulary: Tensor | None = None) -> "Eagle1":
        return cls(config, target, None if vocabulary is None else vocabulary.to(target.device))

    @classmethod
    def restore(
        cls, config: Eagle1Config, layers: list[int], target: Target, shapes: dict[str, tuple[int, ...]]
    ) -> "Eagle1":
        size = shapes.get("token_map")
        return cls(config, target, None if size is None else torch.zeros(size, dtype=torch.int64, device=target.device))

    def enter(self, features: Tensor) -> Tensor:
        features = features.to(self.fc.weight.dtype)
        if self.config.feature_noise and self.training:
            features = features + (torch.rand_like(features) - 0.5) * (12**0.5 * self.config.feature_noise)
        return features

    def project(self, embedding: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor]) -> Projected:
        x = self.fc(torch.cat([embedding.to(state.dtype), state], -1))
        return x, *self.layers[0].self_attn.project(x, rotary)  # type: ignore[union-attr,operator]

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        layer: Layer = self.layers[0]  # type: ignore[assignment]
        u = residual + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return u + layer.mlp(layer.post_attention_layernorm(u))

    def logits(self, state: Tensor) -> Tensor:
        return self.target.finish_logits(nn.functional.linear(state, self.target_rows().to(state.dtype)).float())

    def loss(self, batch: Batch, target: Target) -> HeadLoss:
        """Sum over passes of decay^k times the weighted sum of the features' distance and cross entropies."""
        config, passes = self.config, self.config.passes
        b, j, slots, known = predicting_slots(batch.loss_mask, passes, batch.documents)
        steps = torch.stack(self.unroll(batch, passes, detach=True))  # [K, B, T - 1, H]
        student = steps[torch.arange(passes, device=j.device)[:, None], b, slots]  # [K, N, H]
        weights = step_weights(passes, config.decay, j.device)[:, None] * known  # [K, N]
        hidden = batch.hidden[b, j]  # [N, H]
        teacher = teacher_logits(target, hidden, self.vocabulary)
        total, acceptance = distill(student, self.target_rows(), teacher, config.token_weight * weights)
        if config.top_weight:
            total = total + distill(student, self.target_rows(), teacher, config.top_weight * weights, "top")[0]
        distance = FEATURE_LOSSES[config.feature_loss](student, hidden)  # [K, N]
        total = total + config.feature_weight * (weights * distance).sum()
        return HeadLoss(total, acceptance, known.sum(1))
