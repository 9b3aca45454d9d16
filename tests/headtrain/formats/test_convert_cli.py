"""The commands `headtrain export` and `headtrain import`."""

from __future__ import annotations

import sys

import pytest
from safetensors.torch import load_file

from headtrain import cli
from headtrain.target import Target
from tests.headtrain.formats.heads import make_head, save


def run(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    capsys.readouterr()  # what the fixtures printed
    monkeypatch.setattr(sys, "argv", ["headtrain", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    out = capsys.readouterr()
    return int(done.value.code or 0), out.out, out.err


@pytest.fixture
def head(tmp_path, target_folder):
    target = Target.load(str(target_folder), "float32")
    return save(make_head("eagle3", target, layers=[1, 2, 3]), "eagle3", target, tmp_path / "head")


def test_export_and_import(monkeypatch, capsys, tmp_path, head, target_folder):
    code, out, _ = run(monkeypatch, capsys, "export", head, tmp_path / "public", "--format", "speculators")
    assert code == 0 and str(tmp_path / "public") in out
    code, out, _ = run(monkeypatch, capsys, "import", tmp_path / "public", tmp_path / "back")
    assert code == 0 and out.startswith("speculators: ")
    names = ("head", "back")
    ours, back = (load_file(tmp_path / name / "model.safetensors") for name in names)
    assert ours.keys() == back.keys() and all((ours[name] == back[name]).all() for name in ours)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("export", "HEAD", "OUT", "--format", "medusa"), "cannot hold a head of family eagle3"),
        (("export", "HEAD", "OUT", "--format", "sglnag"), "did you mean 'sglang'"),
        (("export", "HEAD", "OUT", "--format", "sglang"), "cannot express boundary 3"),
        (("import", "HEAD", "OUT"), "--target: "),
        (("import", "nowhere", "OUT"), "nowhere: is no folder"),
    ],
)
def test_errors_are_one_line(monkeypatch, capsys, tmp_path, head, arguments, part):
    places = {"HEAD": head, "OUT": tmp_path / "out"}
    code, out, err = run(monkeypatch, capsys, *(places.get(argument, argument) for argument in arguments))
    assert code == 2 and not out
    assert err.startswith("headtrain: ") and err.count("\n") == 1 and part in err
    assert not (tmp_path / "out").exists()
