"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused target features, trained by the training-time test.

Slot t consumes token x_{t+1} and the fused feature g_t of position t, so it sits one token ahead of its feature. At
draft step k it predicts x_{t+2+k}, is taught by the target's distribution at position t+1+k, and counts if the
predicted token is trained. Parameter names are those of the published checkpoints.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from decode.attention import Visibility
from decode.attention import forward as attend_tree
from decode.cache import TreeCache
from decode.guesses import Guesses
from headtrain.heads.base import Batch, Head, HeadConfig, HeadLoss
from headtrain.losses import distill, step_weights, teacher_logits
from headtrain.target import Target
from headtrain.ttt_attention import ttt_attention


class Eagle3Config(HeadConfig):
    layers: list[int] | None = Field(None, description="boundaries of the fused features; null: early, middle and late")
    vocabulary: int | None = Field(32000, description="draft vocabulary size; null: the target's whole vocabulary")
    steps: int = Field(7, ge=1, le=16, description="draft steps of the training-time test")
    decay: float = Field(0.8, gt=0, le=1, description="weight decay^k of draft step k")
    loss: Literal["kl"] = Field("kl", description="distillation loss")
    feature_noise: float = Field(0.0, ge=0, description="uniform noise of this standard deviation on the features")


def default_layers(num_layers: int) -> list[int]:
    """Early, middle and late boundaries [2, n//2, n-3]; evenly spread where the target is too shallow for that."""
    layers = [2, num_layers // 2, num_layers - 3]
    if layers[0] < layers[1] < layers[2]:
        return layers
    return sorted({max(1, round(num_layers * share)) for share in (1 / 3, 2 / 3, 1)})


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

    def __init__(self, g: Geometry):
        super().__init__()
        self.g = g
        self.q_proj = nn.Linear(2 * g.hidden, g.num_heads * g.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * g.hidden, g.num_kv_heads * g.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * g.hidden, g.num_kv_heads * g.head_dim, bias=False)
        self.o_proj = nn.Linear(g.num_heads * g.head_dim, g.hidden, bias=False)

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, 2H] -> rotated query [B, nh, T, d] and key, and value [B, nkv, T, d]."""
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


class Layer(nn.Module):
    """One decoder layer on cat(norm(embedding), norm(feature)); the residual is the feature, un-normed."""

    def __init__(self, g: Geometry):
        super().__init__()
        self.input_layernorm = Norm(g.hidden, g.eps)  # of the token embedding
        self.hidden_norm = Norm(g.hidden, g.eps)  # of the feature
        self.self_attn = Attention(g)
        self.post_attention_layernorm = Norm(g.hidden, g.eps)
        self.mlp = MLP(g)

    def project(self, embedding: Tensor, u: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat([self.input_layernorm(embedding), self.hidden_norm(u)], -1)  # [B, T, 2H]
        return self.self_attn.project(x, rotary)

    def finish(self, u: Tensor, attended: Tensor) -> Tensor:
        """attended [B, nh, T, d] -> the layer's output [B, T, H]."""
        u = u + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return u + self.mlp(self.post_attention_layernorm(u))


