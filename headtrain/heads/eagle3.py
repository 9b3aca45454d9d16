"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused target features, trained by the training-time test.

Slot t consumes token x_{t+1} and the fused feature g_t of position t, so it sits one token ahead of its feature. At
draft step k it predicts x_{t+2+k}, is taught by the target's distribution at position t+1+k, and counts if the
predicted token is trained. Parameter names are those of the published checkpoints.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from headtrain.heads.base import Batch, HeadConfig, HeadLoss
from headtrain.layers import MLP, Attention, Geometry, Norm
from headtrain.losses import LossName, distill, step_weights, teacher_logits
from headtrain.recurrent import Projected, RecurrentHead, predicting_slots
from headtrain.target import Target


class Eagle3Config(HeadConfig):
    layers: list[int] | None = Field(None, description="boundaries of the fused features; null: early, middle and late")
    vocabulary: int | None = Field(32000, description="draft vocabulary size; null: the target's whole vocabulary")
    steps: int = Field(7, ge=1, le=16, description="draft steps of the training-time test")
    decay: float = Field(0.8, gt=0, le=1, description="weight decay^k of draft step k")
    loss: LossName = Field("kl", description="distillation loss")
    feature_noise: float = Field(0.0, ge=0, description="uniform noise of this standard deviation on the features")


def default_layers(num_layers: int) -> list[int]:
    """Early, middle and late boundaries [2, n//2, n-3]; evenly spread where the target is too shallow for that."""
    layers = [2, num_layers // 2, num_layers - 3]
    if layers[0] < layers[1] < layers[2]:
        return layers
    return sorted({max(1, round(num_layers * share)) for share in (1 / 3, 2 / 3, 1)})


class Layer(nn.Module):
    """One decoder layer on cat(norm(embedding), norm(feature)); the residual is the feature, un-normed."""

    def __init__(self, g: Geometry):
        super().__init__()
        self.input_layernorm = Norm(g.hidden, g.eps)  # of the token embedding
        self.hidden_norm = Norm(g.hidden, g.eps)  # of the feature
        self.self_attn = Attention(g, 2 * g.hidden)
        self.post_attention_layernorm = Norm(g.hidden, g.eps)
        self.mlp = MLP(g)

    def project(self, embedding: Tensor, u: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat([self.input_layernorm(embedding), self.hidden_norm(u)], -1)  # [B, T, 2H]
        return self.self_attn.project(x, rotary)

    def finish(self, u: Tensor, attended: Tensor) -> Tensor:
        """attended [B, nh, T, d] -> the layer's output [B, T, H]."""
        u = u + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return u + self.mlp(self.post_attention_layernorm(u))


class Eagle3(RecurrentHead):
    Config = Eagle3Config
    config: Eagle3Config
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, g: Geometry, num_features: int, vocab_size: int, draft_vocab_size: int):
        super().__init__()
        self.config, self.g = config, g
        self.fc = nn.Linear(num_features * g.hidden, g.hidden, bias=False)
        self.midlayer = Layer(g)
        self.norm = Norm(g.hidden, g.eps)
        self.lm_head = nn.Linear(g.hidden, draft_vocab_size, bias=False)
        # Published layout: target id = draft id + d2t; t2d marks the target ids that the draft knows.
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(vocab_size, dtype=torch.bool))

    @classmethod
    def vocabulary_size(cls, config: Eagle3Config) -> int | None:
        return config.vocabulary

    @classmethod
    def build(cls, config: Eagle3Config, target: Target, vocabulary: Tensor | None = None) -> "Eagle3":
        layers = config.layers or default_layers(target.num_layers)
        rows = target.lm_head_weight if vocabulary is None else target.lm_head_weight[vocabulary]
        head = cls(config, Geometry.of(target), len(layers), target.vocab_size, len(rows))
        head.target_layers = tuple(layers)
        head.attach(target)
        head.lm_head.weight.data.copy_(rows.detach())
        if vocabulary is not None:
            head.set_vocabulary(vocabulary)
        return head

    @classmethod
    def restore(
        cls, config: Eagle3Config, layers: list[int], target: Target, shapes: dict[str, tuple[int, ...]]
    ) -> "Eagle3":
        vocab_size, draft_vocab_size = (shapes.get(name, (target.vocab_size,))[0] for name in ("t2d", "d2t"))
        head = cls(config, Geometry.of(target), len(layers), vocab_size, draft_vocab_size)
        head.target_layers = tuple(layers)
        head.attach(target)
        return head

    def set_vocabulary(self, vocabulary: Tensor) -> None:
        """vocabulary [Vd]: strictly ascending target ids of the draft's columns."""
        self.d2t.copy_(vocabulary - torch.arange(len(vocabulary), device=vocabulary.device))
        self.t2d.zero_()[vocabulary] = True

    @property
    def vocabulary(self) -> Tensor | None:
        if len(self.d2t) == len(self.t2d):
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def enter(self, features: Tensor) -> Tensor:
        features = features.to(self.fc.weight.dtype)
        if self.config.feature_noise and self.training:
            features = features + (torch.rand_like(features) - 0.5) * (12**0.5 * self.config.feature_noise)
        return self.fc(features)

    def project(self, embedding: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor]) -> Projected:
        return state, *self.midlayer.project(embedding, state, rotary)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self.midlayer.finish(residual, attended)

    def logits(self, state: Tensor) -> Tensor:
        return self.lm_head(self.norm(state)).float()

    def loss(self, batch: Batch, target: Target) -> HeadLoss:
        """Sum over draft steps of decay^k times the cross entropy with the target, renormalised on the draft vocabulary."""
        steps = self.config.steps
        b, j, slots, known = predicting_slots(batch.loss_mask, steps)
        states = torch.stack(self.unroll(batch, steps))  # [K, B, T - 1, H]
        total, acceptance = distill(
            self.norm(states[torch.arange(steps, device=j.device)[:, None], b, slots]),  # [K, N, H]
            self.lm_head.weight,
            teacher_logits(target, batch.hidden[b, j], self.vocabulary),
            step_weights(steps, self.config.decay, j.device)[:, None] * known,
            self.config.loss,
        )
        return HeadLoss(total, acceptance, known.sum(1))
