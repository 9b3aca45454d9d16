"""Parts of a draft's decoder layer, in the target's own geometry."""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from headtrain.target import Target


@dataclass(frozen=True)
class Geometry:
    """Shapes of the layer, taken from the target."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, target: Target) -> "Geometry":
        c = target.config
        return cls(
            hidden=c.hidden_size,
            intermediate=c.intermediate_size,
            num_heads=c.num_attention_heads,
            num_kv_heads=getattr(c, "num_key_value_heads", None) or c.num_attention_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            eps=getattr(c, "rms_norm_eps", 1e-6),
        )


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


def rotary_embedding(target: Target) -> nn.Module:
    """The target's rotary embedding as a Llama module; targets that mix several give that of full attention."""
    config = target.config
    parameters = config.rope_parameters
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    g = Geometry.of(target)
    llama = LlamaConfig(
        hidden_size=g.hidden,
        num_attention_heads=g.num_heads,
        head_dim=g.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(llama).to(target.device)
