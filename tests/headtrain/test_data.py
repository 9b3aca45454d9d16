import json
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode.errors import UserError
from headtrain.conversations import load_prompts, load_rows
from headtrain.data import Dataset, batches, build_dataset, collate
from headtrain.masks import Encoded, Unusable, encode, prompt_ids
from headtrain.recipe import DataConfig
from tests.templates import OPENED, STYLES, Style, byte_tokenizer, piece_tokenizer, thinking, token_bytes

ROLES = {"u": "user", "a": "assistant", "s": "system"}


def talk(roles: str, *contents: str) -> list[dict[str, str]]:
    return [{"role": ROLES[role], "content": text} for role, text in zip(roles, contents, strict=True)]


def config(*sources, **keys) -> DataConfig:
    return DataConfig(train=tuple(map(str, sources)), **keys)


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def one_line(error) -> str:
    text = str(error.value)
    assert text and "\n" not in text, text
    return text


def check(tokenizer, rows: list[Encoded], expected) -> None:
    """Every byte of every token must be trained or not as the pieces say. No decoding, no offsets, no template."""
    assert len(rows) == len(expected)
    for row, pieces in zip(rows, expected, strict=True):
        flags = [trained for text, trained in pieces for _ in text.encode()]
        parts = [token_bytes(tokenizer, token) for token in row.ids]
        assert b"".join(parts) == "".join(text for text, _ in pieces).encode()
        assert len(row.mask) == len(row.ids)
        position = 0
        for part, trained in zip(parts, row.mask, strict=True):
            assert set(flags[position : position + len(part)]) == {bool(trained)}, (part, position)
            position += len(part)


TALKS = {
    "single": talk("ua", "Hello there", "General reply."),
    "system": talk("sua", "Be brief.", "Hello", "Hi!"),
    "multi": talk("uaua", "one", "two", "three", "four"),
    "system multi": talk("suaua", "Be brief.", "one", "two", "three", "four"),
    "spaces": talk("uaua", "  one\n", "\n\n two \n", "\tthree", " \nfour\n\n"),
    "special": talk("uaua", "say <|im_end|> and </s>", "<|im_end|> is a token", "[INST] <|im_start|>assistant\n", "x"),
    "unicode": talk("ua", "日本語 😀", "😀 naïve Ünï\u200dcode 日本"),
    "reasoning": talk("uaua", "one", "<think>\nbecause\n</think>\n\ntwo", "three", "<think>hm</think>four"),
    "ends with user": talk("uau", "one", "two", "three"),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, style in STYLES.items() for case in TALKS if style.system or "system" not in case],
)
def test_mask_is_what_the_assistant_produces(name, case):
    style, messages = STYLES[name], TALKS[case]
    answered = messages[:-1] if messages[-1]["role"] == "user" else messages
    check(byte_tokenizer(name), encode(byte_tokenizer(name), messages), style.oracle(answered))


texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.sampled_from(
            ["\n", "\n\n", " ", "\t", "<|im_end|>", "<think>", "</think>", "</s>", "[INST]", "😀", "word", "é"]
        ),
    ),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_mask_over_random_contents(name, data):
    style = STYLES[name]
    system = data.draw(st.booleans()) and style.system
    turns = data.draw(st.integers(1, 3))
    messages = talk("s" * system + "ua" * turns, *(data.draw(texts) for _ in range(system + 2 * turns)))
    tokenizer = byte_tokenizer(name)
    if not any(message["content"].strip() for message in messages if message["role"] == "assistant"):
        with pytest.raises(Unusable):
            encode(tokenizer, messages)
        return
    rows = encode(tokenizer, messages)
    check(tokenizer, rows, style.oracle(messages))
    # As in serving: the reply goes on from the very ids of the prompt.
    served = prompt_ids(tokenizer, messages[:-1])
    (last,) = encode(tokenizer, messages, turns="last")
    assert last.ids[: len(served)] == served and not any(last.mask[: len(served)]) and last.mask[len(served)]
    check(tokenizer, [last], [_only_last(style.oracle(messages)[-1])])


