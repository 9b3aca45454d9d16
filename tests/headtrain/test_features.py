"""The cache gives what the target gives, and is refused where it cannot."""

import json
import os
from pathlib import Path

import pytest
import torch

import headtrain.features as features
from decode.errors import UserError
from headtrain.data import collate
from headtrain.features import CachedFeatures, OnlineFeatures, bytes_per_token, fingerprint, open_features, write_cache
from headtrain.target import Target
from tests.folders import load_parts, losses, make_target_folder, recipe_dict

LAYERS = (1, 3)


@pytest.fixture
def parts(target_folder, chats, monkeypatch):
    monkeypatch.setattr(features, "SHARD_TOKENS", 200)  # several shards
    return load_parts(target_folder, chats)


def fill(parts, folder: Path, layers=LAYERS) -> list[int]:
    target, dataset = parts
    return list(write_cache(dataset, target, layers, folder, batch_tokens=150))


def assert_same_batches(parts, folder: Path) -> None:
    target, dataset = parts
    online, cached = OnlineFeatures(dataset, target, LAYERS), CachedFeatures(dataset, target, LAYERS, folder)
    for rows in ([0], [3, 1, 2], list(range(len(dataset)))):
        expected, found = online.batch(rows), cached.batch(rows)
        assert torch.equal(found.input_ids, expected.input_ids) and torch.equal(found.loss_mask, expected.loss_mask)
        lengths = collate(dataset, rows, 0)["lengths"]
        valid = torch.arange(expected.input_ids.shape[1]) < lengths[:, None]
        for name in ("features", "hidden"):
            a, b = getattr(found, name), getattr(expected, name)
            assert a.dtype == b.dtype and a.shape == b.shape
            torch.testing.assert_close(a[valid], b[valid], rtol=1e-4, atol=1e-4)


def assert_refused(parts, folder: Path, *words: str, layers=LAYERS) -> None:
    target, dataset = parts
    with pytest.raises(UserError) as error:
        CachedFeatures(dataset, target, layers, folder)
    text = str(error.value)
    assert "\n" not in text and text.startswith("data.cache: ") and all(word in text for word in words), text


def test_cache_gives_the_batches_of_the_target(tmp_path, parts):
    done = fill(parts, tmp_path)
    assert len(done) > 2 and done == sorted(done) and done[-1] == len(parts[1].ids)
    assert_same_batches(parts, tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    stored = bytes_per_token(parts[0], LAYERS) * len(parts[1].ids)
    assert stored <= size <= stored + 200 * len(done)


def test_cache_in_bfloat16(tmp_path, target_folder, chats):
    _, dataset = load_parts(target_folder, chats)
    target = Target.load(str(target_folder), "bfloat16")
    fill((target, dataset), tmp_path)
    found = CachedFeatures(dataset, target, LAYERS, tmp_path).batch([2])
    expected = OnlineFeatures(dataset, target, LAYERS).batch([2])
    assert found.features.dtype == torch.bfloat16
    torch.testing.assert_close(found.features, expected.features, rtol=0.05, atol=0.1)
    assert_refused(load_parts(target_folder, chats), tmp_path, "dtype bfloat16")


def naive_float8(x: torch.Tensor, size: int) -> torch.Tensor:
    """Each part of `size` numbers by itself, rounded in float64 to 4 significant bits; below 2^-6 steps of 2^-9."""
    out = x.double().clone()
    for row in out:
        for start in range(0, len(row), size):
            scale = row[start : start + size].abs().max() / 448
            if scale > 0:
                y = row[start : start + size] / scale
                step = 2.0 ** (y.abs().clamp(min=2.0**-6).log2().floor() - 3)
                row[start : start + size] = (y / step).round() * step * scale
    return out


def test_float8_is_rounding_by_position_and_boundary():
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)[:, None]
    x[:, 8:16] *= 1e6
    x[2, 16:] = 0
    stored, scale = features.to_float8(x, 8)
    assert stored.dtype == torch.float8_e4m3fn and stored.shape == x.shape and scale.shape == (7, 3)
    found = features.from_float8(stored, scale, torch.float32)
    torch.testing.assert_close(found, naive_float8(x, 8).float(), rtol=1e-5, atol=1e-9)
    shared = naive_float8(x, 24).float()  # control: one scale a position loses the small boundaries
    worst = [features.relative_errors(x, y, 8)[:, 0].max() for y in (found, shared)]
    assert worst[0] < 0.06 and worst[1] > 0.5