class Eagle3(Head):
    Config = Eagle3Config
    config: Eagle3Config
    d2t: Tensor
    t2d: Tensor
    embedding: nn.Module
    rotary: nn.Module

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

    def attach(self, target: Target) -> None:
        """Borrow the target's embedding and rotary embedding: used, never saved or trained here."""
        object.__setattr__(self, "embedding", target.embedding)
        object.__setattr__(self, "rotary", rotary_embedding(target))

    def set_vocabulary(self, vocabulary: Tensor) -> None:
        """vocabulary [Vd]: strictly ascending target ids of the draft's columns."""
        self.d2t.copy_(vocabulary - torch.arange(len(vocabulary), device=vocabulary.device))
        self.t2d.zero_()[vocabulary] = True

    @property
    def vocabulary(self) -> Tensor | None:
        if len(self.d2t) == len(self.t2d):
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def loss(self, batch: Batch, target: Target) -> HeadLoss:
        """Sum over draft steps of decay^k times the cross entropy with the target, renormalised on the draft vocabulary."""
        steps = self.config.steps
        b, j = batch.loss_mask[:, 2:].nonzero(as_tuple=True)  # the target at position j + 1 teaches the token at j + 2
        states = torch.stack(self.unroll(batch))  # [K, B, T - 1, H]
        slots = j + 1 - 1 - torch.arange(steps, device=j.device)[:, None]  # [K, N]: slot that predicts it at step k
        known = slots >= 0
        student = self.norm(states[torch.arange(steps, device=j.device)[:, None], b, slots.clamp(min=0)])  # [K, N, H]
        total, acceptance = distill(
            student,
            self.lm_head.weight,
            teacher_logits(target, batch.hidden[b, j + 1], self.vocabulary),
            step_weights(steps, self.config.decay, j.device)[:, None] * known,
            self.config.loss,
        )
        return HeadLoss(total, acceptance, known.sum(1))

    def unroll(self, batch: Batch) -> list[Tensor]:
        """The training-time test: the state [B, T - 1, H] of every slot after each draft step."""
        embeddings = self.embedding(batch.input_ids)  # [B, T, H]
        features = batch.features[:, :-1].to(self.fc.weight.dtype)
        if self.config.feature_noise and self.training:
            features = features + (torch.rand_like(features) - 0.5) * (12**0.5 * self.config.feature_noise)
        u = self.fc(features)  # [B, S, H] with S = T - 1 slots
        num_slots = u.shape[1]
        positions = torch.arange(num_slots, device=u.device)[None]
        group = self.g.num_heads // self.g.num_kv_heads
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []
        for k in range(self.config.steps):
            tokens = embeddings[:, 1 + k :]
            tokens = nn.functional.pad(tokens, (0, 0, 0, num_slots - tokens.shape[1])).to(u.dtype)
            q, key, value = self.midlayer.project(tokens, u, self.rotary(u, positions + k))
            keys.append(key.repeat_interleave(group, 1))
            values.append(value.repeat_interleave(group, 1))
            u = self.midlayer.finish(u, ttt_attention(q, keys, values, self.g.head_dim**-0.5))
            states.append(u)
        return states

    @torch.no_grad()
    def begin(self, features: Tensor, tokens: Tensor, lengths: Tensor, capacity: int) -> tuple["State", Tensor]:
        cache = TreeCache(1, len(tokens), capacity, tokens.device)
        depths = torch.arange(features.shape[1], device=tokens.device).expand(len(tokens), -1)
        start, end = cache.open(features.shape[1])
        prompt = Visibility(cache.lengths, depths, None, start, end)
        u = self._run(cache, tokens[:, 1:], self.fc(features.to(self.fc.weight.dtype)), prompt)
        cache.commit(depths, lengths.tolist(), moved=False)
        state = State(cache, Guesses(len(tokens), tokens.device), take_last(u, lengths))
        return state, self._logits(state.states)

    @torch.no_grad()
    def extend(self, state: "State", tokens: Tensor, parents: Tensor) -> Tensor:
        done = state.guesses.depths.shape[1]
        rows = state.guesses.add(parents)
        start, end = state.cache.open(tokens.shape[1], done)
        tree = Visibility(state.cache.lengths, state.guesses.depths, rows, start, end)
        u = state.states.gather(1, parents[:, :, None].expand(-1, -1, self.g.hidden))  # [B, m, H]
        u = self._run(state.cache, tokens, u, tree)
        state.states = torch.cat([state.states, u], 1)
        return self._logits(u)

    @torch.no_grad()
    def commit(self, state: "State", features: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        batch, m = tokens.shape
        chain = torch.arange(m, device=tokens.device).expand(batch, m)
        causal = torch.ones(m, m, dtype=torch.bool, device=tokens.device).tril().expand(batch, m, m)
        start, end = state.cache.open(m)
        visible = Visibility(state.cache.lengths, chain, causal, start, end)
        u = self._run(state.cache, tokens, self.fc(features.to(self.fc.weight.dtype)), visible)
        state.cache.commit(chain, counts.tolist(), moved=False)
        state.guesses = Guesses(batch, tokens.device)
        state.states = take_last(u, counts)
        return self._logits(state.states)

    def select(self, state: "State", rows: Tensor) -> None:
        state.cache.select(rows)
        state.guesses.select(rows)
        state.states = state.states[rows]

    def _run(self, cache: TreeCache, tokens: Tensor, u: Tensor, visible: Visibility) -> Tensor:
        """The layer over new slots: tokens [B, m] and what they are fused with [B, m, H] -> states [B, m, H]."""
        positions = visible.lengths[:, None] + visible.depths[:, -tokens.shape[1] :]
        embedding = self.embedding(tokens).to(u.dtype)
        q, key, value = self.midlayer.project(embedding, u, self.rotary(u, positions))
        keys, values = cache.write(0, key, value)
        attended, _ = attend_tree(self, q, keys, values, None, tree=visible, scaling=self.g.head_dim**-0.5)
        return self.midlayer.finish(u, attended.transpose(1, 2))

    def _logits(self, u: Tensor) -> Tensor:
        return self.lm_head(self.norm(u)).float()


@dataclass
class State:
    """What drafting keeps between calls: its own KV cache, this step's nodes, and states [B, 1 + e, H], root first."""

    cache: TreeCache
    guesses: Guesses
    states: Tensor


def take_last(u: Tensor, counts: Tensor) -> Tensor:
    """u [B, m, H] -> [B, 1, H], row b at counts[b] - 1."""
    return u.gather(1, (counts - 1)[:, None, None].expand(-1, 1, u.shape[2]))


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