def _only_last(pieces):
    """The pieces with training left in the last reply only: the trailing run of trained pieces."""
    last = max(index for index, (_, trained) in enumerate(pieces) if trained)
    first = last
    while first and pieces[first - 1][1]:
        first -= 1
    return [(text, first <= index <= last) for index, (text, _) in enumerate(pieces)]


def shifted(mask):
    return [0, *mask[:-1]]


def earlier(mask):
    return [*mask[1:], 0]


def without_end(mask):
    return [bit and (index + 1 == len(mask) or mask[index + 1]) for index, bit in enumerate(mask)]


def with_newline(mask):
    return [int(bit or (index > 0 and mask[index - 1])) for index, bit in enumerate(mask)]


@pytest.mark.parametrize(
    "wrong", [shifted, earlier, without_end, with_newline, lambda m: [1] * len(m), lambda m: [0] * len(m)]
)
def test_wrong_masks_fail_the_check(wrong):
    tokenizer = byte_tokenizer("chatml")
    (row,) = encode(tokenizer, TALKS["multi"])
    expected = STYLES["chatml"].oracle(TALKS["multi"])
    check(tokenizer, [row], expected)
    with pytest.raises(AssertionError):
        check(tokenizer, [Encoded(row.ids, wrong(row.mask))], expected)


def test_ids_are_those_of_the_template():
    for name in set(STYLES) - {"llama3"}:  # its header's two newlines are one token only at the end of a text
        tokenizer = byte_tokenizer(name)
        whole = tokenizer.apply_chat_template(TALKS["multi"], return_dict=True)["input_ids"]
        assert encode(tokenizer, TALKS["multi"])[-1].ids == whole


def test_reply_that_begins_with_newlines_keeps_the_prompt_of_serving():
    """Tokenized as a whole, the newline of the prompt and those of the reply are one token."""
    tokenizer = byte_tokenizer("chatml")
    messages = talk("ua", "x", "\n\nreply")
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    served = prompt_ids(tokenizer, messages[:-1])
    assert whole[: len(served)] != served
    (row,) = encode(tokenizer, messages)
    assert row.ids[: len(served)] == served
    assert (
        tokenizer.decode([token for token, bit in zip(row.ids, row.mask, strict=True) if bit]) == "\n\nreply<|im_end|>"
    )


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral", "plain", "thinking"])
@pytest.mark.parametrize("case", ["single", "multi", "unicode"])
def test_tokenizer_that_puts_spaces_in_front(name, case):
    """Pieces cannot be tokenized apart here, so tokens of prefixes are aligned."""
    tokenizer, messages = piece_tokenizer(name), TALKS[case]
    rows = encode(tokenizer, messages)
    for row, pieces in zip(rows, STYLES[name].oracle(messages), strict=True):
        assert row.ids == tokenizer("".join(text for text, _ in pieces), add_special_tokens=False)["input_ids"]
        trained = tokenizer.decode([token for token, bit in zip(row.ids, row.mask, strict=True) if bit])
        rest = tokenizer.decode([token for token, bit in zip(row.ids, row.mask, strict=True) if not bit])
        assert trained.split() == "".join(text for text, bit in pieces if bit).split() or name == "thinking"
        assert "four" not in rest and "reply" not in rest and "Ünï" not in rest
        assert trained.endswith(tuple(STYLES[name].tokens)) or name == "plain"


def test_token_across_the_border_is_not_trained():
    tokenizer = piece_tokenizer("chatml")
    (row,) = encode(tokenizer, talk("ua", "x", "\n\nreply"))
    served = prompt_ids(tokenizer, talk("u", "x"))
    assert row.ids[: len(served)] != served
    first = row.mask.index(1)
    assert tokenizer.decode(row.ids[:first]).endswith("\n\n") and "reply" in tokenizer.decode(row.ids[first:])