def test_float8_cache_says_how_far_it_is_off(tmp_path, parts):
    target, dataset = parts
    list(write_cache(dataset, target, LAYERS, tmp_path, 150, "float8_e4m3fn"))
    online = OnlineFeatures(dataset, target, LAYERS)
    cached = CachedFeatures(dataset, target, LAYERS, tmp_path, storage="float8_e4m3fn")
    errors: dict[str, list] = {"features": [], "hidden": []}
    for row in range(len(dataset)):
        a, b = online.batch([row]), cached.batch([row])
        assert a.features.dtype == b.features.dtype and a.hidden.shape == b.hidden.shape
        for name, found in errors.items():
            found.append(features.relative_errors(getattr(a, name)[0], getattr(b, name)[0], target.hidden_size))
    written = features.cache_error(tmp_path)
    assert written is not None
    for name, found in errors.items():
        assert 0.005 < written[name] < 0.04 and written[name] == pytest.approx(float(torch.cat(found).mean()), rel=1e-2)
    assert written["worst"] == pytest.approx(max(float(torch.cat(x).max()) for x in errors.values()), rel=1e-2)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    stored = bytes_per_token(target, LAYERS, "float8_e4m3fn") * len(dataset.ids)
    assert stored <= size <= stored + 600 * len(list(tmp_path.glob("*.safetensors")))
    assert_refused(parts, tmp_path, "storage float8_e4m3fn")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    list(write_cache(dataset, target, LAYERS, tmp_path, 150, "float8_e4m3fn"))
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert features.cache_error(tmp_path) == written


def test_caches_of_before_name_no_storage(tmp_path, parts):
    fill(parts, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest.pop("storage") == "target" and "relative_error" not in manifest
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert_same_batches(parts, tmp_path)
    target, dataset = parts
    with pytest.raises(UserError, match="storage target"):
        CachedFeatures(dataset, target, LAYERS, tmp_path, storage="float8_e4m3fn")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_storage_keeps_every_bit(tmp_path, target_folder, chats, dtype):
    _, dataset = load_parts(target_folder, chats)
    target = Target.load(str(target_folder), dtype)
    list(write_cache(dataset, target, LAYERS, tmp_path, batch_tokens=1))  # row by row, as below
    cached, online = CachedFeatures(dataset, target, LAYERS, tmp_path), OnlineFeatures(dataset, target, LAYERS)
    for row in range(len(dataset)):
        a, b = online.batch([row]), cached.batch([row])
        assert torch.equal(a.features, b.features) and torch.equal(a.hidden, b.hidden)


def test_losses_on_a_float8_cache(tmp_path, target_folder, chats, fresh_accelerator):
    """Within 3 % of those on the target's own states in each step, and not equal to them."""
    from headtrain.heads.eagle3 import default_layers
    from headtrain.recipe import Recipe
    from headtrain.trainer import train

    raw = recipe_dict(target_folder, chats, tmp_path / "online", steps=4)
    train(Recipe.from_dict(raw))
    target, dataset = load_parts(target_folder, chats)
    layers = default_layers(target.num_layers)
    list(write_cache(dataset, target, layers, tmp_path / "cache", 256, "float8_e4m3fn"))
    raw["data"] |= {"cache": str(tmp_path / "cache"), "cache_dtype": "float8_e4m3fn"}
    train(Recipe.from_dict({**raw, "output": str(tmp_path / "cached")}))
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "online"), rel=0.03)
    assert losses(tmp_path / "cached") != pytest.approx(losses(tmp_path / "online"), rel=1e-6)


