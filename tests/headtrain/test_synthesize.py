"""A synthesis gives the same file however often it is cut, with or without a head, and accounts for every conversation."""

import fcntl
import json
from collections import Counter

import pytest
import torch

from decode.engine import Engine
from decode.errors import UserError
from decode.settings import Settings
from headtrain import synthesize as module
from headtrain.checkpoint import save_head
from headtrain.conversations import load_rows
from headtrain.data import build_dataset
from headtrain.recipe import DataConfig, Recipe
from headtrain.replies import MAX_MESSAGES, Writer, to_answer
from headtrain.synthesize import summary, synthesize
from headtrain.target import Target
from headtrain.trainer import build_head
from tests.folders import recipe_dict
from tests.headtrain.test_cli import run
from tests.templates import byte_tokenizer
from tests.tiny import tiny_target

ASKS = [
    [("user", "rain?"), ("assistant", "old"), ("user", "stones?"), ("assistant", "old")],
    [("system", "be brief"), ("user", "a tree")],
    [("assistant", "hello"), ("user", "it grows"), ("assistant", "old"), ("assistant", "older"), ("system", "bye")],
    [("user", "weather"), ("assistant", "old"), ("tool", "wet"), ("assistant", "old")],
    [("system", "nobody asks"), ("assistant", "old")],
    [("user", "long " * 600), ("assistant", "old")],
    [("user", "cuts"), ("assistant", "old"), ("user", "long " * 600), ("assistant", "old")],
    *([("user", f"branch {i}"), ("assistant", "old")] for i in range(7)),
]


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A random target that says ASCII, ends its turns, and at times says a special token elsewhere."""
    tokenizer = byte_tokenizer("chatml")
    end, start = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    model = tiny_target("gpt_neox", vocab_size=len(tokenizer), eos_token_id=end, max_position_embeddings=512)
    norm, head = model.base_model.final_layer_norm, model.get_output_embeddings().weight
    with torch.no_grad():
        norm.weight[0], norm.bias[0] = 0.0, 1.0  # a constant, so that column 0 of lm_head is a bias
        for token in range(len(tokenizer)):
            head[token, 0] = 0.0 if tokenizer.decode([token]).isascii() else -40.0
        head[end, 0], head[start, 0] = 6.0, 5.0
    folder = tmp_path_factory.mktemp("talker") / "target"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def asks(tmp_path):
    path = tmp_path / "asks.jsonl"
    rows = [{"messages": [{"role": role, "content": content} for role, content in ask]} for ask in ASKS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(talker, out, **synthesis) -> Recipe:
    raw = recipe_dict(talker, "absent.jsonl", "run")
    raw["synthesize"] = {"output": str(out), "max_new_tokens": 24, "rows": 3, "batch": 4, **synthesis}
    raw["synthesize"] = {key: str(value) if key == "prompts" else value for key, value in raw["synthesize"].items()}
    return Recipe.from_dict(raw, check_paths=False)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_replies_are_those_of_the_engine_turn_by_turn(tmp_path, talker, asks):
    out = tmp_path / "out.jsonl"
    account, worked = synthesize(make(talker, out, prompts=asks), show=False)
    assert worked and account.taken == len(ASKS)
    target = Target.load(str(talker), "float32")
    expected = []
    for number, ask in enumerate(ASKS):  # one conversation at a time, in the plainest way
        messages = [{"role": role, "content": content} for role, content in ask]
        if number in (3, 4, 5):
            continue
        if number == 1:
            messages.append({"role": "assistant"})
        if number == 2:
            messages = messages[:3]
        finish, bad = "stop", False
        for index in [i for i, m in enumerate(messages) if i and m["role"] == "assistant"]:
            ids = target.prompt_ids(messages[:index])
            if finish == "length" or len(ids) + 24 > 512:
                messages = messages[: index - 1]
                break
            settings = Settings(24, temperature=1.0)
            name = number * MAX_MESSAGES + index
            output = Engine(target.model).generate([ids], settings, [name])[0]
            tokens, finish = output.tokens[: -1 if output.finish == "stop" else None], output.finish
            text = target.tokenizer.decode(tokens)
            if "<|" in text or not text.strip():
                messages, bad = messages[: index - 1], True
                break
            messages[index] = {"role": "assistant", "content": text}
        if messages and not (bad and len(messages) < 2):
            expected.append({"messages": messages, "finish": finish if not bad else "stop"})
    assert read(out) == expected
    assert {row["finish"] for row in expected} == {"stop", "length"}


def test_account_adds_up(tmp_path, talker, asks):
    out = tmp_path / "out.jsonl"
    account, _ = synthesize(make(talker, out, prompts=asks), show=False)
    rows = read(out)
    assert account.taken == len(ASKS) == account.written + account.skipped.total() and account.written == len(rows)
    assert account.unfinished == sum(row["finish"] == "length" for row in rows)
    assert account.skipped["tool turns, which answer other replies"] == account.skipped["no user turn"] == 1
    assert account.skipped["no room for synthesize.max_new_tokens in the target's context"] == 1
    saved = json.loads((tmp_path / "out.jsonl.account.json").read_text())
    assert saved["bytes"] == out.stat().st_size and saved["skipped"] == account.skipped and saved["batches"] == 4
    assert f"{account.taken} in = {account.written} out + {account.skipped.total()} skipped" in summary(account)
    contents = {m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant"}
    assert "old" not in contents and "hello" in contents


def test_sampled_prompts(tmp_path, talker):
    out = tmp_path / "out.jsonl"
    account, _ = synthesize(make(talker, out, number=40, batch=16, max_prompt_tokens=24), show=False)
    rows = read(out)
    assert account.taken == 40 == account.written + account.skipped.total()
    assert {"prompt longer than synthesize.max_prompt_tokens", "special token inside the reply"} <= set(account.skipped)
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows) and len(rows) > 5
    texts = [m["content"] for row in rows for m in row["messages"]]
    assert not any("<|" in text or not text.strip() for text in texts)
    assert len({row["messages"][0]["content"] for row in rows}) > len(rows) / 2  # each draws by its own number
    dataset = build_dataset(DataConfig(train=(str(out),)), byte_tokenizer("chatml"), progress=False)
    assert dataset.counts.kept == len(rows)


class Cut(BaseException):
    """A kill, for what it leaves behind."""


def whole(tmp_path, talker, **synthesis) -> bytes:
    out = tmp_path / "whole.jsonl"
    synthesize(make(talker, out, **synthesis), show=False)
    return out.read_bytes()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("stage", ["decoding", "half written", "before the account", "behind the account"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_cut_anywhere_leaves_no_trace(tmp_path, talker, asks, monkeypatch, sampled, stage, at):
    synthesis = {"number": 14, "max_prompt_tokens": 12} if sampled else {"prompts": asks}
    expected, out = whole(tmp_path, talker, **synthesis), tmp_path / "out.jsonl"
    calls = Counter()

    def cut_at(function, name, before):
        def wrapped(*arguments):
            calls[name] += 1
            if before and calls[name] == at + 1:
                raise Cut
            result = function(*arguments)
            if not before and calls[name] == at + 1:
                raise Cut
            return result

        return wrapped

    with monkeypatch.context() as patch:
        if stage in ("decoding", "half written"):
            patch.setattr(Writer, "write", cut_at(Writer.write, "write", True))
        else:
            patch.setattr(module, "write_text", cut_at(module.write_text, "save", stage.startswith("before")))
        with pytest.raises(Cut):
            synthesize(make(talker, out, **synthesis), show=False)
    if stage == "half written":
        with out.open("ab") as file:
            file.write(b'{"messages": [{"role": "us')
    account, worked = synthesize(make(talker, out, **synthesis), show=False)
    assert worked and out.read_bytes() == expected
    assert account.taken == 14 == account.written + account.skipped.total()
    again, worked = synthesize(make(talker, out, **synthesis), show=False)
    assert not worked and again == account and out.read_bytes() == expected


def test_another_seed_gives_another_file(tmp_path, talker, asks):
    """What the comparisons of bytes above can tell apart."""
    first = whole(tmp_path / "a", talker, prompts=asks)
    assert first != whole(tmp_path / "b", talker, prompts=asks, seed=1)


@pytest.fixture(scope="module")
def drafts(talker, tmp_path_factory):
    """A random head. Whatever it guesses, the file must be the same."""
    folder = tmp_path_factory.mktemp("drafts")
    asks = folder / "chats.jsonl"
    chat = [{"role": "user", "content": "rain"}, {"role": "assistant", "content": "falls"}]
    asks.write_text(json.dumps({"messages": chat}) + "\n")
    raw = recipe_dict(talker, asks, folder / "run") | {"head": {"family": "medusa"}}
    recipe = Recipe.from_dict(raw)
    target = Target.load(str(talker), "float32")
    head = build_head(recipe, target, build_dataset(recipe.data, target.tokenizer, progress=False))
    save_head(folder / "head", head, "medusa", target)
    return folder / "head"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_changes_nothing(tmp_path, talker, asks, drafts, temperature):
    synthesis = {"prompts": asks, "temperature": temperature}
    expected, out = whole(tmp_path, talker, **synthesis), tmp_path / "out.jsonl"
    account, _ = synthesize(make(talker, out, **synthesis), drafts, show=False)
    assert out.read_bytes() == expected and account.written > 5
    if temperature:
        sampled = {"number": 10, "max_prompt_tokens": 12}
        expected, out = whole(tmp_path / "sampled", talker, **sampled), tmp_path / "more.jsonl"
        synthesize(make(talker, out, **sampled), drafts, show=False)
        assert out.read_bytes() == expected


def test_errors_are_one_line(tmp_path, talker, asks):
    def fails(match: str, out=tmp_path / "out.jsonl", **synthesis):
        with pytest.raises(UserError, match=match) as error:
            synthesize(make(talker, out, **synthesis), show=False)
        assert "\n" not in str(error.value)

    with pytest.raises(UserError, match="synthesize.number: missing"):
        synthesize(make(talker, tmp_path / "x.jsonl"), show=False)
    fails("temperature: at 0", number=4, temperature=0.0)
    fails("no such file", prompts=tmp_path / "absent.jsonl")
    fails("also in synthesize.prompts", out=asks, prompts=asks)
    fails("cannot be written", out=tmp_path, number=4)
    fails("exceed the target's context", number=2, max_prompt_tokens=600)
    (tmp_path / "out.jsonl.account.json").unlink()  # of the run that ended before its first batch
    (tmp_path / "out.jsonl").write_text("{}\n")
    fails("has no out.jsonl.account.json", prompts=asks)
    (tmp_path / "out.jsonl").unlink()
    synthesize(make(talker, tmp_path / "out.jsonl", prompts=asks), show=False)
    fails("begun with synthesize.seed 0, not 1", prompts=asks, seed=1)
    fails("begun with synthesize.number None, not 3", prompts=asks, number=3)
    asks.write_text(asks.read_text().replace("rain", "snow"))
    fails("begun with the content of synthesize.prompts", prompts=asks)
    asks.write_text(asks.read_text().replace("snow", "rain"))
    with (tmp_path / "out.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fails("another process is writing it", prompts=asks)
    (tmp_path / "out.jsonl").write_text("")
    fails("has 0 bytes of", prompts=asks)
    (tmp_path / "out.jsonl.account.json").write_text('{"batches": 1}')
    fails("is damaged", prompts=asks)


@pytest.mark.parametrize("style, end", [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>")])
def test_user_frame(tmp_path, talker, style, end):
    target, tokenizer = Target.load(str(talker), "float32"), byte_tokenizer(style)
    target.tokenizer = tokenizer
    writer = Writer(make(talker, tmp_path / "x").synthesize, target, None, lambda output: None)
    ids, stop, string = writer.user_frame()
    assert stop == tokenizer.convert_tokens_to_ids(end) and string == ""
    assert tokenizer.decode(ids).endswith("user\n" if style != "llama3" else "user<|end_header_id|>\n\n")


def test_user_frame_without_added_tokens(tmp_path, talker):
    target = Target.load(str(talker), "float32")
    target.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    writer = Writer(make(talker, tmp_path / "x").synthesize, target, None, lambda output: None)
    ids, stop, string = writer.user_frame()
    assert (target.tokenizer.decode(ids), stop, string) == ("user:", None, "assistant:")


def test_which_turns_are_answered():
    chats = [to_answer(i, [{"role": r, "content": c} for r, c in ask]) for i, ask in enumerate(ASKS[:5])]
    assert [[m["role"] for m in chat.messages] for chat in chats[:3]] == [
        ["user", "assistant", "user", "assistant"],
        ["system", "user", "assistant"],
        ["assistant", "user", "assistant"],
    ]
    assert [bool(chat.skipped) for chat in chats] == [False, False, False, True, True]


def test_command(capsys, monkeypatch, tmp_path, talker, asks):
    recipe, out = tmp_path / "r.yaml", tmp_path / "out.jsonl"
    recipe.write_text(json.dumps(make(talker, out, prompts=asks).to_dict() | {"data": {"train": str(out)}}))
    code, printed, err = run(capsys, monkeypatch, "synthesize", str(recipe), "data.turns=all")
    assert code == 0 and printed.strip() == str(out), err
    assert "tokens/s" in err and "min left" in err and f"{len(ASKS)} in = " in err
    code, printed, _ = run(capsys, monkeypatch, "synthesize", str(recipe))
    assert code == 0 and "nothing to do" in printed
    code, _, err = run(capsys, monkeypatch, "synthesize", str(recipe), "synthesize.seed=5")
    assert code == 2 and err.splitlines()[-1].startswith("headtrain: ")
    assert all(row.messages[-1]["role"] == "assistant" for row in load_rows(str(out)))
