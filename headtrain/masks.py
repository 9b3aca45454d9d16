"""Conversations to token ids and loss mask, by the tokenizer's own chat template.

The loss mask marks the tokens that the assistant produces: its reply and the token that ends its turn. What the
template renders behind the generation prompt is the reply. A conversation whose template rewrites history (a thinking
template that drops earlier reasoning) becomes one row per reply, each rendered as the target would meet it when served.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from decode.errors import UserError, one_line
from headtrain.conversations import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Unusable(Exception):
    """Why a conversation gives no row; the text is the reason under which it is counted."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a row, and 1 for each token that the assistant produces."""

    ids: list[int]
    mask: list[int]


@dataclass(frozen=True)
class Text:
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
    require_template(tokenizer)
    texts = render_rows(tokenizer, messages, turns, template_kwargs or {}, finished)
    return [encoded for encoded, _ in tokenize(tokenizer, texts)]


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Token ids up to and including the generation prompt: what the target is given to answer."""
    require_template(tokenizer)
    try:
        text = render(tokenizer, messages, template_kwargs or {}, prompt=True)
    except Unusable as reason:
        raise UserError(f"the prompt is {reason}; its roles must be those that the target's template knows") from reason
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise UserError(f"target.model: {name} has no chat template; add chat_template.jinja to the model's folder")


def render(tokenizer, messages: Sequence[Message], template_kwargs: dict[str, Any], prompt: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, **template_kwargs
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise Unusable("text with half a surrogate pair") from error
    except (TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
        raise Unusable(f"refused by the chat template ({one_line(error)})") from error
    return text


def render_rows(
    tokenizer, messages: Sequence[Message], turns: str, template_kwargs: dict[str, Any], finished: bool = True
) -> list[Text]:
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
        return [Text(full, [span for row in rows for span in row.spans])]
    return rows


def _render_reply(tokenizer, messages: Sequence[Message], template_kwargs: dict[str, Any], finished: bool) -> Text:
    """The last message as a reply: rendered text and the span from the generation prompt to the end-of-turn token."""
    prompt = render(tokenizer, messages[:-1], template_kwargs, prompt=True)
    text = render(tokenizer, messages, template_kwargs)
    closing, ending = _closing(tokenizer, template_kwargs)
    if not text.endswith(closing):
        raise Unusable("the chat template closes the reply in an unknown way")
    marked = text.startswith(prompt)
    if not marked:
        text = _continue_prompt(prompt, text, messages[-1]["content"], closing)
    reply_end = len(text) - len(closing)
    span = (len(prompt), reply_end + ending if finished else reply_end)
    return Text(text, _generated(tokenizer, messages, template_kwargs, span, reply_end) if marked else [span])


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
        ends.append(render(tokenizer, exchange, json.loads(template_kwargs))[::-1])
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


def tokenize(tokenizer, texts: Sequence[Text]) -> list[tuple[Encoded, bool]]:
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


def _align(tokenizer, row: Text) -> tuple[Encoded, bool]:
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
