"""Hidden states of chosen layers, taken with forward hooks while the model runs.

A layer is named by its boundary b, as in transformers' `hidden_states[b]`: the input of decoder layer b, which is the
output of layer b - 1. b = num_layers is the last hidden state after the final norm.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def find_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal language model."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise AssertionError(f"{type(model).__name__} has no list of {depth} decoder layers")


class Capture:
    """Context manager: while it is entered, every forward of `model` records the chosen boundaries.

    `take()` gives the features of the last forward, [B, T, len(layers) * H] in the order of `layers`, and forgets them.
    """

    def __init__(self, model: Any, layers: Sequence[int]):
        self.model = model
        self.layers = tuple(layers)
        self._states: dict[int, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "Capture":
        decoder_layers = find_layers(self.model)
        depth = len(decoder_layers)
        for b in self.layers:  # all of them before the first hook: a failed entry leaves none behind
            assert 0 <= b <= depth, f"boundary {b} is outside 0..{depth}"
        for b in self.layers:
            if b < depth:
                hook = decoder_layers[b].register_forward_pre_hook(self._record_input(b), with_kwargs=True)
            else:
                hook = self.model.base_model.register_forward_hook(self._record_output(b))
            self._hooks.append(hook)
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._states.clear()

    def take(self) -> Tensor:
        parts = [self._states[b] for b in self.layers]
        features = torch.cat([x.to(parts[-1].device) for x in parts], dim=-1)  # [B, T, F]; layers may span devices
        self._states.clear()
        return features

    def _record_input(self, b: int):
        def record(module, args, kwargs):
            self._states[b] = args[0] if args else kwargs["hidden_states"]

        return record

    def _record_output(self, b: int):
        def record(module, args, output):
            self._states[b] = output[0]  # last_hidden_state, for tuples and ModelOutputs alike

        return record
