"""A draft that knows the replies: it guesses right, wrong or second best by a fixed schedule, without any model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCHEDULE = (0, 0, 2, 0, 1, None, 0, 0, 1, 0, 3)  # rank of the true token at a position, None: not among the guesses


@dataclass
class State:
    names: Tensor  # [B] row of `sequences`
    roots: Tensor  # [B] position of the root
    nodes: Tensor  # [B, 1 + extended] position of a node on the true path, -1 off it; 0 is the root


class OracleDraft:
    """`sequences`: prompt and reply of each row, in the order of the prompts. The features are checked, if layers are given.

    Guesses off the true path are random. Levels are 20 apart in logits, so noise does not reorder them.
    """

    max_depth = None

    def __init__(self, sequences, vocab_size, vocabulary=None, layers=(), schedule=SCHEDULE, seed=0):
        self.sequences, self.vocabulary, self.target_layers = sequences, vocabulary, tuple(layers)
        self.columns = vocab_size if vocabulary is None else len(vocabulary)
        self.schedule, self.seed = schedule, seed
        self.seen: list[tuple[int, Tensor]] = []  # (row, features of its committed positions)

    def begin(self, features, tokens, lengths, capacity):
        assert (features is None) == (not self.target_layers)
        state = State(torch.arange(len(tokens)), lengths.clone(), lengths[:, None].clone())
        for b, length in enumerate(lengths.tolist()):
            row = tokens[b, : length + 1].tolist()
            matches = [i for i, known in enumerate(self.sequences) if known[: length + 1] == row]
            assert matches, "begin got other tokens than the prompt and its first new token"
            state.names[b] = matches[0]
        self._record(state, features, lengths)
        return state, self._logits(state, state.nodes)

    def extend(self, state, tokens, parents):
        above = state.nodes.gather(1, parents)
        found = torch.full_like(above, -1)
        for b, row in enumerate(above.tolist()):
            known = self.sequences[int(state.names[b])]
            for j, at in enumerate(row):
                if at >= 0 and at + 1 < len(known) and known[at + 1] == int(tokens[b, j]):
                    found[b, j] = at + 1
        state.nodes = torch.cat([state.nodes, found], 1)
        return self._logits(state, found)

    def commit(self, state, features, tokens, counts):
        for b, count in enumerate(counts.tolist()):
            at = int(state.roots[b]) + 1
            known = self.sequences[int(state.names[b])]
            assert tokens[b, :count].tolist() == known[at : at + count], "commit got other tokens than the reply"
        self._record(state, features, counts)
        state.roots = state.roots + counts
        state.nodes = state.roots[:, None].clone()
        return self._logits(state, state.nodes)

    def select(self, state, rows):
        state.names, state.roots, state.nodes = state.names[rows], state.roots[rows], state.nodes[rows]

    def _record(self, state, features, counts):
        if features is not None:
            for b, count in enumerate(counts.tolist()):
                self.seen.append((int(state.names[b]), features[b, :count].clone()))

    def _logits(self, state, nodes):
        batch, m = nodes.shape
        generator = torch.Generator().manual_seed(self.seed + int(nodes.clamp(min=0).sum()))
        logits = torch.randn(batch, m, self.columns, generator=generator)
        ids = list(range(self.columns)) if self.vocabulary is None else self.vocabulary.tolist()
        for b, row in enumerate(nodes.tolist()):
            known = self.sequences[int(state.names[b])]
            for j, at in enumerate(row):
                rank = self.schedule[(at + int(state.names[b])) % len(self.schedule)]
                if at < 0 or at + 1 >= len(known) or rank is None or known[at + 1] not in ids:
                    continue
                column = ids.index(known[at + 1])
                logits[b, j] -= 200
                logits[b, j, column] = 0
                for ahead in range(1, rank + 1):
                    logits[b, j, (column + ahead) % self.columns] = 20 * ahead
        return logits