def test_end_token_that_swallows_whitespace():
    tokenizer = byte_tokenizer("phi", rstrip=True)
    messages = TALKS["multi"]
    (row,) = encode(tokenizer, messages)
    assert row.ids == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    trained = [token for token, bit in zip(row.ids, row.mask, strict=True) if bit]
    assert tokenizer.decode(trained) == "two<|end|>four<|end|>"


def test_only_the_reply_ends_with_the_swallowing_token():
    tokenizer = byte_tokenizer.__wrapped__("plain", rstrip=True)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "strip() +", "strip() + ('</s>' if message['role'] == 'assistant' else '') +"
    )
    (row,) = encode(tokenizer, TALKS["single"])
    assert row.ids == tokenizer.apply_chat_template(TALKS["single"], return_dict=True)["input_ids"]
    assert row.mask[-1] == 1 and tokenizer.decode(row.ids[-1:]) == "</s>"


def test_normalizing_tokenizer_is_counted(tmp_path):
    tokenizer = byte_tokenizer("chatml", nfc=True)
    rows = [{"messages": talk("ua", "plain", "reply")}, {"messages": talk("ua", "decomposed", "cafe\u0301")}]
    counts = build_dataset(config(write(tmp_path / "a.jsonl", rows)), tokenizer).counts
    assert (counts.kept, counts.altered) == (2, 1)
    (row,) = encode(tokenizer, rows[1]["messages"])
    assert tokenizer.decode([token for token, bit in zip(row.ids, row.mask, strict=True) if bit]) == "café<|im_end|>"


def test_empty_think_block_of_the_prompt_is_not_trained():
    tokenizer = byte_tokenizer("thinking")
    messages = talk("uaua", "one", "two", "three", "four")
    check(tokenizer, encode(tokenizer, messages), thinking(messages))
    off = {"enable_thinking": False}
    rows = encode(tokenizer, messages, template_kwargs=off)
    check(tokenizer, rows, thinking(messages, enabled=False))
    served = prompt_ids(tokenizer, messages[:-1], off)
    assert tokenizer.decode(served).endswith("</think>\n\n") and rows[-1].ids[: len(served)] == served


def test_reasoning_field_reaches_the_template():
    tokenizer = byte_tokenizer("thinking")
    messages = [*talk("u", "one"), {"role": "assistant", "content": "two", "reasoning_content": "because"}]
    same = talk("ua", "one", "<think>\nbecause\n</think>\n\ntwo")
    assert encode(tokenizer, messages) == encode(tokenizer, same)


@pytest.fixture
def opened():
    STYLES["opened"] = Style(OPENED, ("<s>", "<|end|>", "<|User|>", "<|Assistant|>", "<think>", "</think>"), thinking)
    yield byte_tokenizer("opened")
    del STYLES["opened"]


@pytest.mark.parametrize("reply", ["<think>\nwhy\n</think>\n\nyes", "why\n</think>\n\nyes"])
def test_prompt_that_opens_the_reasoning(opened, reply):
    rows = encode(opened, [*talk("ua", "one", reply), *talk("ua", "two", reply)])
    raw = ("why\n</think>\n\nyes<|end|>", True)
    first = [("<s><|User|>one<|Assistant|><think>\n", False), raw]
    second = [("<s><|User|>one<|Assistant|>\n\nyes<|end|><|User|>two<|Assistant|><think>\n", False), raw]
    check(opened, rows, [first, second])


