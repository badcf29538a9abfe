from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.training.answer_files import KeptAnswer
from outrider.training.dataset import Dataset, batches, choose_texts, features_folder, held_out_prompts, prompt_key
from tests.training.toy import ToyTarget, toy_dataset

SHAPE = {"vocab_size": 50, "hidden_size": 2, "num_taps": 1, "dtype": "float32"}


def answers(count, *, kind="chat", size=10):
    return [KeptAnswer([1, 2, number], [number] * size, 0.0, kind) for number in range(count)]


def test_a_share_of_each_kind_is_held_out_and_stays_the_same_when_more_comes():
    every = [*answers(40), *(KeptAnswer([1, 3, number], [2, 2], 0.0, "code") for number in range(20))]
    chosen = held_out_prompts(every, 0.1)
    assert sorted(answer.kind for answer in every if prompt_key(answer.prompt) in chosen) == ["chat"] * 4 + ["code"] * 2
    more = [*every, *(KeptAnswer([1, 4, number], [2, 2], 0.0, "chat") for number in range(9))]
    assert len(chosen & held_out_prompts(more, 0.1)) >= 4
    assert held_out_prompts([every[0]], 0.5) == set()  # otherwise nothing would be left for training


def test_answers_to_one_prompt_are_held_out_together():
    every = [KeptAnswer([1, 2, number // 10], [number] * 5) for number in range(40)]
    assert len(held_out_prompts(every, 0.1)) == 1
    every = [KeptAnswer([1, 2, number // 2], [number] * 5, 0.0, ("chat", "code")[number % 2]) for number in range(40)]
    assert len(held_out_prompts(every, 0.1)) == 2  # both kinds have the same prompts


def test_of_a_kind_with_very_many_prompts_a_bounded_number_is_held_out():
    every = [KeptAnswer([1, 2, number], [3, 4]) for number in range(10_000)]
    assert len(held_out_prompts(every, 0.05)) == 64


def test_texts_that_are_too_long_stay_out(plan_of):
    dataset = choose_texts(plan_of(max_length=20), [*answers(30), *answers(5, kind="long", size=18)], **SHAPE)
    assert [len(dataset.text(text).token_ids) for text in range(len(dataset))] == [13] * 30
    assert len(dataset.tokens) == 13 * 30


def test_texts_are_kept_as_they_were(plan_of):
    every = [
        KeptAnswer([1, 2, number], [number, 3], number % 2 * 0.7, ("chat", "code")[number % 2]) for number in range(40)
    ]
    dataset = choose_texts(plan_of(), every, **SHAPE)
    found = [dataset.text(text) for text in range(len(dataset))]
    assert sorted(found, key=lambda text: text.prompt) == every
    assert {answer.kind for answer in found[: len(dataset.held_out)]} == {"chat", "code"}


def test_hidden_states_are_kept_in_parts_that_fit_on_the_disk(plan_of):
    """Held-out texts stay; of the others, the part that is needed last makes room."""
    bound = 80 * 13 * 16  # bytes of eighty texts of 13 tokens, with four float32 for each token
    dataset = choose_texts(plan_of(feature_gb=bound / 1e9), answers(121, size=10), **{**SHAPE, "vocab_size": 200})
    assert len(dataset.held_out) == 6
    assert [len(texts) for texts in dataset.shards] == [6, *[10] * 11, 5]
    written = []
    for shard in range(len(dataset.shards)):
        if dataset.fits(shard, bound):
            dataset.path(shard).write_bytes(bytes(dataset.num_tokens(shard) * dataset.row_bytes))
            written.append(shard)
    assert written == [0, 1, 2, 3, 4, 5, 6, 7]
    for needed, left in (
        (8, [0, 1, 2, 3, 4, 5, 6, 8]),
        (12, [0, 1, 2, 3, 4, 5, 6, 12]),
        (7, [0, 1, 2, 3, 4, 5, 7, 12]),
    ):
        dataset.make_room(needed, bound)
        dataset.path(needed).write_bytes(bytes(dataset.num_tokens(needed) * dataset.row_bytes))
        assert [shard for shard in range(13) if dataset.is_done(shard)] == left
    dataset.make_room(9, 1)
    assert [shard for shard in range(13) if dataset.is_done(shard)] == [0]


def test_batches_have_at_most_as_many_answer_tokens_as_given(plan_of):
    dataset = toy_dataset(plan_of())
    texts = list(dataset.training)
    found = list(batches(dataset, texts, 40))
    assert [text for batch in found for text in batch] == texts
    assert max(dataset.response_lengths[batch].sum() for batch in found) <= 40
    assert list(batches(dataset, texts[:2], 1)) == [[texts[0]], [texts[1]]]


def test_too_few_answers_are_an_error(plan_of):
    with pytest.raises(ConfigError, match="too few"):
        choose_texts(plan_of(), answers(1), **SHAPE)


def test_answers_of_another_model_are_refused(plan_of):
    with pytest.raises(ConfigError, match="0 to 49: the target did not"):
        choose_texts(plan_of(), [*answers(30), KeptAnswer([1, 2], [50, 3])], **SHAPE)


def test_only_texts_whose_hidden_states_are_whole_are_there(plan_of):
    dataset = toy_dataset(plan_of())
    assert [dataset.num_done(shard) for shard in (0, 1)] == [len(texts) for texts in dataset.shards]
    with dataset.path(1).open("r+b") as file:  # as if killed within the last text
        file.truncate(dataset.path(1).stat().st_size - 3)
    again = Dataset(features_folder(plan_of()))
    assert again.num_done(1) == len(again.training) - 1
    assert not again.is_done(1)
    shorter = again.leave_out(len(again) - 1)
    assert shorter.is_done(1)
    assert list(shorter.training) == list(range(dataset.num_held_out, len(dataset) - 1))
    expected = ToyTarget().hidden(shorter.text(len(shorter) - 1).token_ids)
    assert shorter.hidden(len(shorter) - 1).equal(expected)


def test_counts_are_of_answers_to_learn_from(plan_of):
    dataset = toy_dataset(plan_of())
    counts = dataset.answer_counts(48)
    assert int(counts.sum()) == sum(len(dataset.text(text).response) for text in dataset.training)
