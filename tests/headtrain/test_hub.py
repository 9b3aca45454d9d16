"""Push and pull with the real client over a real socket, against tests/hub_server.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from decode.errors import UserError
from headtrain import cli, hub
from headtrain.checkpoint import save_head
from headtrain.evaluate import open_head
from headtrain.heads.base import load_family
from headtrain.target import Target
from tests.folders import ROOT
from tests.headtrain.report import make_report
from tests.hub_server import Hub

TOKEN = "hf_aVerySecretTokenOfTheTests"
REPO = "org/tiny-head"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target_folder) -> Path:
    """A head with recipe, tree and report, as training, tuning and evaluation leave it. Read only."""
    folder = tmp_path_factory.mktemp("heads") / "head"
    target = Target.load(str(target_folder), "float32")
    family = load_family("eagle3")
    save_head(folder, family.build(family.Config(vocabulary=None, steps=2), target), "eagle3", target)
    recipe = {
        "target": {"model": str(target_folder)},
        "data": {"train": ["/tmp/secret/chats.jsonl"]},
        "output": "/tmp/run",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    plan = {"kind": "chain", "depth": 2}
    (folder / "tree.json").write_text(json.dumps({"greedy": {"plan": plan, "draft_ratio": 1.0}}))
    (folder / "report.json").write_text(json.dumps(make_report(target=str(target_folder))))
    return folder


@pytest.fixture
def head(trained, tmp_path) -> Path:
    """A copy to damage."""
    folder = tmp_path / "head"
    folder.mkdir()
    for path in trained.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The client of this process talks to a fresh small Hub, without waiting between its tries."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    with Hub(TOKEN) as running:
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


def run(capfd, monkeypatch, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["headtrain", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
        raise SystemExit(0)
    out, err = capfd.readouterr()
    assert TOKEN not in out + err and "signature=secret" not in out + err
    return int(end.value.code or 0), out, err


def complaint(err: str) -> str:
    """The one line of an error, after the notes."""
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1 and lines[0].startswith("headtrain: "), err
    return lines[0]


def test_push_then_pull_by_revision(capfd, monkeypatch, server, trained, tmp_path):
    code, out, err = run(capfd, monkeypatch, "push", trained, REPO)
    assert code == 0 and re.fullmatch(rf"{server.endpoint}/{REPO}/commit/[0-9a-f]{{40}}\n", out), err
    commit = out.strip().rpartition("/")[2]
    assert server.count("POST", "/commit/") == 1 and not server.leaked
    assert set(server.files(REPO)) == set(hub.FILES)

    second = tmp_path / "second"  # main moves on, the commit stays what it was
    second.mkdir()
    for path in trained.iterdir():
        (second / path.name).write_bytes(path.read_bytes())
    tensors = load_file(trained / "model.safetensors")
    save_file({name: torch.zeros_like(x) for name, x in tensors.items()}, second / "model.safetensors")
    (second / "tree.json").unlink()
    assert run(capfd, monkeypatch, "push", second, REPO)[0] == 0
    assert "tree.json" not in server.files(REPO), "a tree that was tuned for other weights stayed"

    pulled, newest = hub.local_head(f"{REPO}@{commit}"), hub.local_head(REPO)
    for path in trained.iterdir():
        assert (pulled / path.name).read_bytes() == path.read_bytes(), path.name
    assert not (newest / "tree.json").exists()
    loaded, _ = open_head(pulled, None, "float32", "cpu")
    assert all(torch.equal(x, tensors[name]) for name, x in loaded.state_dict().items())
    before = len(server.requests)
    assert hub.local_head(f"{REPO}@{commit}") == pulled
    assert not any("/resolve/" in path for _, path in server.requests[before:]), "fetched twice"
    code, out, err = run(capfd, monkeypatch, "generate", f"{REPO}@{commit}", "rain", "--max-new-tokens", "4")
    assert code == 0 and out.endswith("\n"), err
    for path in [*tmp_path.rglob("*"), *trained.rglob("*")]:
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


def test_the_same_again_is_no_commit(capfd, monkeypatch, server, trained):
    first = run(capfd, monkeypatch, "push", trained, REPO)[1]
    assert run(capfd, monkeypatch, "push", trained, REPO)[1] == first
    assert server.count("POST", "/commit/") == server.count("PUT", "/lfs/") == 1


def test_branch_and_private(capfd, monkeypatch, server, trained):
    assert run(capfd, monkeypatch, "push", trained, REPO, "--private", "--revision", "v/1")[0] == 0
    repository = server.repositories[REPO]
    assert repository.private and set(server.files(REPO, "v/1")) == set(hub.FILES) and not server.files(REPO)
    assert (hub.local_head(f"{REPO}@v/1") / "config.json").is_file()
    repository.private = False
    code, _, err = run(capfd, monkeypatch, "push", trained, REPO, "--private")
    assert code == 2 and "exists and is public, nothing was uploaded" in complaint(err) and not server.files(REPO)


def test_one_cut_is_retried(capfd, monkeypatch, server, trained):
    server.cut = 1
    code, _, err = run(capfd, monkeypatch, "push", trained, REPO)
    assert code == 0 and server.count("PUT", "/lfs/") == 2
    assert all(line.startswith("note: ") for line in err.splitlines()), err
    assert server.files(REPO)["model.safetensors"] == (trained / "model.safetensors").read_bytes()


@pytest.mark.parametrize("fault", ["upload", "commit"])
def test_a_connection_that_stays_broken_commits_nothing(capfd, monkeypatch, server, trained, fault):
    setattr(server, "cut" if fault == "upload" else "cut_commits", 1000)
    code, out, err = run(capfd, monkeypatch, "push", trained, REPO)
    assert code == 2 and out == "" and "connection to the Hub broke" in complaint(err)
    assert not server.files(REPO)
    server.cut = server.cut_commits = 0
    uploads = server.count("PUT", "/lfs/")
    assert run(capfd, monkeypatch, "push", trained, REPO)[0] == 0 and set(server.files(REPO)) == set(hub.FILES)
    if fault == "commit":
        assert server.count("PUT", "/lfs/") == uploads, "what was stored is not sent again"


def test_refusals(capfd, monkeypatch, server, trained):
    code, _, err = run(capfd, monkeypatch, "push", trained, "others/tiny-head")
    assert code == 2 and "answered 403" in complaint(err) and "under others" in err and "token that may write" in err
    server.words = f"bad\ntoken {TOKEN}"  # a server that echoes what it got
    for fragment in ("create", "preupload", "lfs", "commit", "branch"):
        server.refuse = {fragment: 403}
        code, out, err = run(capfd, monkeypatch, "push", trained, REPO, "--revision", "side")
        assert code == 2 and out == "" and "answered 403 (bad token TOKEN)" in complaint(err), fragment
    server.refuse = {"create": 403, "preupload": 503}  # who may not create may still write
    assert "answered 503" in complaint(run(capfd, monkeypatch, "push", trained, REPO)[2])
    assert not server.files(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_anotherToken")
    server.refuse = {}
    code, _, err = run(capfd, monkeypatch, "push", trained, REPO)
    assert code == 2 and "answered 401" in complaint(err) and "hf auth login" in err and "hf_anotherToken" not in err
    monkeypatch.delenv("HF_TOKEN")
    before = len(server.requests)
    code, _, err = run(capfd, monkeypatch, "push", trained, REPO)
    assert code == 2 and "no token for the Hub" in complaint(err) and len(server.requests) == before


@pytest.mark.parametrize(
    "repo", ["org/name/sub", "./out/head", "/tmp/head", "name", "org/na me", "org/name@v1", "org/a--b"]
)
def test_repository_names(capfd, monkeypatch, server, trained, repo):
    code, _, err = run(capfd, monkeypatch, "push", trained, repo, "--dry-run")
    assert code == 2 and "REPO: " in complaint(err) and "write org/name" in err and not server.requests


def test_heads_that_cannot_be_pushed(capfd, monkeypatch, server, head):
    def fails(*extra: object) -> str:
        code, out, err = run(capfd, monkeypatch, "push", head, REPO, *extra)
        assert code == 2 and out == "" and not server.requests
        return complaint(err)

    assert "claims only what was measured" in fails("--report", head / "none.json")
    report = (head / "report.json").read_text()
    (head / "report.json").unlink()
    assert f"headtrain evaluate {head} --prompts FILE --out {head}" in fails()
    for text in ("{", "[]", "{}", report.replace("2.25", "NaN"), report.replace('"chain"', '"bush"')):
        (head / "report.json").write_text(text)
        assert str(head / "report.json") in fails() and "measure the head again" in fails()
    (head / "report.json").write_text(report)
    (head / "recipe.yaml").write_text("- a\n: {")
    assert "recipe.yaml: is no recipe" in fails()
    (head / "recipe.yaml").unlink()
    weights = head / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    assert "not a complete safetensors file" in fails()
    save_file({}, weights)
    assert "holds no tensors" in fails()
    weights.unlink()
    assert "model.safetensors is missing" in fails()


def test_names_that_cannot_be_pulled(capfd, monkeypatch, server, trained, tmp_path):
    def fails(name: str) -> str:
        code, _, err = run(capfd, monkeypatch, "generate", name, "rain")
        assert code == 2
        return complaint(err)

    assert run(capfd, monkeypatch, "push", trained, REPO, "--private")[0] == 0
    assert "no such revision" in fails(f"{REPO}@v9")
    assert "no revision behind @" in fails(f"{REPO}@")
    assert "is no folder here, and the Hub answered 404" in fails("org/other")
    server.repositories[REPO].commit("empty", {"notes.txt": b""})
    assert "holds no head" in fails(f"{REPO}@empty")
    monkeypatch.delenv("HF_TOKEN")
    assert "the Hub answered 401" in fails(REPO)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "connection to the Hub broke" in fails("org/third")
    assert hub.local_head("ngram") == Path("ngram") and hub.local_head(str(tmp_path)) == tmp_path


def test_a_folder_wins_over_a_hub_name(monkeypatch, server, tmp_path):
    (tmp_path / "org" / "tiny-head").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.local_head(REPO) == Path(REPO) and not server.requests


def test_dry_run_in_a_process_without_token_and_network(trained, tmp_path):
    """Nothing of the client is patched here; the endpoint refuses connections."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    }
    command = [sys.executable, "-m", "headtrain.cli", "push", str(trained), REPO, "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "# tiny-head" in done.stdout and "secret" not in done.stdout
    for name in hub.FILES:
        size = "[0-9,]+" if name == "README.md" else f"{(trained / name).stat().st_size:,}"
        assert re.search(rf"^ *{size}  {name}$", done.stdout, re.MULTILINE), name
    assert "recipe.yaml is uploaded as it is" in done.stderr and "/tmp/secret/chats.jsonl" in done.stderr


def test_errors_of_our_own_code_are_not_translated():
    with pytest.raises(KeyError), hub.translated(REPO, None):
        raise KeyError("a mistake of ours")
    with pytest.raises(UserError, match="^org/tiny-head: the client refused .a TOKEN b.$"), hub.translated(REPO, TOKEN):
        raise ValueError(f"a\n{TOKEN}\nb")
    with pytest.raises(UserError, match="^org/tiny-head: /cache: No space left on device$"), hub.translated(REPO, None):
        raise OSError(28, "No space left on device", "/cache")
