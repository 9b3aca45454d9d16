"""Conversations to token ids and loss mask, and rows to micro-batches.

The loss mask marks the tokens that the assistant produces: its reply and the token that ends its turn. It is read off
the tokenizer's own chat template: what the template renders behind the generation prompt is the reply. A conversation
whose template rewrites history (a thinking template that drops earlier reasoning) becomes one row per reply, each
rendered as the target would meet it when served.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from decode.errors import UserError
from headtrain.recipe import DataConfig, source_kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
POOL = 64  # micro-batches whose rows are sorted by length together

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


def load_rows(source: str | Path | Sequence[str], limit: int | None = None, seed: int = 0) -> list[Row]:
    """Conversations of a JSONL or JSON file, a folder of `Dataset.save_to_disk`, a Hub name, or a list of these.

    `limit` draws that many rows of all sources with `seed` and keeps their order. A row with `finish` (or
    `finish_reason`) "length" counts as unfinished. Raises UserError with the row's place if it is not a conversation.
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
    return [Row(_messages(record, where), where, _finished(record)) for record, where in rows]


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
    return _file_records(path) if path.is_file() else _dataset_records(source, kind)


def _file_records(path: Path) -> Iterator[tuple[Any, str]]:
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
            raise UserError(f"{path}:{number}: not JSON ({_line(error)})") from None
        yield from ((record, f"{path}[{index}]") for index, record in enumerate(records))
        return
    for number, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON ({_line(error)}); give one JSON object a line") from None
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
        raise UserError(f"{source}: cannot load the data set ({_line(error)}); {mend}") from error
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


