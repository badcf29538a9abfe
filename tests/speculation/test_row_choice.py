"""The choice of rows is compared with every other possible choice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.row_choice import StepOffer

probability = st.floats(0.0, 1.0)
draft = st.lists(probability, max_size=4).map(lambda found: list(itertools.accumulate(found, lambda a, b: a * b)))


def choose_rows(drafts, step_seconds, *, max_rows, num_tokens, num_waiting=0):
    offer = StepOffer(
        drafts=drafts, step_seconds=step_seconds, max_rows=max_rows, num_sequences=num_tokens, num_waiting=num_waiting
    )
    return offer.choose()


def linear(num_rows, *, base=1.0, slope=0.1):
    return [base + slope * row for row in range(num_rows + 1)]


def rate(drafts, counts, step_seconds, num_tokens):
    tokens = num_tokens + sum(sum(each[:count]) for each, count in zip(drafts, counts, strict=True))
    return tokens / step_seconds[sum(counts)]


@given(
    drafts=st.lists(draft, min_size=1, max_size=3),
    increments=st.lists(st.floats(0.0, 0.5), min_size=20, max_size=20),
    max_rows=st.integers(0, 12),
)
def test_no_other_choice_has_a_higher_rate(drafts, increments, max_rows):
    step_seconds = list(itertools.accumulate(increments, initial=1.0))  # any curve that never falls
    choice = choose_rows(drafts, step_seconds, max_rows=max_rows, num_tokens=len(drafts))
    assert sum(choice.num_rows) <= max_rows
    found = rate(drafts, choice.num_rows, step_seconds, len(drafts))
    assert found == pytest.approx(choice.expected_tokens / choice.expected_seconds)
    for counts in itertools.product(*(range(len(each) + 1) for each in drafts)):
        if sum(counts) <= max_rows:
            assert rate(drafts, counts, step_seconds, len(drafts)) <= found * (1 + 1e-9)


def test_of_equals_the_parents_come_first():
    drafts = [[1.0, 1.0, 1.0], [1.0, 1.0]]
    assert choose_rows(drafts, linear(9), max_rows=4, num_tokens=2).num_rows == [3, 1]


def test_nothing_is_verified_where_rows_cost_more_than_they_win():
    choice = choose_rows([[0.2, 0.1]], linear(9, slope=0.5), max_rows=9, num_tokens=1)
    assert choice.num_rows == [0]
    assert choice.expected_tokens == 1.0
    assert choice.row_price == pytest.approx(0.5)


def test_everything_is_verified_where_rows_are_free():
    choice = choose_rows([[0.2, 0.1], [0.01]], linear(9, slope=0.0), max_rows=9, num_tokens=2)
    assert choice.num_rows == [2, 1]
    assert choice.row_price == 0.0


def test_prompts_that_wait_make_rows_dearer():
    drafts = [[0.9, 0.81, 0.73, 0.66]] * 2
    counts = [
        sum(choose_rows(drafts, linear(9), max_rows=9, num_tokens=2, num_waiting=waiting).num_rows)
        for waiting in (0, 1, 2, 16)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 8
    assert counts[-1] == 0
    free = linear(9, slope=0.0)
    assert choose_rows(drafts, free, max_rows=9, num_tokens=2, num_waiting=16).num_rows == [4, 4]


def test_drafts_may_be_empty():
    assert choose_rows([[], [0.9]], linear(5), max_rows=5, num_tokens=2).num_rows == [0, 1]
    assert choose_rows([], linear(0), max_rows=0, num_tokens=2).num_rows == []
