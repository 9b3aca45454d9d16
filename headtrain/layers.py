"""Parts of a draft's decoder layer, in the target's own geometry."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from headtrain.target import Target


class LayerConfig(BaseModel):
    """Where a draft's layer differs from the target's; null: as the target's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    hidden: int | None = Field(None, gt=0, description="hidden size; another one needs an own embedding")
    intermediate: int | None = Field(None, gt=0, description="hidden size of the MLP")
    num_heads: int | None = Field(None, gt=0, description="attention heads")
    num_kv_heads: int | None = Field(None, gt=0, description="key and value heads")
    head_dim: int | None = Field(None, gt=0, description="size of a head")
    eps: float | None = Field(None, gt=0, description="epsilon of the norms")
    rope: dict[str, Any] | None = Field(None, description="rope_parameters of transformers: rope_type, rope_theta ...")


@dataclass(frozen=True)
class Geometry:
    """Shapes of the layer, taken from the target where the draft has none of its own."""

    features: int  # the target's hidden size
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, target: Target, own: LayerConfig | None = None) -> "Geometry":
        c = target.config
        geometry = cls(
            features=c.hidden_size,
            hidden=c.hidden_size,
            intermediate=c.intermediate_size,
            num_heads=c.num_attention_heads,
            num_kv_heads=getattr(c, "num_key_value_heads", None) or c.num_attention_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            eps=getattr(c, "rms_norm_eps", 1e-6),
        )
        changes = own.model_dump(exclude_none=True, exclude={"rope"}) if own is not None else {}
        return replace(geometry, **changes)


class Attention(nn.Module):
    """Projections and rotary embedding; who sees whom is the caller's business."""

    def __init__(self, g: Geometry, inputs: int):
        super().__init__()
        self.g = g
        self.q_proj = nn.Linear(inputs, g.num_heads * g.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, g.num_kv_heads * g.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, g.num_kv_heads * g.head_dim, bias=False)
        self.o_proj = nn.Linear(g.num_heads * g.head_dim, g.hidden, bias=False)

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, inputs] -> rotated query [B, nh, T, d] and key, and value [B, nkv, T, d]."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.g.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (part.to(q.dtype) for part in rotary)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k, v


class Norm(nn.RMSNorm):
    """RMSNorm whose float32 weight follows the activations' dtype, which the fused kernel wants."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class MLP(nn.Module):
    def __init__(self, g: Geometry):
        super().__init__()
        self.gate_proj = nn.Linear(g.hidden, g.intermediate, bias=False)
        self.up_proj = nn.Linear(g.hidden, g.intermediate, bias=False)
        self.down_proj = nn.Linear(g.intermediate, g.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class FusingLayer(nn.Module):
    """A decoder layer on cat(norm(embedding), norm(feature)); its residual is the feature, un-normed unless asked for."""

    def __init__(self, g: Geometry, normed_residual: bool = False):
        super().__init__()
        self.normed_residual = normed_residual
        self.input_layernorm = Norm(g.hidden, g.eps)  # of the token embedding
        self.hidden_norm = Norm(g.hidden, g.eps)  # of the feature
        self.self_attn = Attention(g, 2 * g.hidden)
        self.post_attention_layernorm = Norm(g.hidden, g.eps)
        self.mlp = MLP(g)

    def project(self, embedding: Tensor, u: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat([self.input_layernorm(embedding), self.hidden_norm(u)], -1)  # [B, T, 2H]
        return self.self_attn.project(x, rotary)

    def residual(self, u: Tensor) -> Tensor:
        return self.hidden_norm(u) if self.normed_residual else u

    def finish(self, u: Tensor, attended: Tensor) -> Tensor:
        """u: the residual [B, T, H]; attended [B, nh, T, d] -> the layer's output [B, T, H]."""
        u = u + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return u + self.mlp(self.post_attention_layernorm(u))


class DecoderLayer(nn.Module):
    """A plain decoder layer with norms in front of attention and MLP."""

    def __init__(self, g: Geometry):
        super().__init__()
        self.input_layernorm = Norm(g.hidden, g.eps)
        self.self_attn = Attention(g, g.hidden)
        self.post_attention_layernorm = Norm(g.hidden, g.eps)
        self.mlp = MLP(g)

    def project(self, u: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(u), rotary)

    def finish(self, u: Tensor, attended: Tensor) -> Tensor:
        """u [B, T, H], attended [B, nh, T, d] -> the layer's output [B, T, H]."""
        u = u + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return u + self.mlp(self.post_attention_layernorm(u))


class OffsetVocabulary(nn.Module):
    """The draft vocabulary in its published layout: target id = draft id + d2t; t2d marks the target ids that the draft
    knows. A base of modules whose draft columns may be fewer than the target's."""

    d2t: Tensor
    t2d: Tensor

    def add_vocabulary(self, vocab_size: int, draft_vocab_size: int) -> None:
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(vocab_size, dtype=torch.bool))

    def set_vocabulary(self, vocabulary: Tensor) -> None:
        """vocabulary [Vd]: strictly ascending target ids of the draft's columns."""
        self.d2t.copy_(vocabulary - torch.arange(len(vocabulary), device=vocabulary.device))
        self.t2d.zero_()[vocabulary] = True

    @property
    def vocabulary(self) -> Tensor | None:
        if len(self.d2t) == len(self.t2d):
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class BorrowedVocabulary(nn.Module):
    """Draft columns that the target's lm_head scores. A base of modules that train no lm_head of their own."""

    target: Target
    token_map: Tensor | None

    def borrow(self, target: Target, vocabulary: Tensor | None) -> None:
        """vocabulary [Vd]: ascending target ids of the draft's columns; None for the whole vocabulary."""
        self.register_buffer("token_map", vocabulary)
        object.__setattr__(self, "target", target)  # used, never saved or trained here

    @property
    def vocabulary(self) -> Tensor | None:
        return self.token_map

    def target_rows(self) -> Tensor:
        """[Vd, H] rows of the target's lm_head."""
        weight = self.target.lm_head_weight
        return weight if self.token_map is None else weight[self.token_map]


def rotary_embedding(target: Target, own: LayerConfig | None = None) -> nn.Module:
    """The target's rotary embedding, or the layer's own, as a Llama module; targets that mix several give that of full
    attention."""
    config = target.config
    parameters = config.rope_parameters
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    if own is not None and own.rope is not None:
        parameters = own.rope
    g = Geometry.of(target, own)
    llama = LlamaConfig(
        hidden_size=g.hidden,
        num_attention_heads=g.num_heads,
        head_dim=g.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(llama).to(target.device)