def _line(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


class Unusable(Exception):
    """Why a conversation gives no row; the text is the reason under which it is counted."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a row, and 1 for each token that the assistant produces."""

    ids: list[int]
    mask: list[int]


@dataclass(frozen=True)
class _Text:
    """A rendered row and the character spans [start, end) that the assistant produces."""

    text: str
    spans: list[tuple[int, int]]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    turns: str = "all",
    template_kwargs: dict[str, Any] | None = None,
    finished: bool = True,
) -> list[Encoded]:
    """The rows of one conversation: a single one, or one per reply where the template rewrites history.

    `turns`: `all` trains every reply, `last` only the last. `finished`: whether a token ends the last reply's turn.
    Raises `Unusable` with the reason where nothing can be trained.
    """
    _require_template(tokenizer)
    texts = _render_rows(tokenizer, messages, turns, template_kwargs or {}, finished)
    return [encoded for encoded, _ in _tokenize(tokenizer, texts)]


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Token ids up to and including the generation prompt: what the target is given to answer."""
    _require_template(tokenizer)
    try:
        text = _render(tokenizer, messages, template_kwargs or {}, prompt=True)
    except Unusable as reason:
        raise UserError(f"the prompt is {reason}; its roles must be those that the target's template knows") from reason
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise UserError(f"target.model: {name} has no chat template; add chat_template.jinja to the model's folder")


def _render(tokenizer, messages: Sequence[Message], template_kwargs: dict[str, Any], prompt: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, **template_kwargs
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise Unusable("text with half a surrogate pair") from error
    except (TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
        raise Unusable(f"refused by the chat template ({_line(error)})") from error
    return text


def _render_rows(
    tokenizer, messages: Sequence[Message], turns: str, template_kwargs: dict[str, Any], finished: bool = True
) -> list[_Text]:
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not any(messages[index]["content"].strip() for index in replies):
        raise Unusable("no assistant turn")
    replies = [index for index in replies if index > 0]  # a greeting answers no prompt
    if not replies:
        raise Unusable("no turn before the assistant's")
    rows = []
    for index in replies[-1:] if turns == "last" else replies:
        ends = finished or index < len(messages) - 1
        rows.append(_render_reply(tokenizer, messages[: index + 1], template_kwargs, ends))
    full = rows[-1].text
    if all(full.startswith(row.text[: row.spans[-1][1]]) for row in rows):
        return [_Text(full, [span for row in rows for span in row.spans])]
    return rows


def _render_reply(tokenizer, messages: Sequence[Message], template_kwargs: dict[str, Any], finished: bool) -> _Text:
    """The last message as a reply: rendered text and the span from the generation prompt to the end-of-turn token."""
    prompt = _render(tokenizer, messages[:-1], template_kwargs, prompt=True)
    text = _render(tokenizer, messages, template_kwargs)
    closing, ending = _closing(tokenizer, template_kwargs)
    if not text.endswith(closing):
        raise Unusable("the chat template closes the reply in an unknown way")
    marked = text.startswith(prompt)
    if not marked:
        text = _continue_prompt(prompt, text, messages[-1]["content"], closing)
    reply_end = len(text) - len(closing)
    span = (len(prompt), reply_end + ending if finished else reply_end)
    return _Text(text, _generated(tokenizer, messages, template_kwargs, span, reply_end) if marked else [span])


def _continue_prompt(prompt: str, text: str, content: str, closing: str) -> str:
    """The reply behind a prompt that already opens it (with `<think>`) while the finished turn is rendered without."""
    opening = prompt[len(os.path.commonprefix([prompt, text])) :]
    if content.lstrip().startswith(opening.strip()):
        rest = content.lstrip()[len(opening.strip()) :]
        return prompt + rest.removeprefix(opening[len(opening.rstrip()) :]) + closing
    if content not in text:
        # The template dropped a part of the reply, its reasoning: the content is the raw output behind the opening.
        return prompt + content + closing
    raise Unusable("the reply does not continue the generation prompt")


def _closing(tokenizer, template_kwargs: dict[str, Any]) -> tuple[str, int]:
    """What the template writes behind a reply, and how much of it ends the turn: all up to its first added token."""
    return _probe_closing(tokenizer, str(tokenizer.chat_template), json.dumps(template_kwargs, sort_keys=True))


@lru_cache(maxsize=64)
def _probe_closing(tokenizer, template: str, template_kwargs: str) -> tuple[str, int]:
    ends: list[str] = []
    for reply in ("one", "two!"):
        exchange = [{"role": "user", "content": "x"}, {"role": "assistant", "content": reply}]
        ends.append(_render(tokenizer, exchange, json.loads(template_kwargs))[::-1])
    closing = os.path.commonprefix(ends)[::-1]
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if str(token).strip()]
    hits = [(closing.find(token), -len(token)) for token in tokens if token in closing]
    start, minus_length = min(hits, default=(0, 0))  # the longest of those that begin first
    return closing, start - minus_length


def _generated(
    tokenizer, messages: Sequence[Message], template_kwargs: dict[str, Any], span: tuple[int, int], reply_end: int
) -> list[tuple[int, int]]:
    """`span` narrowed to what the template itself marks with `{% generation %}`, where it does.

    A mark of nothing is a template's mistake and is ignored; one that begins too early, as a mark of everything does, is
    cut. A mark that reaches the end of the reply takes the end-of-turn token in, which some templates leave outside.
    """
    template = tokenizer.get_chat_template()
    if not re.search(r"{%-?\s*generation\s*-?%}", template):
        return [span]
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[list(messages)],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **template_kwargs},
    )
    _, (marks,) = rendered
    clipped = [(max(start, span[0]), span[1] if end >= reply_end else end) for start, end in marks]
    return [(start, end) for start, end in clipped if start < end] or [span]


def _tokenize(tokenizer, texts: Sequence[_Text]) -> list[tuple[Encoded, bool]]:
    """Ids and masks of rendered rows, and whether the ids decode to the very text.

    The text is cut where the assistant begins and ends and the pieces are tokenized apart: as in serving, no token
    reaches over the end of a prompt, and later turns see the tokens that were produced. Where pieces do not add up to
    the text (a tokenizer that puts a space in front of each), the whole text is tokenized and aligned with the tokens
    of its prefixes.
    """
    if not texts:
        return []
    pieces: list[tuple[int, int, str]] = []  # row, mask, text
    for index, row in enumerate(texts):
        cuts = sorted({0, len(row.text), *(cut for span in row.spans for cut in span)})
        for begin, end in zip(cuts, cuts[1:], strict=False):
            trained = any(start <= begin and end <= stop for start, stop in row.spans)
            pieces.append((index, int(trained), row.text[begin:end]))
    encoded = [Encoded([], []) for _ in texts]
    for (index, mask, _), ids in zip(pieces, _ids(tokenizer, [text for _, _, text in pieces]), strict=True):
        encoded[index].ids.extend(ids)
        encoded[index].mask.extend([mask] * len(ids))
    strips = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    decoded = _decode(tokenizer, [row.ids for row in encoded])
    return [
        (row, True) if back == given.text and not strips else _align(tokenizer, given)
        for row, given, back in zip(encoded, texts, decoded, strict=True)
    ]


def _align(tokenizer, row: _Text) -> tuple[Encoded, bool]:
    """Tokens of the whole text; a token that lies across the border of a span is not trained."""
    cuts = [cut for span in row.spans for cut in span]
    ids, *prefixes = _ids(tokenizer, [row.text, *(row.text[:cut] for cut in cuts)])
    mask = [0] * len(ids)
    borders = []
    for number, prefix in enumerate(prefixes):
        shared = len(os.path.commonprefix([ids, prefix]))
        if shared < len(prefix) and number % 2 == 0:  # the first token behind a start that lies wholly behind it
            (length,) = map(len, _decode(tokenizer, [prefix]))
            while shared < len(ids) and len(_decode(tokenizer, [ids[:shared]])[0]) < length:
                shared += 1
        borders.append(shared)
    for start, end in zip(borders[::2], borders[1::2], strict=True):
        mask[start:end] = [1] * max(0, end - start)
    back = _decode(tokenizer, [ids])[0]
    return Encoded(ids, mask), back.removeprefix(" ") == row.text.removeprefix(" ")


def _ids(tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _decode(tokenizer, rows: list[list[int]]) -> list[str]:
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass
class Counts:
    """What became of the conversations: read + split = kept + the sum of dropped."""

    read: int = 0  # conversations
    split: int = 0  # further rows from conversations that give one row per reply
    kept: int = 0  # rows of the data set
    dropped: Counter[str] = field(default_factory=Counter)  # rows by reason
    first: dict[str, str] = field(default_factory=dict)  # where the first row dropped for a reason stands
    truncated: int = 0  # kept rows that were cut at max_length
    altered: int = 0  # kept rows whose ids do not decode to the rendered text: the tokenizer changes it
    tokens: int = 0  # of the kept rows
    trained: int = 0  # tokens of the kept rows under the loss mask

    def drop(self, reason: str, where: str) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, where)


@dataclass
class Dataset:
    """Tokenized rows, end to end in flat arrays."""

    ids: np.ndarray  # [N] int32
    masks: np.ndarray  # [N] uint8
    offsets: np.ndarray  # [R + 1] int64: row r is ids[offsets[r]:offsets[r + 1]]
    origins: list[str]  # [R] where each row was read
    counts: Counts
    fingerprint: str  # of tokenizer, template, settings and content

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask of one row, both [T]."""
        part = slice(self.offsets[row], self.offsets[row + 1])
        return self.ids[part], self.masks[part]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def build_dataset(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str = "train", progress: bool = True
) -> Dataset:
    """Tokenizes the conversations of `data.train` (or `data.eval`). Raises UserError if no token is trained."""
    sources = config.train if split == "train" else config.eval or ()
    rows = load_rows(sources, config.limit, config.seed)
    dataset = encode_rows(config, tokenizer, rows, progress)
    require_trained(dataset, rows[0], config, tokenizer, f"data.{split}")
    return dataset


