"""Files of checkpoints in public layouts: safetensors, alone or sharded, and pickles only where they are allowed."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decode.errors import UserError, one_line
from headtrain.formats.base import Checkpoint, read_json, require

SAFE = ("model.safetensors", "{}_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "{}_lm_head.pt")
STEMS = ("medusa", "hydra")


def _candidates(patterns: tuple[str, ...]) -> list[str]:
    return [
        name for pattern in patterns for name in ([pattern.format(s) for s in STEMS] if "{" in pattern else [pattern])
    ]


def read_checkpoint(folder: Path, pickle: bool = False) -> Checkpoint:
    """config.json and all tensors of a folder. `pickle` allows `.bin` and `.pt`, read with `weights_only=True`."""
    require(folder.is_dir(), folder, "is no folder; give the folder of a head, with its config.json and tensors")
    require((folder / "config.json").is_file(), folder, "config.json is missing; copy the whole head")
    config = read_json(folder / "config.json")
    return Checkpoint(config, _read_tensors(folder, pickle), folder)


def _read_tensors(folder: Path, pickle: bool) -> dict[str, Tensor]:
    for name in _candidates(SAFE):
        if (folder / name).is_file():
            return read_safetensors(folder / name)
    if (folder / "model.safetensors.index.json").is_file():
        return _read_shards(folder)
    for name in _candidates(PICKLES):
        if (folder / name).is_file():
            require(pickle, folder / name, "is a pickle, and no safetensors lie beside it; add --pickle to read it")
            return read_pickle(folder / name)
    known = ", ".join(_candidates(SAFE + PICKLES))
    raise UserError(f"{folder}: holds no tensors; expected one of {known}")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(value, str) for value in listed.values()):
        raise UserError(f"{index}: has no weight_map of file names; copy it again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(listed.values())):
        require(Path(name).name == name, index, f"names {name}, which lies outside the folder; copy it again")
        tensors |= read_safetensors(folder / name)
    lost = sorted(listed.keys() - tensors.keys())
    require(not lost, folder, f"the index lists tensors that no file holds: {', '.join(lost[:8])}; copy it again")
    return tensors


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: is not a complete safetensors file ({one_line(error)}); copy it again") from error


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a `.bin` or `.pt`; anything but plain tensors is refused before it runs."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the pickle machinery does
        raise UserError(f"{path}: is no pickle of plain tensors ({one_line(error, 120)}); it was not run") from error
    plain = isinstance(found, dict) and all(isinstance(x, Tensor) for x in found.values())
    require(plain, path, "holds other things than tensors by name; give a file of plain tensors")
    return {name: x.contiguous() for name, x in found.items()}
