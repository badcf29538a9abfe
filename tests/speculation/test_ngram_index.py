from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.request import SamplingParams
from outrider.speculation.proposers.base import Progress, ProposalRequest
from outrider.speculation.proposers.ngram import MAX_READ_TOKENS, NGRAM_SIZES, NgramIndex, NgramProposer
from tests.speculation.asking import start_of
from tests.support.memory import traced


def brute_force(text: list[int], num_tokens: int) -> tuple[int, ...]:
    """Finds the latest occurrence of the longest n-gram that ends the text by searching all of it."""
    for size in NGRAM_SIZES:
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                found: list[int] = []
                while len(found) < num_tokens:
                    found.append((text + found)[end + len(found)])
                return tuple(found)
    return ()


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=30),
    num_tokens=st.integers(1, 8),
)
def test_the_index_finds_what_a_search_of_the_whole_text_finds(pieces, num_tokens):
    index = NgramIndex()
    text: list[int] = []
    for piece in filter(None, pieces):
        text += piece
        index.extend(text, len(text))
        assert index.continuation(text, num_tokens)[0] == brute_force(text, num_tokens)


def request_of(text, num_wanted=4, *, key=1, prompt_length=None) -> ProposalRequest:
    length = len(text) if prompt_length is None else prompt_length
    return ProposalRequest(key, text, num_wanted, start_of(SamplingParams(seed=1, max_tokens=99), prompt_length=length))


def test_a_long_prompt_is_read_in_several_calls_and_while_no_draft_is_wanted():
    text = [place % 997 for place in range(2 * MAX_READ_TOKENS)]
    proposer = NgramProposer()
    (first,) = proposer.propose([request_of(text, 0)])
    (second,) = proposer.propose([request_of(text)])
    assert (first.progress, second.progress, len(second.tree)) == (Progress.CATCHING_UP, Progress.DONE, 4)


def test_a_short_prompt_does_not_wait_for_the_long_ones_of_others():
    proposer = NgramProposer()
    long = [request_of(list(range(key, 5 * MAX_READ_TOKENS)), key=key) for key in range(5)]
    *_, short = proposer.propose([*long, request_of([1, 2, 3, 1, 2], key=9)])
    assert short.tree.token_ids == (3, 1, 2, 3)


def test_memory_is_counted_small_and_bounded():
    chance = random.Random(1)
    text = [chance.randrange(50_000) for _ in range(20_000)]
    proposer = NgramProposer(max_bytes=12 * len(text))
    with traced() as size:
        while proposer.propose([request_of(text)])[0].progress is not Progress.DONE:
            pass
        assert proposer.num_tokens == len(text)
        assert size() < 1.1 * 8 * len(text) + 5000
        for _ in range(4):
            (refused,) = proposer.propose([request_of(text[1:], key=2)])
        assert (refused.progress, refused.tree.token_ids) == (Progress.DONE, ())
        assert size() < 1.1 * 12 * len(text) + 5000
    proposer.forget(1)
    (served,) = proposer.propose([request_of(text[1:], key=2)])
    assert served.progress is Progress.CATCHING_UP
    proposer.forget(2)
    assert proposer.num_tokens == 0


@pytest.mark.parametrize(("text", "expected"), [([4, 5, 6, 4, 5], 6), ([6, 4, 6, 4], 6)], ids=["others", "shorter"])
def test_a_sequence_whose_tokens_were_replaced_is_learnt_anew(text, expected):
    proposer = NgramProposer()
    proposer.propose([request_of([1, 2, 3, 1, 2], 1)])
    (proposal,) = proposer.propose([request_of(text, 1)])
    assert proposal.tree.token_ids == (expected,)


@pytest.mark.parametrize("prompt_length", [0, 7, 90])
def test_a_text_may_begin_before_or_behind_the_end_of_its_prompt(prompt_length):
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    (proposal,) = NgramProposer().propose([request_of(text, 2, prompt_length=prompt_length)])
    assert proposal.tree.token_ids == (3, 4)


@pytest.mark.parametrize(("num_matching", "grade"), [(1, 0), (2, 2), (3, 3), (4, 4), (7, 4), (8, 8), (12, 8)])
def test_the_grade_of_a_draft_is_how_much_agrees_before_it(num_matching, grade):
    once = list(range(100, 100 + num_matching))
    (proposal,) = NgramProposer().propose([request_of([1, 2, *once, 3, 4, 5, *once])])
    assert proposal.tree.grade == grade
    assert proposal.tree.token_ids[:3] == ((3, 4, 5) if grade else ())


def test_what_agrees_up_to_the_texts_beginning_has_a_grade_as_well():
    (proposal,) = NgramProposer().propose([request_of([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5, 6])])
    assert (proposal.tree.grade, proposal.tree.token_ids[0]) == (4, 9)