def require_trained(dataset: Dataset, row: Row, config: DataConfig, tokenizer, key: str) -> None:
    """Raises UserError with the reasons and a rendered sample when no token of the data set is trained."""
    if dataset.counts.trained:
        return
    reasons = "; ".join(f"{number} x {reason}" for reason, number in dataset.counts.dropped.most_common(3))
    try:
        text = _render(tokenizer, row.messages, config.template_kwargs)
    except Unusable:
        text = json.dumps(row.messages, ensure_ascii=False)
    sample = text if len(text) <= 200 else text[:200] + "..."
    raise UserError(
        f"{key}: no token is trained ({reasons}); {row.where} is {sample!r}; look with `headtrain inspect RECIPE`"
    )


def encode_rows(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], progress: bool = True, chunk: int = 256
) -> Dataset:
    """Tokenizes conversations, cuts them at `max_length` and accounts for each. The data set may be empty."""
    from rich.progress import track

    _require_template(tokenizer)
    counts = Counts(read=len(rows))
    ids: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    origins: list[str] = []
    starts = range(0, len(rows), chunk)
    for begin in track(starts, "tokenizing", transient=True, disable=not progress or len(starts) < 4):
        texts: list[_Text] = []
        places: list[str] = []
        for row in rows[begin : begin + chunk]:
            try:
                rendered = _render_rows(tokenizer, row.messages, config.turns, config.template_kwargs, row.finished)
            except Unusable as reason:
                counts.drop(str(reason), row.where)
                continue
            counts.split += len(rendered) - 1
            texts += rendered
            places += [row.where] * len(rendered)
        for (encoded, faithful), where in zip(_tokenize(tokenizer, texts), places, strict=True):
            mask = np.array(encoded.mask[: config.max_length], dtype=np.uint8)
            if not mask.any():
                counts.drop("reply beyond data.max_length" if any(encoded.mask) else "no trained token", where)
                continue
            counts.kept += 1
            counts.truncated += len(encoded.ids) > config.max_length
            counts.altered += not faithful
            ids.append(np.array(encoded.ids[: config.max_length], dtype=np.int32))
            masks.append(mask)
            origins.append(where)
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    flat_ids = np.concatenate(ids) if ids else np.empty(0, np.int32)
    flat_masks = np.concatenate(masks) if masks else np.empty(0, np.uint8)
    counts.tokens, counts.trained = len(flat_ids), int(flat_masks.sum())
    settings = [str(tokenizer.chat_template), config.turns, config.max_length, config.template_kwargs]
    parts = [_vocabulary(tokenizer), json.dumps(settings, sort_keys=True).encode()]
    parts += [array.tobytes() for array in (flat_ids, flat_masks, offsets)]
    fingerprint = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return Dataset(flat_ids, flat_masks, offsets, origins, counts, fingerprint)


