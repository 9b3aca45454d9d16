"""Conversations that the target writes itself: its own replies to given prompts, or prompts and replies both sampled.

Conversations are decoded in batches, each by itself and with noise by the conversation's number, so that a run that was
killed goes on to the same file. A sidecar accounts for every conversation: in = out + skipped, with the reasons.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from decode.engine import Output
from decode.errors import UserError
from headtrain.checkpoint import write_text
from headtrain.conversations import Row, load_rows
from headtrain.features import fingerprint
from headtrain.masks import require_template
from headtrain.progress import Progress
from headtrain.recipe import Recipe, SynthesizeConfig
from headtrain.replies import Chat, Writer
from headtrain.target import Target

KEPT_SETTINGS = ("output",)  # may differ between a run and its continuation


@dataclass
class Account:
    """What became of the conversations of the batches that are on disk: taken = written + the sum of skipped."""

    settings: dict[str, Any]
    batches: int = 0
    bytes: int = 0  # of the output
    taken: int = 0
    written: int = 0
    unfinished: int = 0  # written ones whose last reply was cut at max_new_tokens
    shortened: Counter[str] = field(default_factory=Counter)  # written ones that lost later turns, by reason
    tokens: int = 0  # decoded, of skipped conversations too
    skipped: Counter[str] = field(default_factory=Counter)  # conversations by reason


def synthesize(recipe: Recipe, head: Path | None = None, show: bool = True) -> tuple[Account, bool]:
    """Writes or continues `synthesize.output`. Returns its account, and whether there was anything left to do."""
    config = recipe.synthesize
    rows = read_prompts(config)
    number = config.number if rows is None else len(rows)
    assert number is not None
    spec = recipe.target
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load(spec.model, spec.dtype, spec.revision, spec.trust_remote_code, device)
    target.template_kwargs = recipe.data.template_kwargs
    require_template(target.tokenizer)
    assert config.output is not None
    with open_output(Path(config.output).expanduser(), describe(config, target, rows, head)) as (file, account, save):
        if account.taken >= number:
            return account, False
        with Progress(show, number, account.taken, "synthesis", "conversation") as progress:
            pace = Pace(progress)
            writer = Writer(config, target, head, pace.tick)
            while account.taken < number:
                numbers = range(account.taken, min(account.taken + config.batch, number))
                chats = writer.write(numbers, rows)
                add(account, chats, pace)
                lines = "".join(chat.record() for chat in chats if not chat.skipped).encode()
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
                account.bytes += len(lines)
                save()
                progress.advance(account.taken, pace.text())
    return account, True


def read_prompts(config: SynthesizeConfig) -> list[Row] | None:
    """The conversations to answer; None where they are sampled. Raises UserError for settings that contradict."""
    if config.output is None:
        raise UserError("synthesize.output: names no file; add synthesize.output=FILE.jsonl")
    if config.prompts is not None:
        if config.output in config.prompts:
            raise UserError(f"synthesize.output: {config.output} is also in synthesize.prompts; give another file")
        return load_rows(config.prompts, prompt=True)[: config.number]
    if config.number is None:
        raise UserError("synthesize.number: missing; say how many prompts to sample, or name synthesize.prompts")
    if config.temperature == 0:
        raise UserError("synthesize.temperature: at 0 all sampled prompts are the same; raise it, or name prompts")
    return None


def describe(config: SynthesizeConfig, target: Target, rows: list[Row] | None, head: Path | None) -> dict[str, Any]:
    """What a continued run must find unchanged."""
    settings = {key: value for key, value in config.model_dump(mode="json").items() if key not in KEPT_SETTINGS}
    content = json.dumps([row.messages for row in rows or ()], sort_keys=True).encode()
    template = json.dumps([str(target.tokenizer.chat_template), target.template_kwargs], sort_keys=True).encode()
    return {
        **{f"synthesize.{key}": value for key, value in settings.items()},
        "the content of synthesize.prompts": hashlib.sha256(content).hexdigest()[:16],
        "the target": fingerprint(target),
        "the target's dtype": str(target.dtype).removeprefix("torch."),
        "the chat template": hashlib.sha256(template).hexdigest()[:16],
        "the head": None if head is None else str(head),
    }


@contextmanager
def open_output(path: Path, settings: dict[str, Any]) -> Iterator[tuple[IO[bytes], Account, Callable[[], None]]]:
    """The output at the end of its last whole batch, its account, and what saves the account. One writer at a time."""
    sidecar = path.with_name(path.name + ".account.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); give a file in a folder of yours") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path}: another process is writing it; wait for it, or give another file") from None
        account, size = read_account(sidecar, settings), os.fstat(file.fileno()).st_size
        if account is None and size:
            raise UserError(f"{path}: has no {sidecar.name} to continue by; delete it, or give another file")
        account = account or Account(settings)
        if size < account.bytes:
            raise UserError(f"{path}: has {size} bytes of {account.bytes} written; delete it and {sidecar.name}")
        file.truncate(account.bytes)

        def save() -> None:
            write_text(sidecar, json.dumps(vars(account), indent=2) + "\n")

        save()
        yield file, account, save


def read_account(sidecar: Path, settings: dict[str, Any]) -> Account | None:
    """The account of the run that is continued, None before the first. Raises UserError for another run's."""
    if not sidecar.exists():
        return None
    try:
        account = Account(**json.loads(sidecar.read_text()))
        account.shortened, account.skipped = Counter(account.shortened), Counter(account.skipped)
        found = dict(account.settings)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{sidecar}: is damaged ({error}); delete it and the file beside it") from error
    if account.batches == 0:  # nothing was written under the old settings
        return Account(settings)
    for key in {**settings, **found}:
        if found.get(key) != settings.get(key):
            raise UserError(
                f"{sidecar}: the run was begun with {key} {found.get(key)}, not {settings.get(key)}; give it again, or"
                " another synthesize.output"
            )
    return account


class Pace:
    """Tokens decoded in this run and their speed; moves the bar while a batch is under way."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.tokens, self.batch_tokens, self.start = progress, 0, 0, time.perf_counter()

    def tick(self, output: Output) -> None:
        self.tokens += len(output.tokens)
        self.batch_tokens += len(output.tokens)
        self.progress.describe(self.text())

    def text(self) -> str:
        return f"{self.tokens / (time.perf_counter() - self.start):.0f} tokens/s"


def add(account: Account, chats: Sequence[Chat], pace: Pace) -> None:
    account.batches += 1
    account.tokens += pace.batch_tokens
    pace.batch_tokens = 0
    account.taken += len(chats)
    for chat in chats:
        if chat.skipped:
            account.skipped[chat.skipped] += 1
            continue
        account.written += 1
        account.unfinished += chat.finish == "length"
        if chat.shortened:
            account.shortened[chat.shortened] += 1
    assert account.taken == account.written + sum(account.skipped.values()), "a conversation is not accounted for"


def summary(account: Account) -> str:
    """One line: in = out + skipped, with reasons."""

    def listed(counter: Counter[str]) -> str:
        reasons = "; ".join(f"{number} x {reason}" for reason, number in counter.most_common())
        return f" ({reasons})" if reasons else ""

    shortened = f", {account.shortened.total()} shortened{listed(account.shortened)}" if account.shortened else ""
    return (
        f"conversations: {account.taken} in = {account.written} out + {account.skipped.total()} skipped"
        f"{listed(account.skipped)}; of those out {account.unfinished} unfinished{shortened}; {account.tokens} tokens decoded"
    )
