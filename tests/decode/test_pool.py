"""A pool gives each prompt the reply that it gets alone, whatever shares its rows and however often they change hands."""

import pytest
import torch

from decode.engine import Engine
from decode.errors import UserError
from decode.pool import Pool
from decode.settings import Settings
from tests.tiny import VOCAB_SIZE, tiny_target


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_are_those_of_single_prompts(family, rows, temperature):
    target, prompts = tiny_target(family), random_prompts(11)
    settings = Settings(max_new_tokens=40, temperature=temperature, stop_tokens=(2, 5, 6, 7), seed=3)
    names = [7 * i + 1 for i in range(len(prompts))]
    ended = []
    outputs = Pool(target, rows, tick=ended.append).generate(prompts, settings, names)
    engine = Engine(target)
    alone = [engine.generate([ids], settings, [name])[0] for ids, name in zip(prompts, names, strict=True)]
    assert [o.tokens for o in outputs] == [o.tokens for o in alone]
    assert [o.finish for o in outputs] == [o.finish for o in alone]
    assert [o.accepted for o in outputs] == [o.accepted for o in alone]
    assert sorted(map(id, ended)) == sorted(map(id, outputs))
    if temperature:  # negative control: other names draw other noise
        other = Pool(target, rows).generate(prompts, settings, [name + 1 for name in names])
        assert [o.tokens for o in other] != [o.tokens for o in alone]


def test_rows_never_exceed_the_limit_and_stay_full():
    """Ten prompts in three rows take fewer forwards than batches of three would: ended rows go on with the next."""
    target, prompts = tiny_target("llama"), random_prompts(10)
    settings = Settings(max_new_tokens=60, temperature=1.0, stop_tokens=(2, 5, 6, 7), seed=3)
    pool, widths = Pool(target, 3), []
    step = pool._step
    pool._step = lambda run: (widths.append(len(run.rows)), step(run))[1]
    pool.generate(prompts, settings)
    assert max(widths) <= 3
    batched = sum(
        Engine(target).generate(prompts[i : i + 3], settings, range(i, min(i + 3, 10)))[0].timing.steps
        for i in range(0, 10, 3)
    )
    assert len(widths) < batched


def test_processors_see_each_prompt_of_its_own():
    target, prompts = tiny_target("llama"), random_prompts(7)
    settings = Settings(max_new_tokens=20, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.4, top_k=20)
    outputs = Pool(target, 2).generate(prompts, settings)
    alone = [Engine(target).generate([ids], settings, [i])[0] for i, ids in enumerate(prompts)]
    assert [o.tokens for o in outputs] == [o.tokens for o in alone]


def test_long_prompts_behind_short_ones():
    """A row's cache grows for a prompt longer than all before."""
    target = tiny_target("llama")
    prompts = [[5, 6], [7], random_prompts(1)[0] * 30]
    settings = Settings(max_new_tokens=8, ignore_eos=True)
    outputs = Pool(target, 1).generate(prompts, settings)
    assert [o.tokens for o in outputs] == [Engine(target).generate([ids], settings)[0].tokens for ids in prompts]
    assert Pool(target, 2).generate([], settings) == []


def test_a_bad_prompt_is_refused_before_the_first_is_decoded():
    with pytest.raises(UserError, match="prompt 2: it is empty"):
        Pool(tiny_target("llama"), 1).generate([[3], [4], []], Settings(max_new_tokens=4))
