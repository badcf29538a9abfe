from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.training.answer_files import KeptAnswer
from outrider.training.dataset import Dataset, choose_texts, features_folder, held_out_prompts
from tests.training.toy import toy_dataset

SHAPE = {"vocab_size": 50, "hidden_size": 2, "num_taps": 1, "dtype": "float32"}


def answers(count, *, kind="chat", size=10):
    return [KeptAnswer([1, 2, number], [number] * size, 0.0, kind) for number in range(count)]


def test_a_share_of_each_kind_is_held_out_and_stays_the_same_when_more_comes():
    every = [*answers(40), *(KeptAnswer([1, 3, number], [2, 2], 0.0, "code") for number in range(20))]
    chosen = held_out_prompts(every, 0.1)
    assert sorted(answer.kind for answer in every if tuple(answer.prompt) in chosen) == ["chat"] * 4 + ["code"] * 2
    more = [*every, *(KeptAnswer([1, 4, number], [2, 2], 0.0, "chat") for number in range(9))]
    assert len(chosen & held_out_prompts(more, 0.1)) >= 4
    assert held_out_prompts([every[0]], 0.5) == set()  # otherwise nothing would be left for training


def test_answers_to_one_prompt_are_held_out_together():
    every = [KeptAnswer([1, 2, number // 10], [number] * 5) for number in range(40)]
    assert len(held_out_prompts(every, 0.1)) == 1
    every = [KeptAnswer([1, 2, number // 2], [number] * 5, 0.0, ("chat", "code")[number % 2]) for number in range(40)]
    assert len(held_out_prompts(every, 0.1)) == 2  # both kinds have the same prompts


def test_texts_that_are_too_long_or_over_the_bound_stay_out(plan_of):
    plan = plan_of(max_length=20, max_feature_bytes=13 * 10 * 4 * 4)  # ten texts of 13 tokens, with 4 float32 per token
    dataset = choose_texts(plan, [*answers(30), *answers(5, kind="long", size=18)], **SHAPE)
    assert [len(text.token_ids) for text in dataset.texts] == [13] * 10
    assert len(dataset.tokens) == 130
    assert set(dataset.tokens[2::13].tolist()) == set(range(20, 30)), "the newest"


def test_too_few_answers_are_an_error(plan_of):
    with pytest.raises(ConfigError, match="too few"):
        choose_texts(plan_of(), answers(1), **SHAPE)


def test_answers_of_another_model_are_refused(plan_of):
    with pytest.raises(ConfigError, match="0 to 49: the target did not"):
        choose_texts(plan_of(), [*answers(30), KeptAnswer([1, 2], [50, 3])], **SHAPE)


def test_only_texts_whose_hidden_states_are_whole_are_there(plan_of):
    dataset = toy_dataset(plan_of())
    num_texts = len(dataset)
    assert num_texts == 40
    with dataset.hidden_path.open("r+b") as file:  # as if killed within the last text
        file.truncate(dataset.hidden_path.stat().st_size - 3)
    again = Dataset(features_folder(plan_of()))
    assert len(again) == num_texts - 1
    assert again.hidden.shape[0] == sum(len(text.token_ids) for text in dataset.texts[:-1])
    assert list(again.training) == list(range(dataset.num_held_out, num_texts - 1))


def test_counts_are_of_answers_to_learn_from(plan_of):
    dataset = toy_dataset(plan_of())
    counts = dataset.answer_counts(48)
    assert int(counts.sum()) == sum(len(dataset.texts[text].response) for text in dataset.training)
