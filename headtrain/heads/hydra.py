"""Hydra (arXiv 2402.05109): heads that see the tokens drafted before them; Hydra++ adds a prefix layer.

Head i (0-based) reads u_t and the embeddings of x_{t+1} .. x_{t+1+i}, and predicts x_{t+2+i}; it is taught by the
target's distribution at position t+1+i, and counts if the predicted token is trained. u_t is the target's last hidden
state, or with `prefix` the output of one decoder layer over it. All heads go through the target's lm_head; the published
ones have `own_lm_head` and `prefix_norm`.
"""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn

from decode.attention import Visibility
from decode.attention import forward as attend_tree
from decode.cache import TreeCache
from headtrain.heads.base import Batch, Head, HeadConfig, HeadLoss
from headtrain.layers import MLP, Attention, BorrowedVocabulary, Geometry, Norm, rotary_embedding
from headtrain.losses import LossName, distill, step_weights, teacher_logits
from headtrain.packing import Documents, spans
from headtrain.recurrent import predicting_slots, take_last
from headtrain.target import Target


class HydraConfig(HeadConfig):
    heads: int = Field(4, ge=1, le=16, description="heads, one for each draft depth")
    layers: int = Field(4, ge=1, le=8, description="blocks of a head")
    prefix: bool = Field(True, description="one decoder layer in front of the heads (Hydra++)")
    prefix_norm: bool = Field(False, description="a norm behind that layer, as in the published heads")
    own_lm_head: bool = Field(False, description="each head trains a copy of lm_head; else all go through the target's")
    decay: float = Field(1.0, gt=0, le=1, description="weight decay^i of head i")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout between the blocks")
    loss: LossName = Field("kl", description="distillation loss")
    vocabulary: int | None = Field(None, description="draft vocabulary size; null: the target's whole vocabulary")


