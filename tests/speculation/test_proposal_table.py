from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import HashedTokens, prefix_hash
from outrider.speculation.proposal_table import ProposalTable


def branch_after(token_ids, *proposed):
    return DraftTree(len(token_ids), prefix_hash(token_ids), tuple(proposed))


def taken(table, committed, num_wanted):
    tree = table.take(committed, num_wanted)
    if tree is None:
        return ()
    assert tree.length == len(committed)
    return tree.token_ids


def test_a_branch_of_exactly_this_prefix_is_found():
    table = ProposalTable()
    table.add(branch_after([5, 6], 7, 8, 9))
    assert taken(table, HashedTokens([5, 6]), 2) == (7, 8)


def test_an_older_branch_serves_if_its_first_tokens_were_committed_since():
    table = ProposalTable()
    table.add(branch_after([5, 6], 7, 8, 9))
    assert taken(table, HashedTokens([5, 6, 7]), 4) == (8, 9)
    assert taken(table, HashedTokens([5, 6, 7, 8]), 4) == (9,)


def test_a_branch_that_was_wrong_or_is_spent_is_dropped():
    table = ProposalTable()
    table.add(branch_after([5, 6], 7, 8))
    assert taken(table, HashedTokens([5, 6, 9]), 4) == ()
    assert len(table) == 0
    table.add(branch_after([5, 6], 7, 8))
    assert taken(table, HashedTokens([5, 6, 7, 8]), 4) == ()
    assert len(table) == 0


def test_a_branch_of_another_text_of_the_same_length_is_not_used():
    table = ProposalTable()
    table.add(branch_after([5, 1], 7, 8))
    assert taken(table, HashedTokens([5, 6]), 2) == ()


def test_a_branch_ahead_of_what_is_committed_waits_for_its_turn():
    table = ProposalTable()
    table.add(branch_after([5, 6, 7], 8))
    assert taken(table, HashedTokens([5, 6]), 1) == ()
    assert taken(table, HashedTokens([5, 6, 7]), 1) == (8,)


def test_the_branch_that_saw_most_wins():
    table = ProposalTable()
    table.add(branch_after([5], 6, 7, 1))
    table.add(branch_after([5, 6], 7, 2))
    assert taken(table, HashedTokens([5, 6, 7]), 1) == (2,)


def test_the_oldest_branch_gives_way_when_there_are_too_many():
    table = ProposalTable(max_trees=2)
    for last in range(3):
        table.add(branch_after([5, last], 7))
    assert len(table) == 2
    assert taken(table, HashedTokens([5, 0]), 1) == ()


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    branches=st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 3), min_size=1, max_size=5)), max_size=6),
)
def test_what_is_taken_always_continues_some_branch_that_agrees_with_the_text(text, branches):
    table = ProposalTable()
    for length, proposed in branches:
        table.add(branch_after(text[:length], *proposed))
    found = taken(table, HashedTokens(text), 3)
    fitting = [
        tuple(proposed[len(text) - min(length, len(text)) :][:3])
        for length, proposed in branches
        if text[min(length, len(text)) :] == proposed[: len(text) - min(length, len(text))]
    ]
    assert found == () or found in fitting
