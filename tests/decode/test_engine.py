"""The engine: token-for-token parity with plain decoding, exact ends, batches, streaming, features, refusals."""

import itertools

import pytest
import torch

from decode.attention import Visibility
from decode.cache import TreeCache
from decode.engine import Engine
from decode.errors import UserError
from decode.settings import Settings
from decode.tree import Chain, Dynamic, Static
from decode.verify import RULES
from tests.decode.oracle import OracleDraft
from tests.templates import byte_tokenizer
from tests.tiny import CONTEXT, FAMILIES, VOCAB_SIZE, tiny_target

PLANS = {
    "chain": Chain(5),
    "static": Static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]),
    "dynamic": Dynamic(4, 3, 14),
    "noisy": Dynamic(3, 4, 12, noise_weight=0.5, sharpness=1.3),
}
TEMPERATURES = [0.0, 0.7, 1.0]
LENGTHS = (1, 17, 40, 6)
MODELS = {}


def target(family):
    if family not in MODELS:
        MODELS[family] = tiny_target(family)
    return MODELS[family]


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def plain_and_draft(model, prompts, settings, **oracle):
    """Replies of plain decoding and a draft that knows what plain decoding says without stops."""
    plain = Engine(model).generate(prompts, settings)
    sequences = [prompt + output.tokens for prompt, output in zip(prompts, plain, strict=True)]
    return plain, OracleDraft(sequences, model.config.vocab_size, **oracle)


def tokens(outputs):
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_greedy_equals_transformers(family):
    model, prompts = target(family), prompts_of(LENGTHS)
    outputs = Engine(model).generate(prompts, Settings(max_new_tokens=24))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert output.tokens == expected[0, len(prompt) :].tolist()
        assert output.finish == ("stop" if output.tokens[-1] == 2 else "length")


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_parity_in_every_family(family, temperature):
    """Ragged rows, a different plan a family; the acceptance must be worth the name."""
    plan = list(PLANS.values())[list(FAMILIES).index(family) % (3 if temperature == 0 else 4)]
    settings = Settings(max_new_tokens=24, temperature=temperature, seed=11)
    plain, draft = plain_and_draft(target(family), prompts_of(LENGTHS), settings)
    outputs = Engine(target(family), draft, plan).generate(prompts_of(LENGTHS), settings)
    assert tokens(outputs) == tokens(plain)
    assert [output.finish for output in outputs] == [output.finish for output in plain]
    steps = [count for output in outputs for count in output.accepted]
    assert sum(steps) / len(steps) > 0.5 and min(steps) == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_parity_of_every_plan(plan, temperature, reduced):
    """One row and several, with a draft vocabulary that lacks every third token."""
    if plan == "noisy" and temperature == 0:
        pytest.skip("greedy has no noise to weigh")
    settings = Settings(max_new_tokens=30, temperature=temperature, seed=5)
    vocabulary = torch.tensor([i for i in range(VOCAB_SIZE) if i % 3]) if reduced else None
    prompts = prompts_of(LENGTHS, seed=1)
    plain, draft = plain_and_draft(target("llama"), prompts, settings, vocabulary=vocabulary)
    engine = Engine(target("llama"), draft, PLANS[plan])
    assert tokens(engine.generate(prompts, settings)) == tokens(plain)
    for i in (1, 2):
        assert engine.generate([prompts[i]], settings, [i])[0].tokens == plain[i].tokens


