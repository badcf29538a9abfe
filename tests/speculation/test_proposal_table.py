from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import HashedTokens, prefix_hash
from outrider.speculation.proposal_table import ProposalTable
from outrider.speculation.token_distribution import TokenDistribution

EMPTY = HashedTokens()


def branch_after(token_ids, *proposed, probability=1.0):
    return DraftTree(len(token_ids), prefix_hash(token_ids), tuple(proposed), probability=probability)


def taken(table, committed, num_tokens):
    """Returns the first `num_tokens` tokens of the draft that the table finds."""
    kept = table.take(committed)
    if kept is None:
        return ()
    assert kept.tree.length == len(committed)
    return kept.tree.token_ids[:num_tokens]


def test_an_older_branch_serves_if_its_first_tokens_were_committed_since():
    table = ProposalTable()
    table.add(branch_after([5, 6], 7, 8, 9), EMPTY, now=0.0)
    assert taken(table, HashedTokens([5, 6]), 2) == (7, 8)
    assert taken(table, HashedTokens([5, 6, 7]), 4) == (8, 9)
    assert taken(table, HashedTokens([5, 6, 7, 8]), 4) == (9,)


def test_what_tokens_were_drawn_from_stays_with_them():
    drawn_from = tuple(TokenDistribution((token_id, 1), (0.5, 0.5)) for token_id in (7, 8, 9))
    table = ProposalTable()
    table.add(replace(branch_after([5, 6], 7, 8, 9), distributions=drawn_from), EMPTY, now=0.0)
    assert table.take(HashedTokens([5, 6])).tree.distributions == drawn_from
    assert table.take(HashedTokens([5, 6, 7])).tree.distributions == drawn_from[1:]


def test_a_branch_that_was_wrong_or_is_spent_is_not_used_and_gives_way_first():
    table = ProposalTable(max_trees=2)
    for text in ([5, 6, 9], [5, 6, 7, 8]):
        table.add(branch_after([5, 6], 7, 8), EMPTY, now=0.0)
        assert taken(table, HashedTokens(text), 4) == ()
        for last in (1, 2):
            table.add(branch_after([*text, last], 3, probability=0.1), HashedTokens(text), now=0.0)
        assert [taken(table, HashedTokens([*text, last]), 1) for last in (1, 2)] == [(3,), (3,)]


def test_the_branch_that_saw_most_wins():
    table = ProposalTable()
    table.add(branch_after([5], 6, 7, 1), EMPTY, now=0.0)
    table.add(branch_after([5, 6], 7, 2), EMPTY, now=0.0)
    assert taken(table, HashedTokens([5, 6, 7]), 1) == (2,)


def test_the_least_likely_branch_gives_way_when_there_are_too_many_and_the_oldest_of_those():
    table = ProposalTable(max_trees=2)
    for last, probability in enumerate((0.5, 0.1, 0.1, 0.4)):
        table.add(branch_after([5, last], 7, probability=probability), HashedTokens([5]), now=0.0)
    assert len(table) == 2
    assert [taken(table, HashedTokens([5, last]), 1) for last in (1, 2)] == [(), ()]


def test_what_is_likely_stays_as_long_as_something_is_stale():
    table = ProposalTable(max_trees=2)
    table.add(branch_after([5, 6], 7), HashedTokens([5, 6]), now=0.0)
    table.add(branch_after([5, 6, 8], 9, probability=0.1), HashedTokens([5, 6]), now=0.0)
    table.add(branch_after([5, 6, 8, 9], 1, probability=0.1), HashedTokens([5, 6, 8]), now=0.0)
    assert taken(table, HashedTokens([5, 6, 8]), 1) == (9,)
    assert len(table) == 2


def test_it_knows_how_long_a_draft_has_been_here():
    table = ProposalTable()
    for now, proposed in ((1.0, (7, 8)), (2.0, (7, 8)), (3.0, (7, 8, 9))):
        table.add(branch_after([5], *proposed), EMPTY, now=now)
        kept = table.take(HashedTokens([5]))
        assert kept is not None
        assert kept.arrived_at == (3.0 if now == 3.0 else 1.0)


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    branches=st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 3), min_size=1, max_size=5)), max_size=6),
)
def test_what_is_taken_always_continues_some_branch_that_agrees_with_the_text(text, branches):
    table = ProposalTable()
    for length, proposed in branches:
        table.add(branch_after(text[:length], *proposed), EMPTY, now=0.0)
    found = taken(table, HashedTokens(text), 3)
    fitting = [
        tuple(proposed[len(text) - min(length, len(text)) :][:3])
        for length, proposed in branches
        if text[min(length, len(text)) :] == proposed[: len(text) - min(length, len(text))]
    ]
    assert found == () or found in fitting