def test_reply_that_does_not_continue_the_prompt_is_dropped(opened):
    with pytest.raises(Unusable, match="does not continue the generation prompt"):
        encode(opened, talk("ua", "one", "no reasoning here"))


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("chatml", talk("u", "x"), "no assistant turn"),
        ("chatml", talk("ua", "x", " \n"), "no assistant turn"),
        ("chatml", [], "no assistant turn"),
        ("chatml", talk("a", "greeting"), "no turn before"),
        ("gemma", talk("sua", "s", "u", "a"), "System role not supported"),
        ("mistral", talk("uaa", "u", "a", "a"), "Roles must alternate"),
        ("chatml", talk("ua", "x", "\ud83d"), "half a surrogate pair"),
    ],
)
def test_unusable_conversations_have_a_reason(name, messages, reason):
    with pytest.raises(Unusable, match=reason):
        encode(byte_tokenizer(name), messages)


def test_greeting_is_context():
    tokenizer = byte_tokenizer("chatml")
    (row,) = encode(tokenizer, talk("aua", "Welcome", "one", "two"))
    assert tokenizer.decode([token for token, bit in zip(row.ids, row.mask, strict=True) if bit]) == "two<|im_end|>"


def test_two_assistant_turns_in_a_row():
    tokenizer = byte_tokenizer("llama3")
    messages = talk("uaa", "one", "two", "three")
    check(tokenizer, encode(tokenizer, messages), STYLES["llama3"].oracle(messages))


def test_template_change_on_the_same_tokenizer_is_seen():
    tokenizer = byte_tokenizer.__wrapped__("chatml")
    messages = TALKS["single"]
    check(tokenizer, encode(tokenizer, messages), STYLES["chatml"].oracle(messages))
    tokenizer.chat_template = STYLES["chatml"].template.replace("<|im_end|>' + '\n'", "<|endoftext|>'")
    (row,) = encode(tokenizer, messages)
    assert (
        tokenizer.decode([t for t, bit in zip(row.ids, row.mask, strict=True) if bit]) == "General reply.<|endoftext|>"
    )


# Reading


