"""Conversations from files, saved `datasets` folders and the Hub, in the shapes that people keep them in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decode.errors import UserError, one_line
from headtrain.recipe import source_kind

Message = dict[str, Any]
SHAPES = "messages (role, content), conversations (from, value), prompt and response, instruction and output"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("instruction", "response"))


@dataclass(frozen=True)
class Row:
    """One conversation."""

    messages: list[Message]
    where: str  # it was read, such as chats.jsonl:12
    finished: bool = True  # False: the last reply was cut by a length limit, so no token ends its turn


def load_rows(
    source: str | Path | Sequence[str], limit: int | None = None, seed: int = 0, prompt: bool = False
) -> list[Row]:
    """Conversations of a JSONL or JSON file, a folder of `Dataset.save_to_disk`, a Hub name, or a list of these.

    `limit` draws that many rows of all sources with `seed` and keeps their order. A row with `finish` (or
    `finish_reason`) "length" counts as unfinished. `prompt`: the reply may be absent. Raises UserError with the row's
    place if it is not a conversation.
    """
    rows: list[tuple[Any, str]] = []
    for name in [source] if isinstance(source, (str, Path)) else source:
        before = len(rows)
        rows += _records(str(name))
        if len(rows) == before:
            raise UserError(f"{name}: no rows; give conversations, one JSON object a line")
    if limit is not None and limit < len(rows):
        chosen = np.random.default_rng(seed).permutation(len(rows))[:limit]
        rows = [rows[index] for index in sorted(chosen)]
    return [Row(_messages(record, where, prompt), where, _finished(record)) for record, where in rows]


def _finished(record: dict[str, Any]) -> bool:
    return "length" not in (record.get("finish"), record.get("finish_reason"))


def load_prompts(source: str | os.PathLike[str], limit: int | None = None) -> list[list[Message]]:
    """The first `limit` prompts: conversations that end with the user's turn; a closing reply is cut off."""
    prompts: list[list[Message]] = []
    for record, where in _records(str(source)):
        if limit is not None and len(prompts) == limit:
            break
        messages = _messages(record, where, prompt=True)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages or messages[-1]["role"] in ("system", "developer"):
            raise UserError(f"{where}: no user turn to answer; a prompt ends with the user's message")
        prompts.append(messages)
    if not prompts:
        raise UserError(f"{source}: no rows; give prompts, one JSON object a line")
    return prompts


def _records(source: str) -> Iterator[tuple[Any, str]]:
    kind, path = source_kind(source), Path(source).expanduser()
    if kind == "missing":
        raise UserError(f"{source}: no such file or folder; Hub names are written org/name")
    return file_records(path) if path.is_file() else _dataset_records(source, kind)


def file_records(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{number}: not UTF-8 text; give JSON, one conversation a line") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the file ({error.strerror})") from None
    if not text.strip():
        raise UserError(f"{path}: the file is empty; give conversations, one JSON object a line")
    if text.lstrip().startswith("["):
        try:
            records = json.loads(text)
        except (ValueError, RecursionError) as error:
            number = error.lineno if isinstance(error, json.JSONDecodeError) else 1
            raise UserError(f"{path}:{number}: not JSON ({one_line(error)})") from None
        yield from ((record, f"{path}[{index}]") for index, record in enumerate(records))
        return
    for number, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON ({one_line(error)}); give one JSON object a line") from None
        yield record, f"{path}:{number}"


def _dataset_records(source: str, kind: str) -> Iterator[tuple[Any, str]]:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source}: needs the package datasets; install it or give a JSONL file") from None

    name, _, split = source.partition(":")
    try:
        if kind == "local":
            loaded = datasets.load_from_disk(str(Path(name).expanduser()))
        else:
            parts = name.split("/")
            loaded = datasets.load_dataset("/".join(parts[:2]), *parts[2:])
    except Exception as error:  # the library raises many kinds; all of them are the user's to mend
        mend = "give a folder written by save_to_disk" if kind == "local" else "check the name and the connection"
        raise UserError(f"{source}: cannot load the data set ({one_line(error)}); {mend}") from error
    if isinstance(loaded, dict):
        split = split or "train"
        if split not in loaded:
            raise UserError(f"{source}: no split {split}; write {name}:SPLIT with one of {', '.join(loaded)}")
        loaded = loaded[split]
    yield from ((record, f"{source}[{index}]") for index, record in enumerate(loaded))


def _messages(record: Any, where: str, prompt: bool = False) -> list[Message]:
    """The conversation of one record of any accepted shape. `prompt`: the reply may be absent."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object, found {_kind(record)}; accepted rows: {SHAPES}")
    filled = {key for key, value in record.items() if value is not None}
    if "messages" in filled:
        return _turns(record["messages"], where, "messages", "role", "content", {role: role for role in ROLES})
    if "conversations" in filled:
        turns = record["conversations"]
        keys = ("from", "value")
        if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]:
            keys = ("role", "content")
        return _turns(turns, where, "conversations", *keys, {**{role: role for role in ROLES}, **SHAREGPT_ROLES})
    for question, answer in PAIRS:
        if question not in filled or not (answer in filled or prompt and answer == "response"):
            continue
        if record.get("input"):
            raise UserError(f"{where}: input beside {question} has no one meaning; write the row as messages")
        parts = {"system": "system", "user": question, "assistant": answer}
        messages = [{"role": role, "content": record[key]} for role, key in parts.items() if key in filled]
        for message in messages:
            if not isinstance(message["content"], str):
                raise UserError(f"{where}: {parts[message['role']]} is {_kind(message['content'])}, expected text")
        return [message for message in messages if message["role"] != "system" or message["content"]]
    found = ", ".join(map(str, record)) or "none"
    raise UserError(f"{where}: unknown row with the keys {found}; accepted rows: {SHAPES}")


def _turns(turns: Any, where: str, path: str, role_key: str, text_key: str, roles: dict[str, str]) -> list[Message]:
    if not isinstance(turns, list):
        raise UserError(f"{where}: {path} is {_kind(turns)}, expected a list")
    messages = []
    for index, turn in enumerate(turns):
        place = f"{path}[{index}]"
        if not isinstance(turn, dict):
            raise UserError(f"{where}: {place} is {_kind(turn)}, expected an object with {role_key} and {text_key}")
        for key in (role_key, text_key):
            if not isinstance(turn.get(key), str):
                found = _kind(turn[key]) if key in turn else "missing"
                raise UserError(f"{where}: {place}.{key} is {found}, expected text")
        if turn[role_key] not in roles:
            raise UserError(f"{where}: {place}.{role_key} is {turn[role_key]!r}, expected one of {', '.join(roles)}")
        # What else a message carries (reasoning_content, name) is for the template.
        extra = {key: value for key, value in turn.items() if key not in (role_key, text_key) and value is not None}
        messages.append({"role": roles[turn[role_key]], "content": turn[text_key], **extra})
    return messages


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