def long_parity(family, lengths, plan, temperature):
    settings = Settings(max_new_tokens=20, temperature=temperature, seed=2)
    prompts = prompts_of(lengths, seed=len(lengths))
    plain, draft = plain_and_draft(target(family), prompts, settings)
    assert tokens(Engine(target(family), draft, plan).generate(prompts, settings)) == tokens(plain)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_parity_up_to_600_tokens_of_context(family):
    long_parity(family, [600, 1, 257, 64], PLANS["static"], 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_parity_over_everything(family, plan, temperature):
    if plan == "noisy" and temperature == 0:
        pytest.skip("greedy has no noise to weigh")
    for lengths in ([1], [600, 33], [5, 90, 12, 300, 47, 600, 2, 128]):
        long_parity(family, lengths, PLANS[plan], temperature)


def test_a_prompt_has_one_reply_in_any_batch():
    settings = Settings(max_new_tokens=20, temperature=1.0, seed=4)
    prompts = prompts_of((9, 30, 2, 14, 9))
    plain, draft = plain_and_draft(target("qwen3"), prompts, settings)
    engine = Engine(target("qwen3"), draft, PLANS["dynamic"])
    for rows in ([0, 1, 2, 3, 4], [4, 2], [3], [1, 0, 3]):
        outputs = engine.generate([prompts[i] for i in rows], settings, rows)
        assert tokens(outputs) == [plain[i].tokens for i in rows]
    assert plain[0].tokens != Engine(target("qwen3")).generate([prompts[0]], settings, [7])[0].tokens


def test_rows_end_on_their_own():
    """Each row has a stop token of its own, so rows leave the batch one after the other."""
    prompts = prompts_of(LENGTHS)
    plain, draft = plain_and_draft(target("llama"), prompts, Settings(max_new_tokens=30, stop_tokens=()))
    stops = [plain[0].tokens[3], plain[1].tokens[11], plain[2].tokens[19]]
    settings = Settings(max_new_tokens=30, stop_tokens=stops)
    expected = Engine(target("llama")).generate(prompts, settings)
    assert len({len(output.tokens) for output in expected}) > 2
    assert tokens(Engine(target("llama"), draft, PLANS["static"]).generate(prompts, settings)) == tokens(expected)


@pytest.mark.parametrize("plan", ["chain", "static"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_token_at_every_place_of_a_block(plan, temperature):
    free = Settings(max_new_tokens=16, temperature=temperature, seed=8, stop_tokens=())
    prompt = prompts_of([13])
    (plain,), draft = plain_and_draft(target("llama"), prompt, free, schedule=(0,))
    for token in dict.fromkeys(plain.tokens):
        settings = Settings(max_new_tokens=16, temperature=temperature, seed=8, stop_tokens=[token])
        (output,) = Engine(target("llama"), draft, PLANS[plan]).generate(prompt, settings)
        assert output.tokens == plain.tokens[: plain.tokens.index(token) + 1]
        assert output.finish == "stop"


@pytest.mark.parametrize("plan", ["chain", "static"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_limit_is_exact(plan, temperature):
    free = Settings(max_new_tokens=20, temperature=temperature, seed=8, stop_tokens=())
    prompt = prompts_of([13])
    (plain,), draft = plain_and_draft(target("llama"), prompt, free, schedule=(0,))
    for limit in range(1, 2 * PLANS[plan].depth + 2):
        settings = Settings(max_new_tokens=limit, temperature=temperature, seed=8, stop_tokens=())
        (output,) = Engine(target("llama"), draft, PLANS[plan]).generate(prompt, settings)
        assert output.tokens == plain.tokens[:limit] and output.finish == "length"


def test_a_stop_at_the_limit_is_a_stop():
    (plain,), draft = plain_and_draft(target("llama"), prompts_of([13]), Settings(max_new_tokens=9, stop_tokens=()))
    at = max(plain.tokens.index(token) for token in plain.tokens)
    settings = Settings(max_new_tokens=at + 1, stop_tokens=[plain.tokens[at]])
    (output,) = Engine(target("llama"), draft, Chain(4)).generate(prompts_of([13]), settings)
    assert output.tokens == plain.tokens[: at + 1] and output.finish == "stop"


def test_guessed_stop_tokens_that_the_target_refuses_end_nothing():
    """The draft guesses the stop token at every place; the target never says it."""
    prompts = prompts_of([13])
    (plain,) = Engine(target("llama")).generate(prompts, Settings(max_new_tokens=12, stop_tokens=()))
    (stop,) = itertools.islice((t for t in range(3, VOCAB_SIZE) if t not in plain.tokens), 1)
    draft = OracleDraft([prompts[0] + [stop] * 30], VOCAB_SIZE, schedule=(0,))
    draft.sequences = [prompts[0] + plain.tokens]
    draft._logits = lambda state, nodes: torch.nn.functional.one_hot(torch.full_like(nodes, stop), VOCAB_SIZE) * 50.0
    (output,) = Engine(target("llama"), draft, Chain(4)).generate(
        prompts, Settings(max_new_tokens=12, stop_tokens=[stop])
    )
    assert output.tokens == plain.tokens and set(output.accepted) == {0}


@pytest.fixture(scope="module")
def talker():
    tokenizer = byte_tokenizer("chatml")
    return tiny_target("llama", vocab_size=len(tokenizer)), tokenizer


def test_stop_strings_wherever_they_fall(talker):
    """The reply ends with the token that completes the string, for substrings within and across tokens and blocks."""
    model, tokenizer = talker
    prompt = [tokenizer("once upon a time")["input_ids"]]
    free = Settings(max_new_tokens=14, stop_tokens=(), seed=1, temperature=0.7)
    (plain,), draft = plain_and_draft(model, prompt, free, schedule=(0,))
    texts = [tokenizer.decode(plain.tokens[: i + 1]) for i in range(14)]
    whole, tried = texts[-1], 0
    for start, size in itertools.product(range(len(whole)), (1, 2, 5)):
        string = whole[start : start + size]
        at = next((i for i, text in enumerate(texts) if string in text), None)
        if len(string) < size or "\ufffd" in string or at is None:
            continue
        tried += 1
        settings = Settings(max_new_tokens=14, stop_tokens=(), seed=1, temperature=0.7, stop_strings=["never", string])
        (output,) = Engine(model, draft, Chain(4), tokenizer).generate(prompt, settings)
        assert output.tokens == plain.tokens[: at + 1] and output.finish == "stop"
        assert string not in output.text and whole.startswith(output.text)
    assert tried > 10


def test_text_leaves_out_the_stop_token(talker):
    model, tokenizer = talker
    prompt = [tokenizer("hello")["input_ids"]]
    (plain,) = Engine(model).generate(prompt, Settings(max_new_tokens=8, stop_tokens=()))
    settings = Settings(max_new_tokens=8, stop_tokens=[plain.tokens[4]])
    (output,) = Engine(model, tokenizer=tokenizer).generate(prompt, settings)
    cut = plain.tokens.index(plain.tokens[4])
    assert output.text == tokenizer.decode(plain.tokens[:cut], skip_special_tokens=True)
    assert plain.text is None


def test_stream_yields_what_each_step_commits():
    settings = Settings(max_new_tokens=21, temperature=1.0, seed=3)
    prompt = prompts_of([20])
    (plain,), draft = plain_and_draft(target("llama"), prompt, settings)
    pieces = list(Engine(target("llama"), draft, PLANS["static"]).stream(prompt[0], settings))
    assert sum(pieces, []) == plain.tokens
    assert len(pieces[0]) == 1 and all(pieces) and max(map(len, pieces)) > 1


def test_the_draft_gets_the_targets_features_of_committed_tokens_only():
    """Concatenated over prompt and steps they are the hidden states of the finished text, in order."""
    model, layers = target("gemma2"), (0, 2, 4)
    prompts = prompts_of(LENGTHS)
    settings = Settings(max_new_tokens=20, temperature=0.7, ignore_eos=True)
    plain, draft = plain_and_draft(model, prompts, settings, layers=layers)
    assert tokens(Engine(model, draft, PLANS["static"]).generate(prompts, settings)) == tokens(plain)
    for row, sequence in enumerate(draft.sequences):
        seen = torch.cat([features for name, features in draft.seen if name == row])
        hidden = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[b] for b in layers], -1)[0]
        assert len(seen) > len(prompts[row])
        assert torch.allclose(seen, expected[: len(seen)], atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.7},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.02, "temperature": 1.0},
        {"min_new_tokens": 9, "stop_tokens": list(range(3, 60)), "temperature": 0.7},
        {"bad_words": [[5], [7, 9], [11]], "repetition_penalty": 1.1},
    ],
    ids=["repetition", "occurrence", "warpers", "minimum", "bad words"],
)
def test_processors_follow_each_path(options):
    settings = Settings(max_new_tokens=20, seed=6, **options)
    prompts = prompts_of(LENGTHS)
    plain, draft = plain_and_draft(target("llama"), prompts, settings)
    outputs = Engine(target("llama"), draft, PLANS["static"]).generate(prompts, settings)
    assert tokens(outputs) == tokens(plain)
    free = Engine(target("llama")).generate(
        prompts, Settings(max_new_tokens=20, temperature=settings.temperature, seed=6)
    )
    assert tokens(free) != tokens(plain)
    assert min(len(output.tokens) for output in outputs) >= settings.min_new_tokens


