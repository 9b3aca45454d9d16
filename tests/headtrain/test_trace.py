"""The token view tells the truth: authors as the engine counted them, probabilities as a plain forward gives them."""

import pytest
import torch

from decode.draft import ModelDraft
from decode.engine import Engine
from decode.settings import Settings
from decode.tree import Chain, Dynamic, Static
from headtrain.target import Target
from headtrain.trace import Tracer, Written, pieces, to_rows, trace_replies
from tests.templates import byte_tokenizer
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def models():
    tokenizer = byte_tokenizer("chatml")
    model = tiny_target("llama", vocab_size=len(tokenizer))
    blurred = tiny_target("llama", vocab_size=len(tokenizer))  # the target itself, disturbed: often right
    torch.manual_seed(0)
    for parameter in blurred.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))
    return Target(model, tokenizer), ModelDraft(blurred, len(tokenizer))


PLANS = [Chain(3), Static([(0,), (1,), (0, 0), (1, 0)]), Dynamic(3, 3, 8)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("plan", PLANS, ids=["chain", "static", "dynamic"])
def test_trace(models, plan, temperature):
    target, draft = models
    settings = Settings(max_new_tokens=30, temperature=temperature, ignore_eos=True)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    tracer = Tracer(target.model, draft, plan, target.tokenizer)
    outputs = tracer.generate(prompts, settings)
    plain = Engine(target.model).generate(prompts, settings)
    stops = target.model.generation_config.eos_token_id
    every = [written for trace in tracer.traces for written in trace]
    assert any(written.depth > 1 for written in every) and any(written.refused for written in every)
    for prompt, out, reference, trace in zip(prompts, outputs, plain, tracer.traces, strict=True):
        assert out.tokens == reference.tokens == [written.token for written in trace]
        # the first token is the prompt's own; then each step wrote `accepted` guesses and one of the target
        depths = [0] + [depth for count in out.accepted for depth in (*range(1, count + 1), 0)]
        assert [written.depth for written in trace] == depths[: len(trace)]
        logits = target.model(torch.tensor([prompt + out.tokens])).logits[0, len(prompt) - 1 : -1].float()
        logits[:, stops] = -torch.inf
        p = torch.softmax(logits / (temperature or 1.0), -1)
        for place, written in enumerate(trace):
            assert written.target == pytest.approx(float(p[place, written.token]), abs=1e-4)
            assert (written.rank is None) == (written.draft is None) == (written.depth == 0)
            assert written.rank is None or 1 <= written.rank <= 3 and 0 < written.draft <= 1
            if written.refused is not None:
                assert written.refused[0] != written.token
                assert written.refused[2] == pytest.approx(float(p[place, written.refused[0]]), abs=1e-4)


def test_draft_probabilities_are_the_drafts(models):
    """A chain's first guess: softmax of the draft's own forward over the whole text."""
    target, draft = models
    tracer = Tracer(target.model, draft, Chain(1), target.tokenizer)
    (out,) = tracer.generate([[5, 6, 7]], Settings(max_new_tokens=20, ignore_eos=True))
    logits = draft.forward.model(torch.tensor([[5, 6, 7, *out.tokens]])).logits[0, 2:-1].float()
    q = torch.softmax(logits, -1)
    drafted = [(place, written) for place, written in enumerate(tracer.traces[0]) if written.depth]
    assert drafted
    for place, written in drafted:
        assert written.rank == 1 and written.draft == pytest.approx(float(q[place, written.token]), abs=1e-4)


def test_pieces_join_to_the_text():
    tokenizer = byte_tokenizer("chatml")
    text = "näh\n  two  words 世界 🙂 end"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = pieces(tokenizer, tokens)
    assert "".join(found) == text and len(found) == len(tokens)
    assert found.count("") >= 3  # all but the last token of a character add nothing
    assert "\ufffd" not in "".join(found)
    assert pieces(tokenizer, []) == [] and pieces(tokenizer, tokens[:2])[-1] == "\ufffd"


def test_rows_and_replies(models):
    target, draft = models
    messages = [{"role": "user", "content": "rain"}]
    (reply,) = trace_replies(draft, target, {"asks": [messages, messages]}, Settings(max_new_tokens=12), Chain(2))
    assert reply["name"] == "asks" and reply["prompt"] == "rain" and reply["acceptance_length"] >= 1
    assert 1 <= len(reply["rows"]) <= 12
    (row,) = to_rows(target.tokenizer, [Written(target.tokenizer.encode("a")[0], 0, None, None, 0.5, (0, 0.25, 0.125))])
    assert row["refused"]["draft"] == 0.25 and row["text"] == "a" and row["depth"] == 0
