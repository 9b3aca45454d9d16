import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.errors import UserError
from headtrain.data import Counts, Dataset
from headtrain.vocabulary import choose_vocabulary, coverage, describe_vocabulary


def dataset(ids, masks) -> Dataset:
    ids, masks = np.array(ids, np.int32), np.array(masks, np.uint8)
    return Dataset(ids, masks, np.array([0, len(ids)]), ["here"], Counts(), "none")


def test_most_frequent_trained_tokens_ascending_ties_to_the_smaller():
    data = dataset([7, 7, 7, 3, 3, 5, 5, 9, 1, 1, 1, 1], [1] * 8 + [0] * 4)  # token 1 is never trained
    assert choose_vocabulary(data, 2, 10).tolist() == [3, 7]
    assert choose_vocabulary(data, 3, 10).tolist() == [3, 5, 7]
    assert choose_vocabulary(data, 5, 10).tolist() == [0, 3, 5, 7, 9]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.booleans()), min_size=1, max_size=60), st.integers(1, 11))
def test_no_other_choice_covers_more(pairs, size):
    ids, masks = zip(*pairs, strict=True)
    data = dataset(ids, masks)
    chosen = choose_vocabulary(data, size, 12)
    counts = [sum(m for i, m in pairs if i == token) for token in range(12)]
    best = sum(sorted(counts)[-size:])
    assert sum(counts[i] for i in chosen.tolist()) == best
    assert chosen.tolist() == sorted(set(chosen.tolist())) and len(chosen) == size and chosen.dtype == torch.int64
    assert coverage(data, chosen) == (best / sum(counts) if sum(counts) else 0)


def test_whole_vocabulary_and_too_many():
    data = dataset([1, 2], [1, 1])
    assert choose_vocabulary(data, 10, 10) is None and coverage(data, None) == 1
    with pytest.raises(UserError, match=r"head\.vocabulary: 11 tokens, but the target has only 10"):
        choose_vocabulary(data, 11, 10)


def test_description_tells_content_size_and_target_apart():
    target = {"tokenizer": "abc", "vocab_size": 50, "name": "here"}
    ids = torch.tensor([1, 4, 9])
    found = describe_vocabulary(ids, target)
    assert found == describe_vocabulary(ids.clone(), {**target, "name": "moved"}) and found["size"] == 3
    assert describe_vocabulary(None, target) is None
    others = [describe_vocabulary(torch.tensor(x), target) for x in ([1, 4, 8], [1, 4], [1, 4, 9, 10])]
    others += [describe_vocabulary(ids, {**target, **change}) for change in ({"tokenizer": "x"}, {"vocab_size": 51})]
    assert len({x["hash"] for x in [found, *others]}) == 6