def test_ignore_eos_gives_equal_lengths():
    prompts = prompts_of(LENGTHS)
    stops = list(range(2, 50))
    settings = Settings(max_new_tokens=15, ignore_eos=True, stop_tokens=stops, temperature=0.7)
    plain, draft = plain_and_draft(target("llama"), prompts, settings)
    outputs = Engine(target("llama"), draft, PLANS["dynamic"]).generate(prompts, settings)
    assert tokens(outputs) == tokens(plain)
    assert {len(output.tokens) for output in outputs} == {15}
    assert not set(sum(tokens(outputs), [])) & set(stops)


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"greedy"}))
def test_every_rule_runs_and_hangs_on_the_seed_alone(rule):
    plan = Chain(4) if RULES[rule].shape == "chain" else Static([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    prompts = prompts_of(LENGTHS)
    settings = Settings(max_new_tokens=12, temperature=1.0, rule=rule, stop_tokens=())
    draft = OracleDraft([prompt + [5] * 40 for prompt in prompts], VOCAB_SIZE, schedule=(None,))
    draft.begin = lambda features, t, lengths, capacity: (None, torch.zeros(len(t), 1, VOCAB_SIZE))
    draft.extend = lambda state, t, parents: torch.zeros(*t.shape, VOCAB_SIZE)
    draft.commit = lambda state, features, t, counts: torch.zeros(len(t), 1, VOCAB_SIZE)
    draft.select = lambda state, rows: None
    engine = Engine(target("llama"), draft, plan)
    outputs = engine.generate(prompts, settings)
    assert {len(output.tokens) for output in outputs} == {12}
    assert [output.lossless for output in outputs] == [rule != "typical"] * 4 and outputs[0].rule == rule
    assert tokens(engine.generate(prompts, settings)) == tokens(outputs)
    assert tokens(engine.generate(prompts[:2], settings)) == tokens(outputs)[:2]
    other = Settings(max_new_tokens=12, temperature=1.0, rule=rule, stop_tokens=(), seed=1)
    assert tokens(engine.generate(prompts, other)) != tokens(outputs)


def test_greedy_ignores_the_seed():
    prompts = prompts_of(LENGTHS)
    a, b = (Engine(target("llama")).generate(prompts, Settings(max_new_tokens=9, seed=seed)) for seed in (0, 1))
    assert tokens(a) == tokens(b)


def test_the_context_may_be_used_to_its_end():
    """Guesses reach past the context, where no position exists; none is kept."""
    model = tiny_target("llama", max_position_embeddings=40)
    settings = Settings(max_new_tokens=12, stop_tokens=())
    prompt = prompts_of([28])
    plain, draft = plain_and_draft(model, prompt, settings, schedule=(0,))
    for plan in PLANS["chain"], PLANS["static"]:
        assert tokens(Engine(model, draft, plan).generate(prompt, settings)) == tokens(plain)


def test_counters():
    settings = Settings(max_new_tokens=20)
    prompts = prompts_of(LENGTHS)
    plain, draft = plain_and_draft(target("llama"), prompts, settings)
    outputs = Engine(target("llama"), draft, PLANS["chain"]).generate(prompts, settings)
    timing = outputs[0].timing
    assert all(output.timing is timing for output in outputs)
    assert timing.steps == max(len(output.accepted) for output in outputs)
    assert min(timing.prefill, timing.draft, timing.verify, timing.other) > 0
    for output in outputs:
        committed = 1 + sum(output.accepted) + len(output.accepted)
        assert committed - 5 <= len(output.tokens) <= committed
    assert set(plain[0].accepted) == {0} and len(plain[0].accepted) == len(plain[0].tokens) - 1


def parity_holds(family, plan):
    settings = Settings(max_new_tokens=30)
    prompts = prompts_of(LENGTHS)
    plain, draft = plain_and_draft(target(family), prompts, settings)
    try:
        return tokens(Engine(target(family), draft, plan).generate(prompts, settings)) == tokens(plain)
    except AssertionError as error:  # the oracle notices at once that it is told another reply than the plain one
        assert "commit got other tokens" in str(error)
        return False


def test_parity_fails_when_the_path_is_not_moved(monkeypatch):
    """Negative control: rejected siblings stay in the cache."""
    right = TreeCache.commit
    monkeypatch.setattr(TreeCache, "commit", lambda self, path, counts, moved=True: right(self, path, counts, False))
    assert not parity_holds("llama", PLANS["static"])


def test_parity_fails_when_siblings_see_each_other(monkeypatch):
    """Negative control: the tree is read as a causal sequence."""
    right = Visibility.__init__

    def wrong(self, lengths, depths, ancestors, start, end):
        if ancestors is not None and ancestors.shape[1] > 2:
            ancestors = torch.ones_like(ancestors).tril(ancestors.shape[2] - ancestors.shape[1])
        right(self, lengths, depths, ancestors, start, end)

    monkeypatch.setattr(Visibility, "__init__", wrong)
    assert not parity_holds("llama", PLANS["static"])


def test_parity_fails_when_windows_count_slots(monkeypatch):
    """Negative control: the mask takes the node's index for its depth, positions stay right."""
    right = Visibility.visible

    def wrong(self, window):
        depths, self.depths = self.depths, torch.arange(self.depths.shape[1]).expand_as(self.depths)
        visible = right(self, window)
        self.depths = depths
        return visible

    monkeypatch.setattr(Visibility, "visible", wrong)
    assert parity_holds("llama", PLANS["static"])
    assert not parity_holds("mistral", PLANS["static"])


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[5, 6], []], {}, "prompt 1: it is empty"),
        (
            [[5] * 1000],
            {"max_new_tokens": 25},
            f"1000 tokens and max_new_tokens 25 exceed the target's context of {CONTEXT}",
        ),
        ([[5, VOCAB_SIZE]], {}, f"prompt 0: a token id is outside the target's vocabulary of {VOCAB_SIZE}"),
        ([[5]], {"rule": "gumble", "temperature": 1.0}, "did you mean 'gumbel'"),
        ([[5]], {"rule": "block", "temperature": 1.0}, "rule 'block' is for chains"),
        ([[5]], {"rule": "rejection", "temperature": 1.0}, "'rejection' loses exactness"),
        ([[5]], {"rule": "greedy", "temperature": 1.0}, "does not sample"),
        ([[5]], {"stop_strings": ["x"]}, "stop_strings need the tokenizer"),
    ],
)
def test_wrong_requests_are_refused(prompts, options, message):
    engine = Engine(target("llama"), OracleDraft([], VOCAB_SIZE), PLANS["dynamic"])
    with pytest.raises(UserError, match=message):
        engine.generate(prompts, Settings(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_new_tokens": 200},
        {"draft_temperature": 0.0},
        {"stop_strings": ["a", ""]},
        {"stop_strings": "abc"},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        Settings(**options)


def test_a_tree_deeper_than_the_draft_is_refused():
    draft = OracleDraft([], VOCAB_SIZE)
    draft.max_depth = 3
    with pytest.raises(UserError, match="depth 5 is more than the draft's 3"):
        Engine(target("llama"), draft, Chain(5))
    assert Engine(target("llama"), draft).plan == Chain(3)


def test_a_rotary_embedding_that_changes_within_the_reply_is_refused():
    rotary = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = tiny_target("phi3", rope_parameters={**rotary, **factors}, original_max_position_embeddings=64)
    engine = Engine(model)
    with pytest.raises(UserError, match="changes at 64 tokens"):
        engine.generate(prompts_of([60]), Settings(max_new_tokens=10))
    for length in (40, 70):
        prompts = prompts_of([length])
        outputs = engine.generate(prompts, Settings(max_new_tokens=10, stop_tokens=()))
        ids = torch.tensor(prompts)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, eos_token_id=None)
        assert outputs[0].tokens == expected[0, length:].tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_quantised_target(temperature):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao does not run here")
    model = tiny_target("llama")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    settings = Settings(max_new_tokens=24, temperature=temperature, ignore_eos=True)
    plain, draft = plain_and_draft(model, prompts_of(LENGTHS), settings)
    outputs = Engine(model, draft, PLANS["static"]).generate(prompts_of(LENGTHS), settings)
    assert tokens(outputs) == tokens(plain)
    assert max(max(output.accepted) for output in outputs) > 1
