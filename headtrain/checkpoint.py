"""Heads and training states on disk.

A head is a folder: `model.safetensors`, `config.json` (family, its settings, the target it was made for) and
`recipe.yaml`. A checkpoint is such a folder with the optimizer's state and the step beside it. Folders are written
under a temporary name and renamed, so a folder that exists is complete.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.errors import UserError
from headtrain.heads.base import Head, load_family
from headtrain.target import Target
from headtrain.vocabulary import describe_vocabulary

FORMAT = 1
HEAD_FILES = ("config.json", "model.safetensors")


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a temporary folder, flush it, and put it in the place of `folder`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"{folder}: cannot write there ({error.strerror}); choose a folder you can write to") from error
    try:
        fill(staging)
        for path in staging.rglob("*"):
            if path.is_file():
                path.chmod(0o644)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        staging.chmod(0o755)
        if folder.exists():
            retired = staging.with_name(staging.name + "-old")
            folder.rename(retired)
            staging.rename(folder)
            shutil.rmtree(retired)
        else:
            staging.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{folder}: nothing was saved ({reason}); free some space or change `output`") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def recover_folders(parent: Path) -> None:
    """Behind a kill: put back folders that were about to be replaced, and delete what was half-written in `parent`."""
    for retired in parent.glob(".*-old"):
        folder = parent / retired.name[1:].rsplit("-", 2)[0]
        if not folder.exists():
            retired.rename(folder)
    for staging in [*parent.glob(".head-*"), *parent.glob(".best-*"), *parent.glob(".step-*")]:
        shutil.rmtree(staging, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole: under a temporary name, flushed, then renamed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose a folder you can write to") from error


def describe_target(target: Target) -> dict[str, Any]:
    """What a head must find again in the target it is loaded for."""
    config = target.config
    vocabulary = target.tokenizer.get_vocab() if target.tokenizer is not None else {}
    digest = hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()[:16]
    return {
        "name": target.name,
        "model_type": config.model_type,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "tokenizer": digest,
    }


def describe_head(head: Head, family: str, target: Target) -> dict[str, Any]:
    """The content of config.json."""
    described = describe_target(target)
    return {
        "format": FORMAT,
        "family": family,
        "head": head.config.model_dump(mode="json"),
        "layers": list(head.target_layers),
        "vocabulary": describe_vocabulary(head.vocabulary, described),
        "target": described,
        "template_kwargs": target.template_kwargs,
    }


def save_head(
    folder: Path, head: Head, family: str, target: Target, recipe: Any = None, dtype: torch.dtype | None = None
) -> None:
    """Write the head's folder. `dtype` converts floating tensors; `recipe` is saved resolved when given."""
    write_folder(folder, lambda staging: fill_head(staging, head, family, target, recipe, dtype))


def fill_head(folder: Path, head: Head, family: str, target: Target, recipe: Any, dtype: torch.dtype | None) -> None:
    def converted(x: Tensor) -> Tensor:
        return x.detach().to("cpu", dtype if dtype and x.is_floating_point() else x.dtype).contiguous()

    save_file({name: converted(x) for name, x in head.state_dict().items()}, folder / "model.safetensors")
    config = describe_head(head, family, target)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    head.save_beside(folder, dtype)
    if recipe is not None:
        recipe.save(folder / "recipe.yaml")