def test_training_on_the_cache_gives_the_same_losses(tmp_path, target_folder, chats, fresh_accelerator):
    from headtrain.recipe import Recipe
    from headtrain.trainer import train

    raw = recipe_dict(target_folder, chats, tmp_path / "online", steps=4)
    train(Recipe.from_dict(raw))
    target, dataset = load_parts(target_folder, chats)
    from headtrain.heads.eagle3 import default_layers

    list(write_cache(dataset, target, default_layers(target.num_layers), tmp_path / "cache", 256))
    raw["data"]["cache"], raw["output"] = str(tmp_path / "cache"), str(tmp_path / "cached")
    train(Recipe.from_dict(raw))
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "online"), rel=1e-3)


def test_stale_caches_are_refused(tmp_path, parts, chats, target_folder):
    fill(parts, tmp_path / "cache")
    target, dataset = parts
    assert_refused(parts, tmp_path / "cache", "layers", layers=(1, 2))
    assert_refused(load_parts(target_folder, chats, limit=5), tmp_path / "cache", "data")
    folder = make_target_folder(tmp_path / "other", seed=1)
    other = Target.load(str(folder), "float32")
    assert_refused((other, dataset), tmp_path / "cache", "target")
    with pytest.raises(UserError, match="layers"):
        fill(parts, tmp_path / "cache", layers=(2,))


def test_fingerprint_sees_any_layer(target_folder):
    """A fine-tuned target may keep its embedding, norms and lm_head."""
    target = Target.load(str(target_folder), "float32")
    before = fingerprint(target)
    assert fingerprint(Target.load(str(target_folder), "float32")) == before
    target.model.model.layers[1].self_attn.q_proj.weight.data.add_(0.01)
    assert fingerprint(target) != before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_bad_manifest(tmp_path, parts, text):
    fill(parts, tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    assert_refused(parts, tmp_path)


def test_missing_cache(tmp_path, parts):
    target, dataset = parts
    assert isinstance(open_features(dataset, target, LAYERS, None), OnlineFeatures)
    with pytest.raises(UserError, match="headtrain cache"):
        open_features(dataset, target, LAYERS, str(tmp_path / "none"))


def test_truncated_shard_is_refused_and_redone(tmp_path, parts):
    fill(parts, tmp_path)
    shards = sorted(tmp_path.glob("shard-*"))
    os.truncate(shards[1], shards[1].stat().st_size - 1)
    kept = [shard.stat().st_mtime_ns for shard in shards]
    assert_refused(parts, tmp_path, shards[1].name)
    fill(parts, tmp_path)
    assert_same_batches(parts, tmp_path)
    changed = [a != shard.stat().st_mtime_ns for a, shard in zip(kept, shards, strict=True)]
    assert changed == [index == 1 for index in range(len(shards))]
    shards[0].unlink()
    assert_refused(parts, tmp_path, shards[0].name)


def test_interrupted_write_resumes(tmp_path, parts, monkeypatch):
    target, dataset = parts
    real, calls = features.save_file, []

    def save_file(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(28, os.strerror(28))
        real(tensors, path, metadata)

    monkeypatch.setattr(features, "save_file", save_file)
    with pytest.raises(UserError, match="No space left") as error:
        fill(parts, tmp_path)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "shard-00000.safetensors"]
    assert_refused(parts, tmp_path, "shard-00001")
    first = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    fill(parts, tmp_path)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == first
    assert_same_batches(parts, tmp_path)


def test_abandoned_write_resumes(tmp_path, parts):
    """A killed writer leaves whole shards and at most one temporary file."""
    target, dataset = parts
    writer = write_cache(dataset, target, LAYERS, tmp_path, 150)
    next(writer)
    writer.close()
    (tmp_path / ".shard-00001.safetensors.partial").write_bytes(b"half")
    fill(parts, tmp_path)
    assert_same_batches(parts, tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_cache_below_a_file(tmp_path, parts):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Not a directory"):
        fill(parts, tmp_path / "file" / "cache")


def test_manifest_names_what_it_was_made_from(tmp_path, parts):
    fill(parts, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["layers"] == list(LAYERS) and manifest["rows"] == len(parts[1])
