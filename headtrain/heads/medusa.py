"""Medusa-1 (arXiv 2401.10774): independent residual heads on the target's last hidden state, over its own lm_head.

Head i (0-based) reads the hidden state of position t and predicts x_{t+2+i}: the target itself predicts x_{t+1}. It is
taught by the target's distribution at position t+1+i, and counts if the predicted token is trained. Only the residual
blocks are trained and saved, or with `own_lm_head` a matrix of logits for each head too. Parameter names are those of
the published checkpoints.
"""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from decode.gpu import runs_kernels
from headtrain.heads.base import Batch, Head, HeadConfig, HeadLoss
from headtrain.layers import BorrowedVocabulary
from headtrain.losses import LossName, distill, step_weights, teacher_logits
from headtrain.recurrent import predicting_slots, take_last
from headtrain.target import Target


class MedusaConfig(HeadConfig):
    heads: int = Field(4, ge=1, le=16, description="heads, one for each draft depth")
    layers: int = Field(1, ge=1, le=8, description="residual blocks of a head")
    decay: float = Field(0.8, gt=0, le=1, description="weight decay^i of head i")
    loss: LossName = Field("kl", description="distillation loss")
    vocabulary: int | None = Field(None, description="draft vocabulary size; null: the target's whole vocabulary")
    own_lm_head: bool = Field(False, description="each head trains a copy of lm_head; else all go through the target's")


class Block(nn.Module):
    """y = v + SiLU(W v + b), the identity at the start: each head begins as the target's own next-token prediction."""

    def __init__(self, hidden: int):
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, v: Tensor) -> Tensor:
        return v + nn.functional.silu(self.linear(v))


