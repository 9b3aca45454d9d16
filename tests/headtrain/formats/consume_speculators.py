"""Runs where `speculators` is installed: loads an export with its own classes and writes the logits of two draft steps.

Usage: python consume_speculators.py EXPORT INPUTS OUTPUT; safetensors of features [1, S, F] and tokens [1, S], the
token behind each feature, in; logits [2, S, V] over the target's tokens out, -inf where the draft has no column.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig


def main(folder: str, inputs: str, output: str) -> None:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    given, logits = load_file(inputs), []
    model.lm_head.register_forward_hook(lambda module, arguments, out: logits.append(out[0].float()))
    with torch.no_grad():
        model(given["features"], given["tokens"], torch.zeros_like(given["tokens"]), ttt_steps=2)
    columns = torch.arange(model.draft_vocab_size)
    columns = columns + model.d2t if model.d2t is not None else columns
    spread = torch.full((2, given["tokens"].shape[1], model.verifier_vocab_size), float("-inf"))
    spread[:, :, columns] = torch.stack(logits)
    save_file({"logits": spread}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