def _vocabulary(tokenizer) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))).encode()


def batches(
    dataset: Dataset,
    batch_tokens: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world: int = 1,
    accumulation: int = 1,
) -> list[list[int]]:
    """This rank's micro-batches of one epoch, as lists of row indices.

    Rows of similar length stand together; rows x longest row <= batch_tokens, but a longer single row forms its own.
    Every rank gets the same number, a multiple of `accumulation`: micro-batches are halved until the count divides, so
    each row is seen exactly once. Where all are single rows already, fewer than world x accumulation are repeated.
    Micro-batch i of the epoch goes to rank i mod world, so runs with the same world x accumulation take the same steps.
    """
    assert 0 <= rank < world and accumulation >= 1, f"rank {rank} of world {world}, accumulation {accumulation}"
    random = np.random.default_rng([seed, epoch])
    lengths = dataset.lengths
    order = random.permutation(len(dataset))
    # Sorting pools of rows instead of all rows keeps the company of a row changing from epoch to epoch.
    pool = max(1, POOL * batch_tokens * len(dataset) // max(1, len(dataset.ids)))
    groups: list[list[int]] = []
    for begin in range(0, len(order), pool):
        rows = order[begin : begin + pool]
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        group: list[int] = []
        for row in rows.tolist():  # ascending, so the new row is the longest
            if group and (len(group) + 1) * lengths[row] > batch_tokens:
                groups.append(group)
                group = []
            group.append(row)
        groups.append(group)
    share = world * accumulation
    while len(groups) % share:
        largest = max(range(len(groups)), key=lambda index: len(groups[index]))
        rows_of = groups[largest]
        if len(rows_of) == 1:
            groups += list(islice(cycle(groups), share - len(groups) % share))
            break
        groups[largest : largest + 1] = [rows_of[: len(rows_of) // 2], rows_of[len(rows_of) // 2 :]]
    return [groups[index] for index in random.permutation(len(groups)).tolist()[rank::world]]


def collate(dataset: Dataset, rows: Sequence[int], pad_id: int) -> dict[str, Tensor]:
    """input_ids [B, T] int64 and loss_mask [B, T] bool, right padded; lengths [B] and row_ids [B] int64."""
    lengths = dataset.lengths[list(rows)]
    input_ids = torch.full((len(rows), int(lengths.max())), pad_id, dtype=torch.int64)
    loss_mask = torch.zeros(input_ids.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids, mask = dataset[row]
        input_ids[index, : len(ids)] = torch.from_numpy(ids)
        loss_mask[index, : len(ids)] = torch.from_numpy(mask)
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "lengths": torch.from_numpy(lengths),
        "row_ids": torch.tensor(list(rows), dtype=torch.int64),
    }