class Medusa(BorrowedVocabulary, Head):
    Config = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, target: Target, vocabulary: Tensor | None):
        super().__init__()
        self.config = config
        self.target_layers = (target.num_layers,)
        self.max_depth = config.heads
        size = target.vocab_size if vocabulary is None else len(vocabulary)
        for i in range(config.heads):
            blocks: list[nn.Module] = [Block(target.hidden_size) for _ in range(config.layers)]
            own = [nn.Linear(target.hidden_size, size, bias=False)] if config.own_lm_head else []
            self.add_module(str(i), nn.Sequential(*blocks, *own))
        self.borrow(target, vocabulary)

    @classmethod
    def vocabulary_size(cls, config: MedusaConfig) -> int | None:
        return config.vocabulary

    @classmethod
    def build(cls, config: MedusaConfig, target: Target, vocabulary: Tensor | None = None) -> "Medusa":
        head = cls(config, target, None if vocabulary is None else vocabulary.to(target.device))
        if config.own_lm_head:
            for i in range(config.heads):
                head.lm_head_rows(i).data.copy_(head.target_rows().detach())
        return head

    @classmethod
    def restore(
        cls, config: MedusaConfig, layers: list[int], target: Target, shapes: dict[str, tuple[int, ...]]
    ) -> "Medusa":
        size = shapes.get("token_map")
        return cls(config, target, None if size is None else torch.zeros(size, dtype=torch.int64, device=target.device))

    @property
    def num_heads(self) -> int:
        return self.config.heads

    def states(self, i: int, v: Tensor) -> Tensor:
        """What head i gives to lm_head; v, result [.., H]."""
        blocks: Any = self._modules[str(i)]
        return self._scaled(blocks[: self.config.layers](v.to(blocks[0].linear.weight.dtype)))

    def _scaled(self, v: Tensor) -> Tensor:
        """Some targets scale their logits; the scale is linear, so it can stand in front of their lm_head."""
        if self.config.own_lm_head:
            return v
        config = self.target.config
        return v * ((getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1))

    def stacked_blocks(self) -> list[tuple[Tensor, Tensor]]:
        """Weights [K, H, H] and biases [K, H] of the blocks of all heads, a pair for each layer."""
        heads: Any = self._modules
        layers = [[heads[str(i)][j].linear for i in range(self.num_heads)] for j in range(self.config.layers)]
        return [(torch.stack([x.weight for x in row]), torch.stack([x.bias for x in row])) for row in layers]

    def lm_head_rows(self, i: int) -> Tensor:
        """[Vd, H] rows that give the logits of head i."""
        heads: Any = self._modules
        return heads[str(i)][-1].weight if self.config.own_lm_head else self.target_rows()

    def packs(self) -> bool:
        return True

    def loss(self, batch: Batch, target: Target) -> HeadLoss:
        """Sum over heads of decay^i times the cross entropy with the target, renormalised on the draft vocabulary."""
        # a head's query stands where a slot would
        b, j, queries, known = predicting_slots(batch.loss_mask, self.num_heads, batch.documents)
        student = torch.stack(  # [K, N, H]
            [self.states(i, batch.features[b, queries[i]]) for i in range(self.num_heads)]
        )
        teacher = teacher_logits(target, batch.hidden[b, j], self.vocabulary)
        weights = step_weights(self.num_heads, self.config.decay, j.device)[:, None] * known
        groups = [[i] for i in range(self.num_heads)] if self.config.own_lm_head else [list(range(self.num_heads))]
        parts = [distill(student[g], self.lm_head_rows(g[0]), teacher, weights[g], self.config.loss) for g in groups]
        total = torch.stack([part for part, _ in parts]).sum()
        return HeadLoss(total, torch.cat([acceptance for _, acceptance in parts]), known.sum(1))

    @torch.no_grad()
    def begin(self, features: Tensor, tokens: Tensor, lengths: Tensor, capacity: int) -> tuple["State", Tensor]:
        own = self.config.own_lm_head
        blocks = self.stacked_blocks() if runs_kernels(features) else []
        state = State([self.lm_head_rows(i) for i in range(self.num_heads if own else 1)], blocks)
        return state, self._start(state, features, lengths)

    @torch.no_grad()
    def extend(self, state: "State", tokens: Tensor, parents: Tensor) -> Tensor:
        state.level += 1
        assert state.level < self.num_heads, f"level {state.level}: expected below {self.num_heads}, one for each head"
        return state.logits[:, state.level : state.level + 1]

    @torch.no_grad()
    def commit(self, state: "State", features: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        return self._start(state, features, counts)

    def select(self, state: "State", rows: Tensor) -> None:
        state.logits = state.logits[rows]

    def _start(self, state: "State", features: Tensor, counts: Tensor) -> Tensor:
        """All heads at each row's last position; features [B, m, H]. Returns logits [B, 1, Vd] of the first level."""
        v = take_last(features, counts)  # [B, 1, H]
        if state.blocks:
            from headtrain_kernels.grouped_residual import grouped_residual

            x = v[:, 0].to(state.blocks[0][0].dtype)  # [B, H], behind the first block [K, B, H]
            for weight, bias in state.blocks:
                x = grouped_residual(x, weight, bias)
            states = self._scaled(x.transpose(0, 1))
        else:
            states = torch.cat([self.states(i, v) for i in range(self.num_heads)], 1)  # [B, K, H]
        if self.config.own_lm_head:
            each = [nn.functional.linear(states[:, i], rows.to(states.dtype)) for i, rows in enumerate(state.rows)]
            logits = torch.stack(each, 1)
        else:
            logits = nn.functional.linear(states, state.rows[0].to(states.dtype))
        state.level, state.logits = 0, logits.float()
        return state.logits[:, :1]


@dataclass
class State:
    """What drafting keeps between calls: rows [Vd, H] of lm_head, one matrix or one a head, `stacked_blocks` where the
    kernel runs them, and logits [B, K, Vd] of all heads at the last position."""

    rows: list[Tensor]
    blocks: list[tuple[Tensor, Tensor]]
    logits: Tensor = None  # type: ignore[assignment]
    level: int = 0
