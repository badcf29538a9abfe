from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import MAX_SIBLINGS, SequenceStart
from outrider.speculation.proposers.base import Progress, ProposalRequest
from outrider.speculation.proposers.suffix import (
    BYTES_PER_TOKEN,
    CONTEXT_SIZES,
    MAX_INDEXED_TOKENS,
    PastOutputs,
    SuffixIndex,
    SuffixProposer,
)
from tests.speculation.draft_trees import likeliest_path
from tests.support.memory import traced

START = SequenceStart(
    options=RequestOptions(sampling=SamplingParams(seed=1, max_tokens=500)), sample=0, prompt_length=3
)


def draft(proposer, token_ids, num_wanted=4, *, sequence_id=1, start=START):
    (proposal,) = proposer.propose([ProposalRequest(sequence_id, token_ids, num_wanted, start)])
    return proposal.tree.token_ids


texts = st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=6)


@given(texts=texts, ending=st.lists(st.integers(0, 2), max_size=20))
def test_a_prediction_is_the_most_frequent_follower_of_the_longest_known_ending(texts, ending):
    index = SuffixIndex()
    followers = {}
    for text in texts:
        index.add(text, 0, len(text))
        for place, token_id in enumerate(text):
            for size in CONTEXT_SIZES:
                if size <= place:
                    followers.setdefault(tuple(text[place - size : place]), Counter())[token_id] += 1
    endings = [tuple(ending[-size:]) for size in CONTEXT_SIZES if size <= len(ending)]
    known = next((followers[each] for each in endings if each in followers), None)
    found = index.followers(ending, most=2)
    counts = [] if known is None else sorted(known.values(), reverse=True)[:2]
    assert [known[each.token_id] for each in found] == counts
    assert [each.share for each in found] == [count / known.total() for count in counts]


@given(texts=texts)
def test_what_is_removed_leaves_nothing(texts):
    index = SuffixIndex()
    for text in texts:
        index.add(text, 0, len(text))
    for text in texts:
        index.remove(text, 0, len(text))
    assert len(index) == 0


def test_the_likelier_continuation_is_proposed_and_a_doubtful_one_is_not():
    proposer = SuffixProposer(min_confidence=0.6)
    assert draft(proposer, [1, 2, 8, 3, 1, 2, 9, 4, 1, 2, 8, 5, 1, 2], 1) == (8,)  # two of three
    assert draft(proposer, [1, 2, 8, 3, 1, 2, 9, 4, 1, 2], 1, sequence_id=2) == ()  # one of two


def test_a_draft_ends_where_its_confidence_does():
    text = [1, 2, 8, 5, 1, 2, 8, 6, 1, 2]
    assert draft(SuffixProposer(min_confidence=0.9), text) == (8,)
    assert len(draft(SuffixProposer(min_confidence=0.4), text)) > 1


def test_other_requests_learn_from_an_output_only_where_that_is_configured():
    output = [1, 2, 3, 4, 5, 6, 7]
    for remembered, expected in ((0, ()), (100, (6, 7))):
        proposer = SuffixProposer(remembered_tokens=remembered)
        draft(proposer, output)
        assert draft(proposer, [9, 9, 9, 4, 5], sequence_id=2) == ()
        proposer.forget(1)
        assert draft(proposer, [9, 9, 9, 4, 5], sequence_id=3) == expected


def test_outputs_of_one_tenant_are_not_drafted_for_another():
    proposer = SuffixProposer(remembered_tokens=100)
    mine, other = (replace(START, options=replace(START.options, cache_salt=salt)) for salt in (b"a", b"b"))
    draft(proposer, [1, 2, 3, 4, 5, 6, 7], start=mine)
    proposer.forget(1)
    assert draft(proposer, [9, 9, 9, 4, 5], sequence_id=2, start=other) == ()
    assert draft(proposer, [9, 9, 9, 4, 5], sequence_id=3, start=mine) == (6, 7)


def test_prompts_are_not_remembered():
    proposer = SuffixProposer(remembered_tokens=100)
    draft(proposer, [1, 2, 3, 4], start=replace(START, prompt_length=4))
    proposer.forget(1)
    assert draft(proposer, [8, 1, 2], sequence_id=2) == ()