def read_config(folder: Path) -> dict[str, Any]:
    """The head's config.json. Raises UserError for anything that is not a head."""
    for name in HEAD_FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: is not a head, {name} is missing; give the folder that training wrote")
    try:
        config = json.loads((folder / "config.json").read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{folder / 'config.json'}: is not readable JSON ({error})") from error
    if not isinstance(config, dict) or not {"format", "family", "head", "layers", "target"} <= config.keys():
        raise UserError(
            f"{folder / 'config.json'}: is no config of this project; import other layouts with `headtrain import`"
        )
    if config["format"] != FORMAT:
        raise UserError(
            f"{folder / 'config.json'}: format {config['format']} is unknown here (expected {FORMAT}); update headtrain"
        )
    for key, kind in (("family", str), ("head", dict), ("layers", list), ("target", dict)):
        if not isinstance(config[key], kind):
            raise UserError(f"{folder / 'config.json'}: {key} is {config[key]!r}; copy or train the head again")
    return config


def load_head(folder: Path, target: Target, dtype: torch.dtype | None = None) -> Head:
    """Rebuild a head for `target`. Strict: another target, a missing, extra or misshaped tensor are UserErrors."""
    config = read_config(folder)
    found = describe_target(target)
    for key in ("model_type", "num_layers", "hidden_size", "vocab_size", "tokenizer"):
        if config["target"].get(key) != found[key]:
            raise UserError(
                f"{folder}: the head was made for {config['target'].get('name')} with {key} {config['target'].get(key)},"
                f" but {target.name} has {found[key]}; give the target it was trained on"
            )
    family = load_family(config["family"])
    try:
        settings = family.Config(**config["head"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["head", *map(str, first["loc"])])
        raise UserError(f"{folder / 'config.json'}: {where}: {first['msg']}; is it of another version?") from error
    head = family.restore(settings, config["layers"], target, read_shapes(folder))
    load_tensors(head, folder / "model.safetensors")
    require_vocabulary(str(folder), config, describe_vocabulary(head.vocabulary, found), "copy or train the head again")
    return head.to(target.device, dtype or target.dtype).eval()


def require_vocabulary(where: str, config: dict[str, Any], expected: dict[str, Any] | None, mend: str) -> None:
    """Raises UserError unless the head's config names this draft vocabulary, or, as older ones do, none at all."""

    def words(vocabulary: Any) -> str:
        if not isinstance(vocabulary, dict):
            return "the whole vocabulary"
        return f"{vocabulary.get('size')} tokens ({str(vocabulary.get('hash'))[:8]})"

    found = config.get("vocabulary", expected)
    if found != expected:
        raise UserError(
            f"{where}: made for the draft vocabulary of {words(found)}, not that of {words(expected)}: chosen from"
            f" other data, of another size, or for another target; {mend}"
        )


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the head's tensors by name, without reading them."""
    path = folder / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: is not a complete safetensors file ({error}); copy or train the head again"
        ) from error


def load_tensors(module: torch.nn.Module, path: Path) -> None:
    """Fill `module` from a safetensors file; every tensor must be there, fit, and be used."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: is not a complete safetensors file ({error}); copy or train the head again"
        ) from error
    expected = module.state_dict()
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(expected[name].shape)}"
        for name in sorted(expected.keys() & tensors.keys())
        if tensors[name].shape != expected[name].shape
    ]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    module.load_state_dict(tensors)


def save_checkpoint(
    folder: Path,
    head: Head,
    family: str,
    target: Target,
    recipe: Any,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> None:
    """A head in float32 with `optimizer.safetensors` and `state.json` (step and what else the trainer must know)."""

    def fill(staging: Path) -> None:
        fill_head(staging, head, family, target, recipe, None)
        save_file(optimizer_tensors(optimizer), staging / "optimizer.safetensors")
        (staging / "state.json").write_text(json.dumps(state, indent=2) + "\n")

    write_folder(folder, fill)


def load_checkpoint(folder: Path, head: Head, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put head and optimizer back; returns the saved state. Raises UserError for what is damaged or does not fit."""
    load_tensors(head, folder / "model.safetensors")
    mend = "delete this checkpoint, or give another `output`"
    path = folder / "optimizer.safetensors"
    try:
        restore_optimizer(optimizer, load_file(path))
        path = folder / "state.json"
        return json.loads(path.read_text())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{path}: is damaged or does not fit ({' '.join(str(error).split())}); {mend}") from error


def require_same_head(folder: Path, head: Head, family: str, target: Target) -> None:
    """Raises UserError unless the checkpoint is of this very head: family, settings, boundaries and target."""
    found, expected = read_config(folder), describe_head(head, family, target)
    for config in (found, expected):
        config["target"].pop("name", None)  # a folder may move
    vocabulary = expected.pop("vocabulary")
    for key, value in expected.items():
        if found.get(key, value) != value:
            raise UserError(
                f"output: {folder} has {key} {found[key]}, this recipe gives {value}; give its recipe again, or another"
                " `output`"
            )
    mend = "give its recipe and data again, or another `output`"
    require_vocabulary(f"output: {folder}", found, vocabulary, mend)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's per-parameter state under the names `<parameter index>.<key>`."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for index, entry in state.items()
        for key, value in entry.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    saved = optimizer.state_dict()
    saved["state"] = {}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        saved["state"].setdefault(int(index), {})[key] = tensor
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    for index, entry in saved["state"].items():
        if index >= len(shapes) or entry["exp_avg"].shape != shapes[index]:
            raise ValueError(f"parameter {index} has another shape or is not trained now")
    optimizer.load_state_dict(saved)


def list_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("step-*") if (run / "checkpoints").is_dir() else []
    return sorted((path for path in found if (path / "state.json").is_file()), key=lambda path: int(path.name[5:]))


def prune_checkpoints(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what killed runs left half-written."""
    for path in list_checkpoints(run)[:-keep]:
        shutil.rmtree(path)
    for path in (run / "checkpoints").glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
