"""DFlash (arXiv 2602.06036): a block of tokens filled in by one forward of a few bidirectional layers.

A block at anchor a is [x_a, mask, mask, ..] at positions a .. a + S - 1. Each layer's queries come from the block, its keys
and values from the block and from the target's features of all positions before a; blocks do not see each other. Offset
k = 1 .. S - 1 predicts x_{a+k} at that very position; it is taught by the target's distribution at position a + k - 1, or
by the token itself, and counts if x_{a+k} is trained. Parameter names are those of the published checkpoints; embedding
and lm_head are the target's.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import rotate_half

from decode.attention import Visibility
from decode.attention import forward as attend_tree
from decode.cache import TreeCache
from headtrain.heads.base import Batch, HeadConfig, HeadLoss
from headtrain.layers import Attention, BorrowedVocabulary, DecoderLayer, Geometry, Norm, rotary_embedding
from headtrain.losses import LossName, distill, teacher_logits, token_teacher
from headtrain.parallel import ParallelHead, State, choose_mask_token
from headtrain.target import Target

Rotary = tuple[Tensor, Tensor]


class DFlashConfig(HeadConfig):
    layers: list[int] | None = Field(None, description="boundaries of the features; null: up to five, evenly spread")
    vocabulary: int | None = Field(None, description="draft vocabulary size; null: the target's whole vocabulary")
    block: int = Field(8, ge=2, le=32, description="tokens of a block; the first is known, the others are guessed")
    decoder_layers: int = Field(5, ge=1, le=16, description="decoder layers")
    anchors: int = Field(512, ge=1, description="most blocks of a row that are trained in a step")
    weighting: Literal["dpace", "exponential", "none"] = Field(
        "dpace", description="weights of the offsets: by how far the block is accepted, by offset, or all the same"
    )
    alpha: float = Field(0.5, ge=0, le=1, description="smoothing of dpace; 1 weighs by the offsets left in the block")
    gamma: float = Field(4.0, gt=0, description="exponential weight exp(-(k - 1) / gamma) of offset k")
    teacher: Literal["distribution", "token"] = Field(
        "distribution", description="the target's distribution, or the text"
    )
    loss: LossName = Field("kl", description="distillation loss")
    mask_token: int | None = Field(None, description="token that stands for unknown ones; null: the padding token")


def default_layers(num_layers: int) -> list[int]:
    """Five boundaries evenly spread over 2 .. n - 2; all there are where the target is too shallow for that."""
    return sorted({min(max(1, round(2 + i * (num_layers - 4) / 4)), num_layers) for i in range(5)})


class BlockAttention(Attention):
    """Attention with normed queries and keys, whose keys also come from features."""

    def __init__(self, g: Geometry):
        super().__init__(g, g.hidden)
        self.q_norm = Norm(g.head_dim, g.eps)
        self.k_norm = Norm(g.head_dim, g.eps)

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """x [B, n, H] -> [B, nh, n, d]."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """x [B, n, H] -> two of [B, nkv, n, d]."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), rotary), self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.g.head_dim)).transpose(1, 2)