def test_row_shapes_agree(tmp_path):
    want = talk("sua", "Be brief.", "Hello", "Hi!")
    rows = [
        {"messages": want, "id": 3},
        {
            "conversations": [
                {"from": f, "value": m["content"]} for f, m in zip(["system", "human", "gpt"], want, strict=True)
            ]
        },
        {"conversations": want},
        {"system": "Be brief.", "prompt": "Hello", "response": "Hi!"},
        {"system": "Be brief.", "prompt": "Hello", "completion": "Hi!", "messages": None},
        {"system": "Be brief.", "instruction": "Hello", "output": "Hi!", "input": ""},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    assert [row.messages for row in load_rows(path)] == [want] * len(rows)
    assert [row.where for row in load_rows(path)][:2] == [f"{path}:1", f"{path}:2"]
    array = tmp_path / "a.json"
    array.write_text("\ufeff" + json.dumps(rows, indent=1), encoding="utf-8")
    assert [row.messages for row in load_rows(array)] == [want] * len(rows)
    assert load_rows(array)[1].where == f"{array}[1]"
    (blank,) = load_rows(write(tmp_path / "b.jsonl", [{"system": "", "prompt": "p", "response": "r"}]))
    assert blank.messages == talk("ua", "p", "r")


def test_limit_draws_with_the_seed(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": str(index), "response": "r"} for index in range(50)])
    drawn = [[row.messages[0]["content"] for row in load_rows(path, 5, seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and all(len(set(names)) == 5 for names in drawn)
    assert drawn[0] == sorted(drawn[0], key=int)
    assert len(load_rows([path, path])) == 100


BAD_ROWS = {
    "not json": ('{"messages": [', r"a\.jsonl:2: not JSON"),
    "a list": ("[1, 2]", r"a\.jsonl:2: expected an object, found a list"),
    "a number": ("3", r"a\.jsonl:2: expected an object"),
    "unknown shape": ('{"text": "x", "label": 1}', r"a\.jsonl:2: unknown row with the keys text, label; accepted rows"),
    "no keys": ("{}", r"keys none"),
    "content list": (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ["y"]}]}',
        r"a\.jsonl:2: messages\[1\]\.content is a list, expected text",
    ),
    "content null": ('{"messages": [{"role": "user", "content": null}]}', r"messages\[0\]\.content is null"),
    "content number": ('{"conversations": [{"from": "human", "value": 3}]}', r"conversations\[0\]\.value is a number"),
    "content missing": ('{"messages": [{"role": "user"}]}', r"messages\[0\]\.content is missing"),
    "role missing": ('{"messages": [{"content": "x"}]}', r"messages\[0\]\.role is missing"),
    "unknown role": (
        '{"messages": [{"role": "human", "content": "x"}]}',
        r"messages\[0\]\.role is 'human', expected one of",
    ),
    "turn text": ('{"messages": ["hello"]}', r"messages\[0\] is text, expected an object"),
    "not turns": ('{"messages": "hello"}', r"messages is text, expected a list"),
    "response object": ('{"prompt": "x", "response": {"a": 1}}', r"response is an object, expected text"),
    "ambiguous input": ('{"instruction": "x", "input": "y", "output": "z"}', r"input beside instruction"),
    "prompt only": ('{"prompt": "x"}', r"unknown row with the keys prompt"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows(case, tmp_path):
    text, message = BAD_ROWS[case]
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "response": "y"}\n' + text + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        load_rows(path)
    one_line(error)


def test_bad_files(tmp_path):
    (tmp_path / "empty.jsonl").write_text(" \n\n")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "array.json").write_text('[{"prompt": "x",\n "response" "y"}]')
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "x", "response": "y"}\n{"prompt": "\xff"}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "folder").mkdir()
    for name, message in {
        "gone.jsonl": "gone.jsonl: no such file",
        "empty.jsonl": "empty.jsonl: the file is empty",
        "none.json": "none.json: no rows",
        "array.json": r"array.json:2: not JSON",
        "latin.jsonl": r"latin.jsonl:2: not UTF-8",
        "deep.jsonl": r"deep.jsonl:1: not JSON",
        "folder": r"folder: cannot load the data set .* save_to_disk",
    }.items():
        with pytest.raises(UserError, match=message) as error:
            load_rows(tmp_path / name)
        one_line(error)


def test_saved_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": talk("ua", "x", "y")}] * 3
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "splits")
    assert [row.messages for row in load_rows(tmp_path / "plain")] == [rows[0]["messages"]] * 3
    assert len(load_rows(tmp_path / "splits")) == 3
    assert len(load_rows(f"{tmp_path / 'splits'}:test")) == 1
    with pytest.raises(UserError, match="no split dev; write .*:SPLIT with one of train, test") as error:
        load_rows(f"{tmp_path / 'splits'}:dev")
    one_line(error)

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or {"train_sft": table})
    assert len(load_rows("org/name/config:train_sft")) == 3 and asked == [("org/name", "config")]

    def offline(*names):
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match="org/name: cannot load the data set .*Couldn't reach the Hub") as error:
        load_rows("org/name")
    one_line(error)


def test_files_need_no_datasets_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert len(load_rows(write(tmp_path / "a.jsonl", [{"prompt": "x", "response": "y"}]))) == 1
    with pytest.raises(UserError, match="org/name: needs the package datasets") as error:
        load_rows("org/name")
    one_line(error)


