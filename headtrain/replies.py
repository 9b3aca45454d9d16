"""Replies of the target to a batch of conversations, turn by turn, and prompts that it makes up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from decode.engine import Engine, Output
from decode.errors import UserError
from decode.pool import Pool
from decode.settings import Settings
from headtrain.checkpoint import load_head
from headtrain.conversations import Message, Row
from headtrain.evaluate import load_plan
from headtrain.masks import Unusable, render
from headtrain.recipe import SynthesizeConfig
from headtrain.target import Target

MAX_MESSAGES = 1024  # of a conversation: message m of conversation c draws under the name c * MAX_MESSAGES + m


@dataclass
class Chat:
    """A conversation on its way: the first `done` messages are final, and `replies` of them are new."""

    number: int
    messages: list[Message]
    done: int = 0
    replies: int = 0
    finish: str = "stop"
    skipped: str = ""
    """Why the conversation is not written."""
    shortened: str = ""
    """Why it is written without its later turns."""
    over: bool = False

    def next_reply(self) -> bool:
        """Go on to the next message that the target is to write. A greeting before the first user turn stays."""
        while not self.over and self.done < len(self.messages):
            asked = any(message["role"] == "user" for message in self.messages[: self.done])
            if asked and self.messages[self.done]["role"] == "assistant":
                return True
            self.done += 1
        return False

    def add(self, text: str, finish: str) -> None:
        self.messages[self.done] = {"role": "assistant", "content": text}
        self.done, self.replies, self.finish = self.done + 1, self.replies + 1, finish
        if finish == "length":
            self.over = True
            self.shortened = "a reply of synthesize.max_new_tokens" if self.done < len(self.messages) else ""
            self.messages = self.messages[: self.done]

    def end(self, reason: str) -> None:
        """Keep what stands before the last prompt; without a reply there the conversation is skipped."""
        self.over = True
        self.shortened, self.skipped = (reason, "") if self.replies else ("", reason)
        self.messages = self.messages[: self.done]
        while self.messages and self.messages[-1]["role"] != "assistant":
            self.messages.pop()

    def record(self) -> str:
        return json.dumps({"messages": self.messages, "finish": self.finish}, ensure_ascii=False) + "\n"


def to_answer(number: int, messages: Sequence[Message]) -> Chat:
    """A conversation whose replies are to be made anew, with one more where it ends with the user's turn."""
    # Of replies that follow each other the first stands for all.
    repeated = [i > 0 and m["role"] == messages[i - 1]["role"] == "assistant" for i, m in enumerate(messages)]
    turns = [message for message, drop in zip(messages, repeated, strict=True) if not drop]
    roles = {message["role"] for message in turns}
    while turns and turns[-1]["role"] not in ("user", "assistant"):
        turns.pop()
    chat = Chat(number, turns)
    if roles & {"tool", "function"}:
        chat.end("tool turns, which answer other replies")
    elif len(turns) >= MAX_MESSAGES:
        chat.end(f"{MAX_MESSAGES} messages or more")
    elif turns and turns[-1]["role"] == "user":
        turns.append({"role": "assistant", "content": ""})
    if not chat.over and "user" not in roles:
        chat.end("no user turn")
    return chat