class Block(nn.Module):
    """y = R x + SiLU(W x + b); R is the identity where the widths agree."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(inputs, hidden)
        self.res_connection = nn.Identity() if inputs == hidden else nn.Linear(inputs, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


class Prefix(nn.Module):
    """One decoder layer over the target's hidden states."""

    def __init__(self, g: Geometry, normed: bool):
        super().__init__()
        self.input_layernorm = Norm(g.hidden, g.eps)
        self.self_attn = Attention(g, g.hidden)
        self.post_attention_layernorm = Norm(g.hidden, g.eps)
        self.mlp = MLP(g)
        self.norm = Norm(g.hidden, g.eps) if normed else None

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [B, T, H], attended [B, nh, T, d] -> [B, T, H]."""
        hidden = hidden + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden if self.norm is None else self.norm(hidden)


@dataclass
class State:
    """What drafting keeps between calls: u [B, 1, H] of the last position and, for the root and each node extended this
    step, the embeddings [B, 1 + e, K, H] of its path from the root on (0 behind its end) and its depth, known to the host."""

    cache: TreeCache | None
    u: Tensor
    paths: Tensor
    depth: int


class Hydra(BorrowedVocabulary, Head):
    Config = HydraConfig
    config: HydraConfig
    rotary: nn.Module

    def __init__(self, config: HydraConfig, target: Target, vocabulary: Tensor | None):
        super().__init__()
        self.config, self.g = config, Geometry.of(target)
        self.target_layers = (target.num_layers,)
        self.max_depth = config.heads
        hidden = self.g.hidden
        self.prefix = Prefix(self.g, config.prefix_norm) if config.prefix else None
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                Block((i + 2) * hidden, hidden),
                *(nn.Sequential(nn.Dropout(config.dropout), Block(hidden, hidden)) for _ in range(config.layers - 1)),
            )
            for i in range(config.heads)
        )
        if config.own_lm_head:
            size = target.vocab_size if vocabulary is None else len(vocabulary)
            self.hydra_lm_head = nn.ModuleList(nn.Linear(hidden, size) for _ in range(config.heads))
        self.borrow(target, vocabulary)
        object.__setattr__(self, "rotary", rotary_embedding(target))

    @classmethod
    def vocabulary_size(cls, config: HydraConfig) -> int | None:
        return config.vocabulary

    @classmethod
    def build(cls, config: HydraConfig, target: Target, vocabulary: Tensor | None = None) -> "Hydra":
        head = cls(config, target, None if vocabulary is None else vocabulary.to(target.device))
        if config.own_lm_head:
            for own in head.hydra_lm_head:
                own.weight.data.copy_(head.target_rows().detach())  # type: ignore[union-attr,operator]
                own.bias.data.zero_()  # type: ignore[union-attr,operator]
        return head

    @classmethod
    def restore(
        cls, config: HydraConfig, layers: list[int], target: Target, shapes: dict[str, tuple[int, ...]]
    ) -> "Hydra":
        size = shapes.get("token_map")
        return cls(config, target, None if size is None else torch.zeros(size, dtype=torch.int64, device=target.device))

    def head_state(self, i: int, u: Tensor, embeddings: Tensor) -> Tensor:
        """What head i gives to lm_head: u [.., H], embeddings [.., i + 1, H] of the tokens behind it -> [.., H]."""
        x = torch.cat([u, embeddings.to(u.dtype).flatten(-2)], -1)
        return self.hydra_mlp[i](x)

    def distill(self, i: int, state: Tensor, teacher, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Head i alone, over its own matrix: state [N, H], weights [N]. The bias is the weight of a constant 1."""
        own: nn.Linear = self.hydra_lm_head[i]  # type: ignore[assignment]
        student = nn.functional.pad(state, (0, 1), value=1.0)[None]
        return distill(student, torch.cat([own.weight, own.bias[:, None]], 1), teacher, weights[None], self.config.loss)

    def packs(self) -> bool:
        return True

    def loss(self, batch: Batch, target: Target) -> HeadLoss:
        """Sum over heads of decay^i times the cross entropy with the target, renormalised on the draft vocabulary."""
        heads = self.config.heads
        b, j, queries, known = predicting_slots(batch.loss_mask, heads, batch.documents)
        u = self._prompt(batch.features, batch.documents)  # [B, T, H]
        embeddings = self.target.embedding(batch.input_ids)  # [B, T, H]
        last = batch.input_ids.shape[1] - 1
        student = []
        for i in range(heads):
            behind = (queries[i][:, None] + 1 + torch.arange(i + 1, device=j.device)).clamp(max=last)  # [N, i + 1]
            student.append(self.head_state(i, u[b, queries[i]], embeddings[b[:, None], behind]))
        teacher = teacher_logits(target, batch.hidden[b, j], self.vocabulary)
        weights = step_weights(heads, self.config.decay, j.device)[:, None] * known
        if self.config.own_lm_head:
            parts = [self.distill(i, student[i], teacher, weights[i]) for i in range(heads)]
            acceptance = torch.cat([acceptance for _, acceptance in parts])
            return HeadLoss(torch.stack([total for total, _ in parts]).sum(), acceptance, known.sum(1))
        total, acceptance = distill(torch.stack(student), self.target_rows(), teacher, weights, self.config.loss)
        return HeadLoss(total, acceptance, known.sum(1))

    def _prompt(self, features: Tensor, documents: Documents | None = None) -> Tensor:
        """u of every position of whole rows, features [B, T, H] from position 0 on; conversations may be packed."""
        features = features.to(self.hydra_mlp[0][0].linear.weight.dtype)  # type: ignore[index,union-attr]
        if self.prefix is None:
            return features
        if documents is not None:
            return torch.cat([self._prompt(features[:, span]) for span in spans(documents)], 1)
        cache = TreeCache(1, len(features), features.shape[1], features.device)
        return self._run_prefix(cache, features, None)

    def _run_prefix(self, cache: TreeCache, features: Tensor, ancestors: Tensor | None) -> Tensor:
        """The prefix layer over m new positions of each row; opens the step in the cache but does not commit it."""
        assert self.prefix is not None
        batch, m = features.shape[:2]
        depths = torch.arange(m, device=features.device).expand(batch, m)
        start, end = cache.open(m)
        visible = Visibility(cache.lengths, depths, ancestors, start, end)
        rotary = self.rotary(features, cache.lengths[:, None] + depths)
        q, key, value = self.prefix.self_attn.project(self.prefix.input_layernorm(features), rotary)
        if torch.is_grad_enabled():  # training: whole rows, nothing to keep
            group = self.g.num_heads // self.g.num_kv_heads
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            attended = nn.functional.scaled_dot_product_attention(q, key, value, is_causal=True)
        else:
            keys, values = cache.write(0, key, value)
            scale = self.g.head_dim**-0.5
            attended = attend_tree(self, q, keys, values, None, tree=visible, scaling=scale)[0].transpose(1, 2)
        return self.prefix.finish(features, attended)

    @torch.no_grad()
    def begin(self, features: Tensor, tokens: Tensor, lengths: Tensor, capacity: int) -> tuple[State, Tensor]:
        features = features.to(self.hydra_mlp[0][0].linear.weight.dtype)  # type: ignore[index,union-attr]
        cache = TreeCache(1, len(tokens), capacity, tokens.device) if self.prefix is not None else None
        if cache is not None:
            depths = torch.arange(features.shape[1], device=tokens.device).expand(len(tokens), -1)
            features = self._run_prefix(cache, features, None)
            cache.commit(depths, lengths.tolist(), moved=False)
        roots = tokens.gather(1, lengths[:, None])
        state = State(cache, take_last(features, lengths), features, 0)
        return state, self._start(state, roots)

    @torch.no_grad()
    def extend(self, state: State, tokens: Tensor, parents: Tensor) -> Tensor:
        state.depth += 1
        assert state.depth < self.config.heads, f"depth {state.depth}: expected below {self.config.heads}"
        above = parents[:, :, None, None].expand(-1, -1, *state.paths.shape[2:])
        paths = state.paths.gather(1, above).clone()  # [B, m, K, H]
        paths[:, :, state.depth] = self.target.embedding(tokens).to(paths.dtype)
        state.paths = torch.cat([state.paths, paths], 1)
        return self._logits(state.depth, state.u.expand(-1, tokens.shape[1], -1), paths)

    @torch.no_grad()
    def commit(self, state: State, features: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        features = features.to(state.u.dtype)
        batch, m = tokens.shape
        if state.cache is not None:
            causal = torch.ones(m, m, dtype=torch.bool, device=tokens.device).tril().expand(batch, m, m)
            features = self._run_prefix(state.cache, features, causal)
            chain = torch.arange(m, device=tokens.device).expand(batch, m)
            state.cache.commit(chain, counts, moved=False)
        state.u = take_last(features, counts)
        return self._start(state, tokens.gather(1, (counts - 1)[:, None]))

    def select(self, state: State, rows: Tensor) -> None:
        if state.cache is not None:
            state.cache.select(rows)
        state.u, state.paths = state.u[rows], state.paths[rows]

    def _start(self, state: State, roots: Tensor) -> Tensor:
        """A new step behind the roots [B, 1]; returns logits [B, 1, Vd]."""
        batch = len(roots)
        state.depth = 0
        state.paths = state.u.new_zeros(batch, 1, self.config.heads, self.g.hidden)
        state.paths[:, :, 0] = self.target.embedding(roots).to(state.u.dtype)
        return self._logits(0, state.u, state.paths)

    def _logits(self, i: int, u: Tensor, paths: Tensor) -> Tensor:
        y = self.head_state(i, u, paths[:, :, : i + 1])
        if self.config.own_lm_head:
            return self.hydra_lm_head[i](y).float()
        return self.target.finish_logits(nn.functional.linear(y, self.target_rows().to(y.dtype)).float())
