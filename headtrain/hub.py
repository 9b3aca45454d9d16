"""Heads on the Hugging Face Hub: `push` uploads one in a single commit, `local_head` fetches one by its name."""

import json
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from decode.errors import UserError, one_line
from headtrain.target import HUB_NAME

WEIGHTS = "model.safetensors"
OPTIONAL = ("recipe.yaml", "tree.json")
FILES = ("config.json", WEIGHTS, *OPTIONAL, "report.json", "README.md")
LOCAL_PATH = re.compile(r"(/|~|\.\.?[/\\]|[A-Za-z]:[/\\]).*")

Files = dict[str, bytes | Path]
"""Content by name in the repository; a Path is read when it is uploaded."""


def prepare(
    folder: Path, repo: str, report: Path | None = None, target: str | None = None, license: str | None = None
) -> Files:
    """What `push` uploads. Needs neither network nor token. Raises UserError for what is no whole, measured head.

    `report`: default is the folder's report.json. `target`: the target's Hub name, where the head knows only a folder.
    """
    from headtrain.card import serving_formats, training_recipe, write_card
    from headtrain.checkpoint import read_config, read_shapes

    check_repo(repo)
    if target is not None:
        check_repo(target, "--target")
    config = read_config(folder)
    if not read_shapes(folder):
        raise UserError(f"{folder / WEIGHTS}: holds no tensors; copy or train the head again")
    report = report or folder / "report.json"
    if not report.is_file():
        make = f"headtrain evaluate {folder} --prompts FILE --out {report.parent}"
        raise UserError(f"{report}: is missing, and a card claims only what was measured; make it with `{make}`")
    recipe = training_recipe(folder / "recipe.yaml")
    card = write_card(repo, config, recipe, report, target, license, serving_formats(config))
    names = ["config.json", *(name for name in OPTIONAL if (folder / name).is_file())]
    return {
        **{name: (folder / name).read_bytes() for name in names},
        WEIGHTS: folder / WEIGHTS,
        "report.json": report.read_bytes(),
        "README.md": card.encode(),
    }


def check_repo(repo: str, what: str = "REPO") -> None:
    """Raises UserError unless `repo` is written org/name, as the Hub allows it."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    wanted = "write org/name; a revision goes to --revision" if what == "REPO" else "write org/name"
    if repo.count("/") != 1:
        raise UserError(f"{what}: {repo} is no repository on the Hub; {wanted}")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{what}: {repo} is no name that the Hub allows ({one_line(error)}); {wanted}") from error


def advise(files: Files) -> list[str]:
    """What the owner may want to mend before others read it, a line each."""
    from headtrain.card import hub_name

    def text(name: str) -> str:
        content = files.get(name, b"")
        assert isinstance(content, bytes), name
        return content.decode()

    parsed: dict[str, Any] = {name: json.loads(text(name)) for name in ("config.json", "report.json")}
    parsed["recipe.yaml"] = yaml.safe_load(text("recipe.yaml"))
    metadata = yaml.safe_load(text("README.md").split("---\n")[1])
    known, measured = parsed["config.json"]["target"]["name"], parsed["report.json"]["target"]
    notes = []
    if "base_model" not in metadata:
        notes.append(f"the target is known as the folder {known} only; --target org/name links the card to it")
    elif hub_name(known) is None:
        notes.append(f"config.json calls the target {known}; who loads the head must give --target, as the card says")
    if Path(known).name != Path(measured).name:
        notes.append(
            f"the report was measured with the target {measured}, the head was trained for {known}; is it its?"
        )
    if "license" not in metadata:
        notes.append("the card states no licence; give one with --license")
    for name, content in parsed.items():
        if found := sorted({value for value in texts(content) if LOCAL_PATH.fullmatch(value)}):
            notes.append(f"{name} is uploaded as it is and names paths of this machine: {', '.join(found)}")
    return notes


def describe(files: Files) -> str:
    """The card, and the names and sizes of all files."""
    card = files["README.md"]
    assert isinstance(card, bytes)
    sizes = {
        name: content.stat().st_size if isinstance(content, Path) else len(content) for name, content in files.items()
    }
    rows = [f"{size:>14,}  {name}" for name, size in {**sizes, "bytes in all": sum(sizes.values())}.items()]
    return "\n".join([card.decode(), *rows])


def texts(value: Any) -> Iterator[str]:
    """All strings in a parsed file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)