def test_prompts(tmp_path):
    rows = [
        {"messages": talk("u", "one"), "turns": ["one", "two"]},
        {"messages": talk("suaua", "s", "one", "two", "three", "four")},
        {"prompt": "bare"},
        {"instruction": "do", "output": "done"},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    prompts = load_prompts(path)
    assert [prompt[-1]["content"] for prompt in prompts] == ["one", "three", "bare", "do", "x"]
    assert prompts[1] == talk("suau", "s", "one", "two", "three")
    assert load_prompts(path, 2) == prompts[:2]
    for bad in ({"messages": talk("a", "y")}, {"messages": talk("s", "y")}, {"messages": []}):
        with pytest.raises(UserError, match=r"b\.jsonl:1: no user turn to answer") as error:
            load_prompts(write(tmp_path / "b.jsonl", [bad]))
        one_line(error)


def test_prompt_that_the_template_refuses():
    with pytest.raises(UserError, match="System role not supported") as error:
        prompt_ids(byte_tokenizer("gemma"), talk("su", "s", "u"))
    one_line(error)


# Data sets


def test_counts_add_up(tmp_path):
    tokenizer = byte_tokenizer("chatml")
    rows = [
        {"messages": talk("ua", "short", "reply")},
        {"messages": talk("ua", "short", "long " * 100)},
        {"messages": talk("ua", "long " * 100, "reply")},
        {"messages": talk("u", "no reply")},
        {"messages": talk("u", "no reply either")},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    dataset = build_dataset(config(path, max_length=120), tokenizer)
    counts = dataset.counts
    assert counts.dropped == {"no assistant turn": 2, "reply beyond data.max_length": 1}
    assert counts.first["no assistant turn"] == f"{path}:4"
    assert (counts.read, counts.kept, counts.truncated, counts.split) == (5, 2, 1, 0)
    assert dataset.origins == [f"{path}:1", f"{path}:2"]
    assert counts.read + counts.split == counts.kept + counts.dropped.total()
    assert counts.tokens == len(dataset.ids) == len(dataset.masks) == dataset.offsets[-1]
    assert counts.trained == dataset.masks.sum()
    (ids, mask), (whole,) = dataset[1], encode(tokenizer, rows[1]["messages"])
    assert ids.tolist() == whole.ids[:120] and mask.tolist() == whole.mask[:120] and mask[-1] == 1


def test_history_that_is_rewritten_gives_a_row_per_reply(tmp_path):
    rows = [{"messages": TALKS["reasoning"]}, {"messages": talk("ua", "x", "y")}]
    path = write(tmp_path / "a.jsonl", rows)
    counts = build_dataset(config(path), byte_tokenizer("thinking")).counts
    assert (counts.read, counts.split, counts.kept) == (2, 1, 3)
    assert build_dataset(config(path, turns="last"), byte_tokenizer("thinking")).counts.kept == 2
    assert build_dataset(config(path), byte_tokenizer("chatml")).counts.kept == 2


def test_reply_cut_by_a_length_limit_has_no_end_token(tmp_path):
    rows = [{"finish": finish, "messages": talk("uaua", "a", "b", "c", "d")} for finish in ("stop", "length")]
    tokenizer = byte_tokenizer("chatml")
    dataset = build_dataset(config(write(tmp_path / "a.jsonl", rows)), tokenizer)
    for row, text in enumerate(["b<|im_end|>d<|im_end|>", "b<|im_end|>d"]):
        ids, mask = dataset[row]
        assert tokenizer.decode(ids[mask == 1]) == text


def test_nothing_trained_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": talk("u", "no\nreply")}] * 3)
    with pytest.raises(UserError, match=r"data.train: no token is trained \(3 x no assistant turn\)") as error:
        build_dataset(config(path), byte_tokenizer("chatml"))
    assert "<|im_start|>user\\nno\\nreply<|im_end|>" in one_line(error) and "headtrain inspect" in one_line(error)
    path = write(tmp_path / "b.jsonl", [{"messages": talk("sua", "s", "u", "a")}])
    with pytest.raises(UserError, match="System role not supported") as error:
        build_dataset(config(path), byte_tokenizer("gemma"))
    one_line(error)
    bare = byte_tokenizer.__wrapped__("chatml")
    bare.chat_template = None
    for call in (lambda: build_dataset(config(path), bare), lambda: prompt_ids(bare, talk("u", "x"))):
        with pytest.raises(UserError, match="target.model: .* no chat template") as error:
            call()
        one_line(error)


def test_eval_split_and_fingerprint(tmp_path):
    first = write(tmp_path / "a.jsonl", [{"messages": talk("ua", "x", "y")}])
    second = write(tmp_path / "b.jsonl", [{"messages": talk("ua", "x", "z")}])
    tokenizer = byte_tokenizer("chatml")

    def print_of(*sources, tok=tokenizer, **keys):
        return build_dataset(config(*sources, **keys), tok).fingerprint

    assert print_of(first) == print_of(first)
    changed = byte_tokenizer.__wrapped__("chatml")
    changed.chat_template += "{# another template, same text #}"
    prints = [print_of(first), print_of(second), print_of(first, second), print_of(first, max_length=100)]
    prints += [
        print_of(first, turns="last"),
        print_of(first, tok=changed),
        print_of(first, tok=byte_tokenizer("llama3")),
    ]
    assert len(set(prints)) == len(prints)
    both = DataConfig(train=(first,), eval=(second,))
    assert build_dataset(both, tokenizer, "eval").origins == [f"{second}:1"]


# Batches


def rows_of(lengths) -> Dataset:
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    ids = np.arange(offsets[-1], dtype=np.int32)
    return Dataset(ids, (ids % 2).astype(np.uint8), offsets, [f"a:{row}" for row in range(len(lengths))], None, "")


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=120),
    batch_tokens=st.integers(1, 300),
    world=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
def test_laws_of_batches(lengths, batch_tokens, world, accumulation, epoch):
    dataset = rows_of(lengths)
    ranks = [batches(dataset, batch_tokens, 7, epoch, rank, world, accumulation) for rank in range(world)]
    assert ranks == [batches(dataset, batch_tokens, 7, epoch, rank, world, accumulation) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1 and len(ranks[0]) % accumulation == 0
    for rows in (rows for rank in ranks for rows in rank):
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= batch_tokens
    seen = Counter(row for rank in ranks for rows in rank for row in rows)
    assert set(seen) == set(range(len(lengths)))
    if any(len(rows) > 1 for rank in ranks for rows in rank):
        assert max(seen.values()) == 1
    assert seen.total() - len(lengths) < world * accumulation
    # The same steps whatever the split into ranks and accumulation.
    alone = batches(dataset, batch_tokens, 7, epoch, 0, 1, world * accumulation)
    assert [ranks[index % world][index // world] for index in range(len(alone))] == alone


def test_epochs_and_seeds_differ_and_padding_is_small():
    random = np.random.default_rng(0)
    lengths = random.integers(40, 600, size=3000).tolist()
    dataset = rows_of(lengths)
    epochs = [batches(dataset, 4096, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert epochs[0] != epochs[1] and epochs[0] != epochs[2]
    together = [{frozenset(rows) for rows in epoch} for epoch in epochs]
    assert len(together[0] & together[1]) < 0.05 * len(together[0])
    area = sum(len(rows) * max(lengths[row] for row in rows) for rows in epochs[0])
    assert sum(lengths) / area > 0.95
    sizes = [lengths[rows[-1]] for rows in epochs[0]]
    assert abs(np.corrcoef(sizes[:-1], sizes[1:])[0, 1]) < 0.2  # not sorted by length


def test_collate():
    dataset = rows_of([3, 5, 2])
    batch = collate(dataset, [2, 1], pad_id=9)
    assert batch["input_ids"].tolist() == [[8, 9, 9, 9, 9], [3, 4, 5, 6, 7]]
    assert batch["loss_mask"].tolist() == [[False, True, False, False, False], [True, False, True, False, True]]
    assert batch["lengths"].tolist() == [2, 5] and batch["row_ids"].tolist() == [2, 1]
    dtypes = [str(batch[key].dtype) for key in ("input_ids", "loss_mask", "lengths", "row_ids")]
    assert dtypes == ["torch.int64", "torch.bool", "torch.int64", "torch.int64"]