def test_memory_for_past_outputs_is_bounded_over_a_long_run():
    chance, past = random.Random(1), PastOutputs(max_tokens=500)
    for _ in range(100):
        text = [chance.randrange(40) for _ in range(chance.randrange(700))]
        past.add(text, chance.randrange(30))
        assert past.num_tokens <= 500
        assert len(past.index) <= 4 * 500


def test_a_long_prompt_is_indexed_in_several_calls():
    text = [place % 97 for place in range(3 * MAX_INDEXED_TOKENS)]
    request, proposer = ProposalRequest(1, text, 4), SuffixProposer()
    progress = [proposer.propose([request])[0] for _ in range(3)]
    assert [each.progress for each in progress] == [Progress.CATCHING_UP, Progress.CATCHING_UP, Progress.DONE]
    assert len(progress[-1].tree) == 4


def test_texts_beyond_the_memory_get_no_drafts_until_there_is_room():
    proposer = SuffixProposer(max_bytes=10 * BYTES_PER_TOKEN)
    text = [1, 2, 8, 1, 2]
    assert draft(proposer, text, 1) == draft(proposer, text, 1, sequence_id=2) == (8,)
    assert draft(proposer, text, 1, sequence_id=3) == ()
    proposer.forget(1)
    assert draft(proposer, text, 1, sequence_id=3) == (8,)


@pytest.mark.parametrize(("num_times", "least"), [(1, 0.5), (2, 0.25)], ids=["every text", "repeated"])
def test_memory_is_what_the_node_counts(num_times, least):
    chance = random.Random(1)
    text = [chance.randrange(50_000) for _ in range(5000)] * num_times
    proposer = SuffixProposer(max_bytes=1 << 30)
    with traced() as size:
        while proposer.propose([ProposalRequest(1, text, 4)])[0].progress is Progress.CATCHING_UP:
            pass
        assert least * BYTES_PER_TOKEN < size() / len(text) <= BYTES_PER_TOKEN


def test_a_target_that_takes_trees_gets_what_followed_less_often_as_well():
    text = [1, 2, 8, 5, 1, 2, 9, 6, 1, 2, 8, 7, 1, 2]
    start = replace(START, takes_trees=True)
    (proposal,) = SuffixProposer(min_confidence=0.3).propose([ProposalRequest(1, text, 2, start)])
    tree = proposal.tree
    assert tree.is_well_formed
    assert (tree.length, tree.token_ids[:2]) == (len(text), (8, 9))  # 8 has followed in two of three places, 9 in one
    assert sorted(zip(tree.token_ids[2:], tree.parents[2:], strict=True)) == [(5, 0), (6, 1), (7, 0)]
    assert likeliest_path(tree).token_ids == draft(SuffixProposer(min_confidence=0.3), text, 2)
    assert max(tree.depths()) == 2


@given(
    text=st.lists(st.integers(0, 3), min_size=3, max_size=60),
    num_wanted=st.integers(0, 8),
    min_confidence=st.sampled_from([0.05, 0.2, 0.5]),
)
def test_trees_are_well_formed_and_bounded_and_begin_with_the_likeliest_token(text, num_wanted, min_confidence):
    start = replace(START, takes_trees=True)
    (proposal,) = SuffixProposer(min_confidence=min_confidence).propose([ProposalRequest(1, text, num_wanted, start)])
    chain = draft(SuffixProposer(min_confidence=min_confidence), text, num_wanted)
    tree = proposal.tree
    assert tree.is_well_formed
    assert len(tree) <= num_wanted + MAX_SIBLINGS if num_wanted else not tree
    assert max(tree.depths(), default=0) <= num_wanted
    assert tree.token_ids[:1] == chain[:1]


@pytest.mark.parametrize(("num_matching", "grade"), [(1, 0), (3, 2), (4, 4), (9, 8), (20, 16)])
def test_the_grade_of_a_draft_is_the_context_of_its_first_token(num_matching, grade):
    once = list(range(100, 100 + num_matching))
    (proposal,) = SuffixProposer().propose([ProposalRequest(1, [*once, 3, 4, 5, *once], 3, START)])
    assert proposal.tree.grade == grade
    assert proposal.tree.cut(1).grade == grade