class BlockLayer(DecoderLayer):
    self_attn: BlockAttention

    def __init__(self, g: Geometry):
        super().__init__(g)
        self.self_attn = BlockAttention(g)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x [B, heads, n, d], rotary two of [B, n, d]."""
    cos, sin = (part.to(x.dtype)[:, None] for part in rotary)
    return x * cos + rotate_half(x) * sin


class DFlash(BorrowedVocabulary, ParallelHead):
    Config = DFlashConfig
    config: DFlashConfig
    rotary: nn.Module

    def __init__(self, config: DFlashConfig, layers: list[int], target: Target, vocabulary: Tensor | None):
        super().__init__()
        self.config, self.g = config, Geometry.of(target)
        self.target_layers, self.max_depth = tuple(layers), config.block - 1
        self.mask_token = choose_mask_token(target, config.mask_token)
        self.fc = nn.Linear(len(layers) * self.g.hidden, self.g.hidden, bias=False)
        self.hidden_norm = Norm(self.g.hidden, self.g.eps)
        self.layers = nn.ModuleList(BlockLayer(self.g) for _ in range(config.decoder_layers))
        self.norm = Norm(self.g.hidden, self.g.eps)
        self.borrow(target, vocabulary)
        object.__setattr__(self, "rotary", rotary_embedding(target))

    @classmethod
    def vocabulary_size(cls, config: DFlashConfig) -> int | None:
        return config.vocabulary

    @classmethod
    def build(cls, config: DFlashConfig, target: Target, vocabulary: Tensor | None = None) -> "DFlash":
        config = config.model_copy(update={"mask_token": choose_mask_token(target, config.mask_token)})
        layers = config.layers or default_layers(target.num_layers)
        return cls(config, layers, target, None if vocabulary is None else vocabulary.to(target.device))

    @classmethod
    def restore(
        cls, config: DFlashConfig, layers: list[int], target: Target, shapes: dict[str, tuple[int, ...]]
    ) -> "DFlash":
        size = shapes.get("token_map")
        vocabulary = None if size is None else torch.zeros(size, dtype=torch.int64, device=target.device)
        return cls(config, layers, target, vocabulary)

    def tokens(self, loss_mask: Tensor) -> Tensor:
        """Blocks that `loss` samples, at most `anchors` a row: the loss is a mean over blocks."""
        return candidates(loss_mask).sum(1).clamp(max=self.config.anchors).sum()

    def sample(self, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Anchors [B, A] of this step's blocks and whether they are any, of rows with fewer candidates than A."""
        possible = candidates(loss_mask)
        order = torch.rand(possible.shape, generator=self.generator()).to(possible.device) - 2.0 * ~possible
        most = max(1, min(self.config.anchors, int(possible.sum(1).max())))
        values, anchors = order.topk(most, 1)
        return anchors, values >= 0

    def context(self, features: Tensor) -> Tensor:
        """What keys and values of positions before the block are made of: features [B, T, F] -> [B, T, H]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def run_blocks(self, batch: Batch, anchors: Tensor) -> Tensor:
        """Normed states [B, A, S, H] of the blocks at `anchors` [B, A]."""
        size, num_tokens = self.config.block, batch.input_ids.shape[1]
        context = self.context(batch.features)
        places = torch.arange(num_tokens, device=anchors.device)
        before = places < anchors[:, :, None]  # [B, A, T]
        far = self.rotary(context, places[None])
        positions = anchors[:, :, None] + torch.arange(size, device=anchors.device)
        near = self.rotary(context, positions.flatten(1))

        def attend(index: int, attention: BlockAttention, x: Tensor) -> Tensor:
            q, (key, value) = attention.queries(x, near), attention.keys_values(x, near)
            key, value, q = (part.unflatten(2, (-1, size)) for part in (key, value, q))  # [B, heads, A, S, d]
            parts = q, *attention.keys_values(context, far), key, value, before
            # The scores are as many as blocks x positions: they are made again for the gradient.
            return checkpoint(attend_blocks, *parts, use_reentrant=False).flatten(2, 3)  # type: ignore[union-attr]

        states = self._layers(batch.input_ids.gather(1, anchors), attend)
        return states.unflatten(1, (-1, size))

    def _layers(self, roots: Tensor, attend: Callable[[int, Any, Tensor], Tensor]) -> Tensor:
        """Blocks behind roots [B, A]; attend(layer, its attention, x [B, A S, H]) -> [B, nh, A S, d]. Returns [B, A S, H]."""
        tokens = roots.new_full((*roots.shape, self.config.block), self.mask_token)
        tokens[:, :, 0] = roots
        u = self.target.embedding(tokens.flatten(1)).to(self.fc.weight.dtype)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, BlockLayer)
            u = layer.finish(u, attend(i, layer.self_attn, layer.input_layernorm(u)))
        return self.norm(u)

    def loss(self, batch: Batch, target: Target) -> HeadLoss:
        """Sum over blocks and offsets of the offset's weight times its loss, renormalised on the draft vocabulary."""
        num_tokens, size = batch.input_ids.shape[1], self.config.block
        anchors, valid = self.sample(batch.loss_mask)
        states = self.run_blocks(batch, anchors)[:, :, 1:]  # [B, A, K, H], K = S - 1
        positions = anchors[:, :, None] + torch.arange(1, size, device=anchors.device)  # of the predicted tokens
        at = positions.clamp(max=num_tokens - 1)
        rows = torch.arange(len(at), device=at.device)[:, None, None]
        trained = valid[:, :, None] & (positions < num_tokens) & batch.loss_mask[rows, at].bool()  # [B, A, K]
        labels = self.columns(batch.input_ids[rows, at])  # [B, A, K], -1 outside the draft vocabulary
        weights = self.weigh(states.detach(), labels, trained)
        if self.config.teacher == "token":
            trained = trained & (labels >= 0)
        total, acceptance, counts = states.sum() * 0, [], []
        for k in range(size - 1):
            b, a = trained[:, :, k].nonzero(as_tuple=True)
            if self.config.teacher == "token":
                teacher = token_teacher(labels[b, a, k], len(self.target_rows()))
            else:
                teacher = teacher_logits(target, batch.hidden[b, at[b, a, k] - 1], self.vocabulary)
            weight = weights[b, a, k][None]
            part, accepted = distill(states[b, a, k][None], self.target_rows(), teacher, weight, self.config.loss)
            total = total + part
            acceptance.append(accepted)
            counts.append(len(b))
        return HeadLoss(total, torch.cat(acceptance), torch.tensor(counts, device=total.device))

    def columns(self, tokens: Tensor) -> Tensor:
        """Draft columns of target ids; -1 where there is none."""
        if self.token_map is None:
            return tokens
        found = torch.searchsorted(self.token_map, tokens).clamp(max=len(self.token_map) - 1)
        return torch.where(self.token_map[found] == tokens, found, -1)

    @torch.no_grad()
    def weigh(self, states: Tensor, labels: Tensor, trained: Tensor) -> Tensor:
        """Weights [B, A, K] float32 of the offsets. states [B, A, K, H].

        dpace (arXiv 2605.18810): w_j = sum_{m >= j} prod_{i <= m} ((1 - alpha) c_i + alpha), c_i the draft's probability
        of the text; offsets that are not trained count as 1 in the product and 0 in the sum.
        """
        if self.config.weighting != "dpace":
            offsets = torch.arange(labels.shape[2], device=labels.device, dtype=torch.float32)
            decay = (
                torch.exp(-offsets / self.config.gamma) if self.config.weighting == "exponential" else offsets * 0 + 1
            )
            return decay.expand(labels.shape)
        c = torch.zeros(labels.shape, device=labels.device)
        known = trained & (labels >= 0)
        c[known] = probabilities(states[known], self.target_rows(), labels[known])
        factors = torch.where(trained, (1 - self.config.alpha) * c + self.config.alpha, 1.0)
        reached = factors.cumprod(-1) * trained
        return reached.flip(-1).cumsum(-1).flip(-1)

    @torch.no_grad()
    def begin(self, features: Tensor, tokens: Tensor, lengths: Tensor, capacity: int) -> tuple[State, Tensor]:
        cache = TreeCache(len(self.layers), len(tokens), capacity + self.config.block, tokens.device)
        state = State(cache, rows=[self.target_rows()])
        self._remember(cache, features, lengths)
        return state, self._guess(state, tokens.gather(1, lengths[:, None]))

    @torch.no_grad()
    def commit(self, state: State, features: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        self._remember(state.cache, features, counts)
        return self._guess(state, tokens.gather(1, (counts - 1)[:, None]))

    def _remember(self, cache: TreeCache, features: Tensor, counts: Tensor) -> None:
        """Keys and values of counts[b] new positions, features [B, m, F]."""
        batch, m = features.shape[:2]
        context, chain = self.context(features), torch.arange(m, device=features.device).expand(batch, m)
        rotary = self.rotary(context, cache.lengths[:, None] + chain)
        cache.open(m)
        for i, layer in enumerate(self.layers):
            cache.write(i, *layer.self_attn.keys_values(context, rotary))  # type: ignore[operator,union-attr]
        cache.commit(chain, counts, moved=False)

    def _guess(self, state: State, roots: Tensor) -> Tensor:
        """The block behind the context, roots [B, 1]; returns logits [B, 1, Vd] of the first guess."""
        batch, size, cache = len(roots), self.config.block, state.cache
        start, end = cache.open(size)
        depths = torch.arange(size, device=roots.device).expand(batch, size)
        everything = torch.ones(batch, size, size, dtype=torch.bool, device=roots.device)
        visible = Visibility(cache.lengths, depths, everything, start, end)
        rotary = self.rotary(self.fc.weight, cache.lengths[:, None] + depths)

        def attend(index: int, attention: BlockAttention, x: Tensor) -> Tensor:
            keys, values = cache.write(index, *attention.keys_values(x, rotary))
            q, scale = attention.queries(x, rotary), self.g.head_dim**-0.5
            return attend_tree(self, q, keys, values, None, tree=visible, scaling=scale)[0].transpose(1, 2)

        states = self._layers(roots, attend)[:, 1:]
        return self.start(state, nn.functional.linear(states, state.rows[0].to(states.dtype)).float())


def candidates(loss_mask: Tensor) -> Tensor:
    """[B, T] bool: tokens that a server may guess behind: trained ones, followed by another and not the very first."""
    possible = loss_mask.bool() & nn.functional.pad(loss_mask[:, 1:], (0, 1)).bool()
    return possible & (torch.arange(loss_mask.shape[1], device=loss_mask.device) > 0)


def attend_blocks(q: Tensor, far_key: Tensor, far_value: Tensor, key: Tensor, value: Tensor, before: Tensor) -> Tensor:
    """One softmax over the positions before a block and the block itself.

    q [B, nh, A, S, d]; far_key, far_value [B, nkv, T, d]; key, value [B, nkv, A, S, d]; before [B, A, T] bool: which of the
    T positions each block sees. Returns [B, nh, A, S, d].
    """
    group, num_tokens = q.shape[1] // key.shape[1], far_key.shape[2]
    far_key, far_value, key, value = (x.repeat_interleave(group, 1) for x in (far_key, far_value, key, value))
    far = (q.flatten(2, 3) @ far_key.mT).unflatten(2, q.shape[2:4])  # [B, nh, A, S, T]
    far = far.masked_fill(~before[:, None, :, None], -torch.inf)
    p = torch.softmax(q.shape[-1] ** -0.5 * torch.cat([far, q @ key.mT], -1), -1).to(value.dtype)
    out = (p[..., :num_tokens].flatten(2, 3) @ far_value).unflatten(2, q.shape[2:4])
    return out + p[..., num_tokens:] @ value


def probabilities(states: Tensor, rows: Tensor, labels: Tensor, chunk: int = 1024) -> Tensor:
    """Softmax over rows [Vd, H] of states [N, H] at `labels` [N], float32, a part at a time."""
    found = [states.new_zeros(0, dtype=torch.float32)]
    for x, label in zip(states.split(chunk), labels.split(chunk), strict=True):
        log_q = torch.log_softmax(nn.functional.linear(x, rows.to(x.dtype)).float(), -1)
        found.append(log_q.gather(1, label[:, None])[:, 0].exp())
    return torch.cat(found)