class Writer:
    """Decodes plainly in `config.rows` rows, or with a head in batches of as many: the replies are the same.

    `tick` is called with each whole reply or prompt.
    """

    def __init__(self, config: SynthesizeConfig, target: Target, head: Path | None, tick: Callable[[Output], None]):
        self.config, self.target, self.tick = config, target, tick
        self.settings = Settings(
            config.max_new_tokens, config.temperature, config.top_k, config.top_p, seed=config.seed
        )
        self.engine: Engine = Pool(target.model, config.rows, target.tokenizer, tick)
        if head is not None:
            if (head / "adapter").exists():
                raise UserError(
                    f"--head: {head} changes the target's replies; run `headtrain merge` and use its result"
                )
            draft = load_head(head, target)
            plan, self.settings = load_plan(head, draft, self.settings)
            self.engine = Engine(target.model, draft, plan, target.tokenizer)
        added = target.tokenizer.added_tokens_decoder
        self.special = {i for i, token in added.items() if token.special} | set(target.tokenizer.all_special_ids)
        self.added = set(added)

    def write(self, numbers: Iterable[int], rows: Sequence[Row] | None) -> list[Chat]:
        """The conversations of these numbers, each with all its replies, or with the reason why not."""
        chats = self.sample(numbers) if rows is None else [to_answer(n, rows[n].messages) for n in numbers]
        while waiting := [chat for chat in chats if chat.next_reply()]:
            asked = [(chat, ids) for chat in waiting if (ids := self.prompt(chat)) is not None]
            outputs = self.decode(
                [(chat.number, chat.done) for chat, _ in asked], [ids for _, ids in asked], self.settings
            )
            for (chat, _), output in zip(asked, outputs, strict=True):
                self.take(chat, output)
        return chats

    def decode(self, places: list[tuple[int, int]], prompts: list[list[int]], settings: Settings) -> list[Output]:
        """`places`: conversation and message that each output is for."""
        names = [number * MAX_MESSAGES + message for number, message in places]
        if isinstance(self.engine, Pool):
            return self.engine.generate(prompts, settings, names)
        outputs: list[Output] = []
        for start in range(0, len(prompts), self.config.rows):
            part = slice(start, start + self.config.rows)
            outputs += self.engine.generate(prompts[part], settings, names[part])
            for output in outputs[part]:
                self.tick(output)
        return outputs

    def prompt(self, chat: Chat) -> list[int] | None:
        """Token ids to answer; None where the conversation ends here."""
        try:
            text = render(self.target.tokenizer, chat.messages[: chat.done], self.target.template_kwargs, prompt=True)
        except Unusable as reason:
            chat.end(str(reason))
            return None
        ids = self.target.tokenizer(text, add_special_tokens=False)["input_ids"]
        context = self.engine.forward.context
        if context is not None and len(ids) + self.config.max_new_tokens > context:
            chat.end("no room for synthesize.max_new_tokens in the target's context")
            return None
        return ids

    def take(self, chat: Chat, output: Output) -> None:
        ended = output.finish == "stop"
        text, problem = self.text(output.tokens[:-1] if ended else output.tokens, cut=not ended)
        if problem:
            chat.end(f"{problem} reply")
        else:
            chat.add(text, output.finish)

    def text(self, tokens: list[int], cut: bool) -> tuple[str, str]:
        """The text of these tokens, or what is wrong with it. `cut`: its last character may be half there."""
        if not self.special.isdisjoint(tokens):
            return "", "special token inside the"
        decode = self.target.tokenizer.decode
        text = str(decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        text = text.rstrip("\ufffd") if cut else text
        if "\ufffd" in text:
            return "", "bytes that are no text in the"
        return text, "" if text.strip() else "empty"

    def sample(self, numbers: Iterable[int]) -> list[Chat]:
        """Conversations whose first user turn the target makes up, behind what its template opens that turn with."""
        opening, stop, stop_string = self.user_frame()
        strings = (stop_string,) if stop_string else ()
        stops = sorted({*self.engine._stop_tokens(self.settings), *([] if stop is None else [stop])})
        limit, context = self.config.max_prompt_tokens, self.engine.forward.context
        if context is not None and len(opening) + limit > context:
            raise UserError(
                f"synthesize.max_prompt_tokens: {limit} and the {len(opening)} tokens before a prompt exceed the target's"
                f" context of {context}; lower it"
            )
        settings = replace(self.settings, max_new_tokens=limit, stop_tokens=stops, stop_strings=strings)
        chats = [Chat(number, []) for number in numbers]
        outputs = self.decode([(chat.number, 0) for chat in chats], [opening] * len(chats), settings)
        for chat, output in zip(chats, outputs, strict=True):
            tokens = output.tokens[:-1] if output.tokens[-1] == stop else output.tokens
            text, problem = self.text(tokens, cut=bool(strings))
            content = (text.partition(stop_string)[0] if strings else text).strip()
            if output.finish == "length":
                chat.end("prompt longer than synthesize.max_prompt_tokens")
            elif problem or not content:
                chat.end(f"{problem or 'empty'} prompt")
            else:
                chat.messages = [{"role": "user", "content": content}, {"role": "assistant", "content": ""}]
        return chats

    def user_frame(self) -> tuple[list[int], int | None, str]:
        """Token ids up to the user's text, and what ends that text: an added token, or a string where there is none."""
        tokenizer, probes = self.target.tokenizer, ("one", "two!")
        texts = [
            render(tokenizer, [{"role": "user", "content": probe}], self.target.template_kwargs, prompt=True)
            for probe in probes
        ]
        opening = os.path.commonprefix(texts)
        closing = os.path.commonprefix([text[::-1] for text in texts])[::-1]
        if not opening.strip() or not closing.strip() or texts[0] != opening + probes[0] + closing:
            raise UserError("synthesize: the chat template does not frame the user's text; name synthesize.prompts")
        # A word takes the space before it into its own token.
        ids = tokenizer(opening.rstrip(" "), add_special_tokens=False)["input_ids"]
        ends = [token for token in tokenizer(closing, add_special_tokens=False)["input_ids"] if token in self.added]
        return (ids, ends[0], "") if ends else (ids, None, closing.strip())
