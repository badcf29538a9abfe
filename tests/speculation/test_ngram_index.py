from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.proposers.base import MAX_INDEXED_TOKENS, Progress, ProposalRequest
from outrider.speculation.proposers.ngram import NgramIndex, NgramProposer


def brute_force(text: list[int], num_tokens: int, *, max_ngram: int, min_ngram: int) -> tuple[int, ...]:
    """Searches the whole text for the longest n-gram that ends it, latest occurrence first."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                found: list[int] = []
                while len(found) < num_tokens:
                    found.append((text + found)[end + len(found)])
                return tuple(found)
    return ()


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=8),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    num_tokens=st.integers(1, 8),
)
def test_the_index_finds_what_a_search_of_the_whole_text_finds(pieces, sizes, num_tokens):
    min_ngram, more = sizes
    index = NgramIndex(max_ngram=min_ngram + more, min_ngram=min_ngram)
    text: list[int] = []
    for piece in pieces:
        index.extend(piece)
        text += piece
        expected = brute_force(text, num_tokens, max_ngram=min_ngram + more, min_ngram=min_ngram)
        assert index.continuation(num_tokens) == expected


def test_a_long_prompt_is_indexed_in_several_calls_and_while_no_draft_is_wanted():
    text = [place % 997 for place in range(2 * MAX_INDEXED_TOKENS)]
    proposer = NgramProposer()
    (first,) = proposer.propose([ProposalRequest(1, text, 0)])
    assert (first.progress, first.num_computed) == (Progress.CATCHING_UP, MAX_INDEXED_TOKENS)
    (second,) = proposer.propose([ProposalRequest(1, text, 4)])
    assert (second.progress, len(second.tree)) == (Progress.DONE, 4)


def test_nothing_is_proposed_where_no_ngram_of_the_least_length_repeats():
    index = NgramIndex(max_ngram=3, min_ngram=2)
    index.extend([1, 2, 3, 4, 1])
    assert index.continuation(4) == ()


def test_the_latest_occurrence_wins():
    index = NgramIndex(max_ngram=2, min_ngram=2)
    index.extend([1, 2, 8, 1, 2, 9, 1, 2])
    assert index.continuation(1) == (9,)


def test_a_text_that_has_begun_to_repeat_goes_on_repeating():
    index = NgramIndex(max_ngram=2, min_ngram=2)
    index.extend([5, 6, 7, 5, 6])
    assert index.continuation(7) == (7, 5, 6, 7, 5, 6, 7)


def test_a_sequence_whose_tokens_were_replaced_is_learnt_anew():
    proposer = NgramProposer(max_ngram=2, min_ngram=2)
    proposer.propose([ProposalRequest(1, [1, 2, 3, 1, 2], 1)])
    (proposal,) = proposer.propose([ProposalRequest(1, [4, 5, 6, 4, 5], 1)])
    assert proposal.tree.token_ids == (6,)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_step_costs_the_same_however_long_the_text_is(num_tokens):
    index = NgramIndex(max_ngram=4, min_ngram=2)
    index.extend(range(50_000))
    before = len(index._last_end)
    index.extend(range(num_tokens))
    assert len(index._last_end) - before <= 3 * num_tokens
