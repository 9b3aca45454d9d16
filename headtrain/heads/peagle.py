"""P-EAGLE (arXiv 2602.01469): EAGLE-3 that guesses all depths in one forward, with masks for what is not known yet.

Element (a, d), anchor a and depth d, stands at slot a + d. At depth 0 it consumes token x_{a+1} and the target's features
of position a; deeper it consumes the mask token and a learned feature instead. It sees depth 0 of the anchors up to its
own, and its own anchor up to its own depth. It predicts x_{a+d+2}, is taught by the target's distribution at position
a + d + 1, and counts if the predicted token is trained. Parameter names are those of the published checkpoints.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from decode.attention import Visibility
from decode.attention import forward as attend_tree
from decode.cache import TreeCache
from headtrain.heads.base import Batch, HeadConfig, HeadLoss
from headtrain.heads.eagle3 import default_layers
from headtrain.layers import DecoderLayer, FusingLayer, Geometry, Norm, OffsetVocabulary, rotary_embedding
from headtrain.losses import LossName, distill, teacher_logits
from headtrain.parallel import ParallelHead, State, choose_mask_token
from headtrain.recurrent import take_last
from headtrain.target import Target


class PEagleConfig(HeadConfig):
    layers: list[int] | None = Field(None, description="boundaries of the fused features; null: early, middle and late")
    vocabulary: int | None = Field(32000, description="draft vocabulary size; null: the target's whole vocabulary")
    depths: int = Field(8, ge=1, le=16, description="tokens guessed in one forward")
    decoder_layers: int = Field(4, ge=1, le=16, description="decoder layers")
    keep: float = Field(0.7, gt=0, le=1, description="share keep^d of the elements of depth d that is trained")
    keep_least: float = Field(0.2, ge=0, le=1, description="the least such share")
    decay: float = Field(1.0, gt=0, le=1, description="weight decay^d of depth d")
    loss: LossName = Field("kl", description="distillation loss")
    mask_token: int | None = Field(None, description="token that stands for unknown ones; null: the padding token")


class PEagle(OffsetVocabulary, ParallelHead):
    Config = PEagleConfig
    config: PEagleConfig
    embedding: nn.Module
    rotary: nn.Module

    def __init__(self, config: PEagleConfig, layers: list[int], target: Target, vocab_size: int, draft_vocab_size: int):
        super().__init__()
        self.config, self.g = config, Geometry.of(target)
        self.target_layers, self.max_depth = tuple(layers), config.depths
        self.mask_token = choose_mask_token(target, config.mask_token)
        hidden, num_features = self.g.hidden, len(layers) * self.g.hidden
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, num_features))
        self.fc = nn.Linear(num_features, hidden, bias=False)
        plain = (DecoderLayer(self.g) for _ in range(config.decoder_layers - 1))
        self.layers = nn.ModuleList([FusingLayer(self.g), *plain])
        self.norm = Norm(hidden, self.g.eps)
        self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)
        self.add_vocabulary(vocab_size, draft_vocab_size)
        object.__setattr__(self, "embedding", target.embedding)  # used, never saved or trained here
        object.__setattr__(self, "rotary", rotary_embedding(target))

    @classmethod
    def vocabulary_size(cls, config: PEagleConfig) -> int | None:
        return config.vocabulary

    @classmethod
    def build(cls, config: PEagleConfig, target: Target, vocabulary: Tensor | None = None) -> "PEagle":
        config = config.model_copy(update={"mask_token": choose_mask_token(target, config.mask_token)})
        rows = target.lm_head_weight if vocabulary is None else target.lm_head_weight[vocabulary]
        layers = config.layers or default_layers(target.num_layers)
        head = cls(config, layers, target, target.vocab_size, len(rows))
        head.lm_head.weight.data.copy_(rows.detach())
        nn.init.normal_(head.mask_hidden, std=0.02)  # zero would have no direction for its norm
        if vocabulary is not None:
            head.set_vocabulary(vocabulary)
        return head

    @classmethod
    def restore(
        cls, config: PEagleConfig, layers: list[int], target: Target, shapes: dict[str, tuple[int, ...]]
    ) -> "PEagle":
        vocab_size, draft_vocab_size = (shapes.get(name, (target.vocab_size,))[0] for name in ("t2d", "d2t"))
        return cls(config, layers, target, vocab_size, draft_vocab_size)

    def sample(self, loss_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The elements that a training step computes: anchors, depths and validity, [B, N] each, on the CPU.

        Depth 0 has every slot. Depth d > 0 has at most (n - d) max(keep^d, keep_least) elements of those whose slot is
        trained and whose anchor is there at depth d - 1; n counts the trained slots of the row.
        """
        config, generator = self.config, self.generator()
        rows = []
        for mask in loss_mask.cpu().bool():
            trained = mask[2:]  # [T - 2]: does slot s, which predicts token s + 2, count?
            n = int(trained.sum())
            found = [torch.arange(len(mask) - 1)]  # anchors of each depth
            for d in range(1, config.depths):
                slots = found[-1] + d
                pool = found[-1][slots < len(trained)]
                pool = pool[trained[pool + d]]
                count = max(0, int((n - d) * max(config.keep**d, config.keep_least)))
                chosen = torch.randperm(len(pool), generator=generator)[:count]
                found.append(pool[chosen.sort().values])
            depths = torch.cat([torch.full_like(anchors, d) for d, anchors in enumerate(found)])
            rows.append((torch.cat(found), depths))
        pad = torch.nn.utils.rnn.pad_sequence
        anchors, depths = (pad([row[i] for row in rows], batch_first=True) for i in range(2))
        valid = pad([torch.ones_like(row[0], dtype=torch.bool) for row in rows], batch_first=True)
        return anchors, depths, valid

    def run_elements(self, batch: Batch, anchors: Tensor, depths: Tensor, valid: Tensor) -> Tensor:
        """Normed states [B, N, H] of the elements, in one forward."""
        known = (depths == 0)[:, :, None]
        tokens = torch.where(known[:, :, 0], batch.input_ids.gather(1, anchors + 1), self.mask_token)
        fused = self.fuse(batch.features)  # [B, T, H]
        fused = fused.gather(1, anchors[:, :, None].expand(-1, -1, self.g.hidden))
        u = torch.where(known, fused, self.fuse(self.mask_hidden))
        before = (depths == 0)[:, None] & (anchors[:, None] <= anchors[:, :, None])  # [B, query, key]
        own = (anchors[:, None] == anchors[:, :, None]) & (depths[:, None] <= depths[:, :, None])
        visible = (valid[:, None] & (before | own)) | torch.eye(anchors.shape[1], dtype=torch.bool, device=u.device)
        group, rotary = self.g.num_heads // self.g.num_kv_heads, self.rotary(u, anchors + depths)

        def attend(index: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            return nn.functional.scaled_dot_product_attention(q, key, value, attn_mask=visible[:, None])

        return self.norm(self._layers(tokens, u, rotary, attend))

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features.to(self.fc.weight.dtype))

    def _layers(self, tokens: Tensor, u: Tensor, rotary: tuple[Tensor, Tensor], attend) -> Tensor:
        """tokens [B, n], fused features u [B, n, H]; attend(layer, q, k, v) -> [B, nh, n, d]. Returns [B, n, H]."""
        first, *rest = self.layers
        u = first.finish(u, attend(0, *first.project(self.embedding(tokens).to(u.dtype), u, rotary)))  # type: ignore[operator,union-attr]
        for i, layer in enumerate(rest, 1):
            u = layer.finish(u, attend(i, *layer.project(u, rotary)))  # type: ignore[operator,union-attr]
        return u

    def loss(self, batch: Batch, target: Target) -> HeadLoss:
        """Sum over the sampled elements of decay^d times the loss against the target, renormalised on the draft vocabulary."""
        device = batch.input_ids.device
        anchors, depths, valid = (x.to(device) for x in self.sample(batch.loss_mask))
        states = self.run_elements(batch, anchors, depths, valid)
        predicted = anchors + depths + 2
        mask = nn.functional.pad(batch.loss_mask, (0, 1))  # nothing behind the row is trained
        trained = valid & mask.gather(1, predicted.clamp(max=mask.shape[1] - 1)).bool()
        total, acceptance, counts = states.sum() * 0, [], []
        for d in range(self.config.depths):
            b, i = (trained & (depths == d)).nonzero(as_tuple=True)
            part, accepted = distill(
                states[b, i][None],
                self.lm_head.weight,
                teacher_logits(target, batch.hidden[b, predicted[b, i] - 1], self.vocabulary),
                torch.full((1, len(b)), self.config.decay**d, device=device),
                self.config.loss,
            )
            total = total + part
            acceptance.append(accepted)
            counts.append(len(b))
        return HeadLoss(total, torch.cat(acceptance), torch.tensor(counts, device=device))

    @torch.no_grad()
    def begin(self, features: Tensor, tokens: Tensor, lengths: Tensor, capacity: int) -> tuple[State, Tensor]:
        batch, num_slots = features.shape[:2]
        state = State(TreeCache(len(self.layers), batch, capacity, tokens.device))
        chain = torch.arange(num_slots, device=tokens.device).expand(batch, -1)
        u = self._run(state.cache, tokens[:, 1:], self.fuse(features), chain, None)
        state.cache.commit(chain, lengths, moved=False)
        last, ahead = take_last(u, lengths), self.config.depths - 1
        if ahead:
            steps = torch.arange(ahead, device=tokens.device)
            causal = (steps <= steps[:, None]).expand(batch, -1, -1)
            guesses = self._run(state.cache, *self._masks(batch), steps.expand(batch, -1), causal)
            last = torch.cat([last, guesses], 1)
        return state, self.start(state, self.lm_head(self.norm(last)).float())

    @torch.no_grad()
    def commit(self, state: State, features: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """One forward: the verified slots, and the masks behind each row's last."""
        batch, m = tokens.shape
        ahead = self.config.depths - 1
        nodes = torch.arange(m + ahead, device=tokens.device)
        real = nodes < m
        depths = torch.where(real, nodes, nodes - m + counts[:, None])  # [B, m + ahead]
        # A verified slot sees those before it; a mask sees its row's verified slots and the masks before it.
        verified = real & (nodes < counts[:, None])  # [B, n]
        ancestors = torch.where(real[:, None], real, verified[:, None] | ~real) & (nodes <= nodes[:, None])
        masks, mask_states = self._masks(batch)
        u = torch.cat([self.fuse(features), mask_states], 1)
        u = self._run(state.cache, torch.cat([tokens, masks], 1), u, depths, ancestors)
        state.cache.commit(nodes[:m].expand(batch, -1), counts, moved=False)
        last = torch.cat([take_last(u, counts), u[:, m:]], 1)
        return self.start(state, self.lm_head(self.norm(last)).float())

    def _masks(self, batch: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, K - 1] and fused features [B, K - 1, H] of the elements behind depth 0."""
        states = self.fuse(self.mask_hidden).expand(batch, self.config.depths - 1, -1)
        return states.new_full(states.shape[:2], self.mask_token, dtype=torch.int64), states

    def _run(self, cache: TreeCache, tokens: Tensor, u: Tensor, depths: Tensor, ancestors: Tensor | None) -> Tensor:
        """All layers over nodes in the cache: tokens [B, n], fused features u [B, n, H]. Opens the step, does not commit."""
        start, end = cache.open(tokens.shape[1])
        visible = Visibility(cache.lengths, depths, ancestors, start, end)

        def attend(index: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.write(index, key, value)
            scale = self.g.head_dim**-0.5
            return attend_tree(self, q, keys, values, None, tree=visible, scaling=scale)[0].transpose(1, 2)

        return self._layers(tokens, u, self.rotary(u, cache.lengths[:, None] + depths), attend)
