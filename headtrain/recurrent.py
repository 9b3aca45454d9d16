"""Draft heads of one decoder layer that feed their own output back: unrolled in training, drafting with a KV cache.

Slot t consumes token x_{t+1} and a state of position t, so it sits one token ahead. At draft step 0 the state is made
from the target's features; at step k it is the layer's own output of step k - 1.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decode.attention import Visibility
from decode.attention import forward as attend_tree
from decode.cache import TreeCache
from decode.guesses import Guesses
from headtrain.heads.base import Batch, Head
from headtrain.layers import Geometry, rotary_embedding
from headtrain.packing import Documents, positions_of, starts_of
from headtrain.target import Target
from headtrain.ttt_attention import ttt_attention

Projected = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # residual [B, T, H], query [B, nh, T, d], key and value [B, nkv, T, d]


@dataclass
class State:
    """What drafting keeps between calls: its own KV cache, this step's nodes, and states [B, 1 + e, H], root first."""

    cache: TreeCache
    guesses: Guesses
    states: Tensor


class RecurrentHead(Head):
    """A family defines `enter`, `project`, `finish` and `logits`; training and drafting share them."""

    g: Geometry
    embedding: nn.Module
    rotary: nn.Module

    def attach(self, target: Target) -> None:
        """Borrow the target's embedding and rotary embedding: used, never saved or trained here."""
        object.__setattr__(self, "embedding", target.embedding)
        object.__setattr__(self, "rotary", rotary_embedding(target))

    @abstractmethod
    def enter(self, features: Tensor) -> Tensor:
        """The target's features [B, T, F] -> the state [B, T, H] of step 0."""

    @abstractmethod
    def project(self, embedding: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor]) -> Projected:
        """Token embeddings and states, both [B, T, H]."""

    @abstractmethod
    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual [B, T, H], attended [B, nh, T, d] -> the new state [B, T, H]."""

    @abstractmethod
    def logits(self, state: Tensor) -> Tensor:
        """Float32 logits [B, T, Vd] of the token behind the one that each slot consumed."""

    def packs(self) -> bool:
        return True

    def unroll(self, batch: Batch, steps: int, detach: bool = False) -> list[Tensor]:
        """The training-time test: the state [B, T - 1, H] of every slot after each of `steps` draft steps.

        `detach` stops the gradient where a state is fed back, so each step trains by itself.
        """
        embeddings = self.embedding(batch.input_ids)  # [B, T, H]
        u = self.enter(batch.features[:, :-1])  # [B, S, H] with S = T - 1 slots
        num_slots = u.shape[1]
        positions = torch.arange(num_slots, device=u.device)[None]
        if batch.documents is not None:
            positions = positions_of(batch.documents, u.device)[:, :num_slots]
        group = self.g.num_heads // self.g.num_kv_heads
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []
        for k in range(steps):
            tokens = embeddings[:, 1 + k :]
            tokens = nn.functional.pad(tokens, (0, 0, 0, num_slots - tokens.shape[1])).to(u.dtype)
            residual, q, key, value = self.project(tokens, u, self.rotary(u, positions + k))
            keys.append(key.repeat_interleave(group, 1))
            values.append(value.repeat_interleave(group, 1))
            u = self.finish(residual, ttt_attention(q, keys, values, self.g.head_dim**-0.5, batch.documents))
            states.append(u)
            if detach:
                u, keys[-1], values[-1] = u.detach(), keys[-1].detach(), values[-1].detach()
        return states

    @torch.no_grad()
    def begin(self, features: Tensor, tokens: Tensor, lengths: Tensor, capacity: int) -> tuple[State, Tensor]:
        cache = TreeCache(1, len(tokens), capacity, tokens.device)
        depths = torch.arange(features.shape[1], device=tokens.device).expand(len(tokens), -1)
        start, end = cache.open(features.shape[1])
        u = self._run(cache, tokens[:, 1:], self.enter(features), Visibility(cache.lengths, depths, None, start, end))
        cache.commit(depths, lengths.tolist(), moved=False)
        state = State(cache, Guesses(len(tokens), tokens.device), take_last(u, lengths))
        return state, self.logits(state.states)

    @torch.no_grad()
    def extend(self, state: State, tokens: Tensor, parents: Tensor) -> Tensor:
        done = state.guesses.depths.shape[1]
        rows = state.guesses.add(parents)
        start, end = state.cache.open(tokens.shape[1], done)
        tree = Visibility(state.cache.lengths, state.guesses.depths, rows, start, end)
        u = state.states.gather(1, parents[:, :, None].expand(-1, -1, self.g.hidden))  # [B, m, H]
        u = self._run(state.cache, tokens, u, tree)
        state.states = torch.cat([state.states, u], 1)
        return self.logits(u)

    @torch.no_grad()
    def commit(self, state: State, features: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        batch, m = tokens.shape
        chain = torch.arange(m, device=tokens.device).expand(batch, m)
        causal = torch.ones(m, m, dtype=torch.bool, device=tokens.device).tril().expand(batch, m, m)
        start, end = state.cache.open(m)
        visible = Visibility(state.cache.lengths, chain, causal, start, end)
        u = self._run(state.cache, tokens, self.enter(features), visible)
        state.cache.commit(chain, counts, moved=False)
        state.guesses = Guesses(batch, tokens.device)
        state.states = take_last(u, counts)
        return self.logits(state.states)

    def select(self, state: State, rows: Tensor) -> None:
        state.cache.select(rows)
        state.guesses.select(rows)
        state.states = state.states[rows]

    def _run(self, cache: TreeCache, tokens: Tensor, u: Tensor, visible: Visibility) -> Tensor:
        """The layer over new slots: tokens [B, m] and the states they meet [B, m, H] -> states [B, m, H]."""
        positions = visible.lengths[:, None] + visible.depths[:, -tokens.shape[1] :]
        embedding = self.embedding(tokens).to(u.dtype)
        residual, q, key, value = self.project(embedding, u, self.rotary(u, positions))
        keys, values = cache.write(0, key, value)
        attended, _ = attend_tree(self, q, keys, values, None, tree=visible, scaling=self.g.head_dim**-0.5)
        return self.finish(residual, attended.transpose(1, 2))


def take_last(u: Tensor, counts: Tensor) -> Tensor:
    """u [B, m, H] -> [B, 1, H], row b at counts[b] - 1."""
    return u.gather(1, (counts - 1)[:, None, None].expand(-1, 1, u.shape[2]))


def predicting_slots(
    loss_mask: Tensor, steps: int, documents: Documents | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which slots are trained. loss_mask [B, T]; documents: lengths of conversations packed into the one row.

    Returns rows b and positions j, both [N], of the teachers: the target at position j teaches the token j + 1, which is
    trained; slots [K, N] that predict that token at each draft step; and known [K, N], False where the slot would lie
    in front of the conversation (its index is then 0).
    """
    first = (
        torch.zeros_like(loss_mask, dtype=torch.int64) if documents is None else starts_of(documents, loss_mask.device)
    )
    places = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    b, i = (loss_mask.bool() & (places - first >= 2)).nonzero(as_tuple=True)  # predicted tokens
    slots = i - 2 - torch.arange(steps, device=i.device)[:, None]
    return b, i - 1, slots.clamp(min=0), slots >= first[b, i]