def push(files: Files, repo: str, private: bool = False, revision: str | None = None) -> str:
    """Upload in one commit, which is visible whole or not at all; returns its URL.

    Makes the repository and the branch `revision` where they do not exist. What an earlier push left and this head lacks
    is deleted: a tree that was tuned for other weights would be wrong. Raises UserError for whatever the Hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    token = get_token()
    if not token:
        raise UserError(f"{repo}: no token for the Hub; run `hf auth login` or set HF_TOKEN, or look with --dry-run")
    api = HfApi(token=token, library_name="headtrain")
    with translated(repo, token, again="a head is uploaded whole or not at all, push it again"):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise UserError(f"{repo}: exists and is public, nothing was uploaded; make it private there, or push anew")
        if revision not in (None, "main") and not str(revision).startswith("refs/"):
            api.create_branch(repo, branch=str(revision), exist_ok=True)
        stale = set(api.list_repo_files(repo, revision=revision)) & set(FILES) - files.keys()
        additions = [
            CommitOperationAdd(name, str(content) if isinstance(content, Path) else content)
            for name, content in files.items()
        ]
        deletions = [CommitOperationDelete(name) for name in sorted(stale)]
        return api.create_commit(
            repo, [*additions, *deletions], commit_message="Upload draft head with headtrain", revision=revision
        ).commit_url


def local_head(name: str) -> Path:
    """The folder of a head: `name` itself, or a copy of the repository `org/name` or `org/name@revision` on the Hub.

    A folder wins over a Hub name. The copy lies in the Hub's cache; without network the cached one is used.
    """
    repo, at, revision = name.partition("@")
    if Path(name).exists() or not HUB_NAME.fullmatch(repo):
        return Path(name)
    if at and not revision:
        raise UserError(f"{name}: no revision behind @; write org/name@revision")
    from huggingface_hub import get_token, snapshot_download

    with translated(name, get_token(), prefix="is no folder here, and "):
        folder = Path(snapshot_download(repo, revision=revision or None, allow_patterns=list(FILES)))
    config = folder / "config.json"
    if not config.is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(
            f"{name}: holds no head (config.json and {WEIGHTS}); give a repository that was pushed from here"
        )
    return folder


@contextmanager
def translated(name: str, token: str | None, prefix: str = "", again: str = "try again") -> Iterator[None]:
    """The client's errors as one UserError; its chatter is silenced, its progress bars stay on a terminal."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    transport: type[Any] = HfHubHTTPError.__bases__[0]  # HTTPError of httpx, or of httpx2 in later releases
    verbosity, bars = logging.get_verbosity(), not are_progress_bars_disabled() and not sys.stderr.isatty()
    logging.set_verbosity(logging.CRITICAL)
    if bars:
        disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (transport, OSError, RuntimeError, ValueError) as error:
        text = f"{name}: {prefix}{explain(error, again)}"
        raise UserError(text.replace(token, "TOKEN") if token else text) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            enable_progress_bars()


def explain(error: BaseException, again: str) -> str:
    """What went wrong and the mend; `again` is that of a broken connection.

    Quotes the server's own words, never a URL: those of uploads are signed.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RevisionNotFoundError

    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
        return "the Hub is switched off by HF_HUB_OFFLINE; unset it"
    refusal = next((link for link in chain if isinstance(link, HfHubHTTPError)), None)
    if refusal is None:
        for link in chain:
            if isinstance(link, OSError) and link.filename:  # a full disk, a cache that cannot be written
                return f"{link.filename}: {link.strerror}"
        if any(isinstance(link, HfHubHTTPError.__bases__[0] | OSError) for link in chain):
            kind = type(chain[-1] if isinstance(chain[-1], OSError) else chain[0]).__name__
            return f"the connection to the Hub broke ({kind}); {again}"
        return f"the client refused ({one_line(error)})"
    status = refusal.response.status_code
    words = one_line(refusal.server_message or refusal.response.reason_phrase, 200)
    mends = {
        401: "check the name and the token (`hf auth login` or HF_TOKEN)",
        403: "use a token that may write there, or another repository",
        404: "check the name and, where it is private, the token",
        409: "someone else pushed at the same time, try again",
        429: "too many requests, try again later",
    }
    if isinstance(refusal, RevisionNotFoundError):
        return "has no such revision on the Hub; give a branch, a tag or a commit"
    return f"the Hub answered {status} ({words}); {mends.get(status, 'try again later')}"
