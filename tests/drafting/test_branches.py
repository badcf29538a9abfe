"""Which branches are accepted and kept: their content decides, in any order of messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafting.draft_nodes import MAX_UNSOLICITED_IN_A_ROW
from outrider.speculation import prefix_hash as prefix_hash_module
from outrider.speculation.draft_stream import MAX_AHEAD_BRANCHES, MAX_BRANCHES_PER_SEQUENCE, DraftStatus
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import prefix_hash
from outrider.speculation.token_distribution import TokenDistribution
from tests.drafting.books import Book, ahead_of, answer_to


@pytest.fixture
def book():
    return Book()


@pytest.fixture
def update(book):
    """The update of the text 5 6, which was answered with the draft 7 8."""
    book.open(1, 5, 6, num_wanted=2)
    (update,) = book.take()
    book.answer(answer_to(update, 7, 8))
    return update


@pytest.mark.parametrize(
    "distributions",
    [
        (TokenDistribution((9, 8), (0.5, 0.5)),),  # one distribution for two tokens
        (TokenDistribution((9, 8), (0.5, 0.5)), TokenDistribution((9, 8), (0.5, 0.5))),  # the second lacks token 7
        (TokenDistribution((9,), (1.0,)), TokenDistribution((7,), (0.0,))),
    ],
    ids=["too few", "another token", "no probability"],
)
def test_a_draft_that_was_not_drawn_from_what_it_comes_with_is_not_believed(book, distributions):
    book.open(1, 1)
    (update,) = book.take()
    tree = DraftTree(update.length, update.prefix_hash, (9, 7), distributions=distributions)
    assert not book.answer(answer_to(update, branches=(tree,)))
    assert book.found() == ()


def test_an_old_prefix_is_refused_before_it_is_hashed(book, monkeypatch):
    book.open(1, *range(900))
    (update,) = book.take()
    old = DraftTree(100, prefix_hash(range(100)), (100, 101))

    def hash_again(*_):
        raise AssertionError("hashed under the lock")

    monkeypatch.setattr(prefix_hash_module, "prefix_hash", hash_again)
    book.answer(answer_to(update, branches=(old,) * 8))
    assert book.found() == ()


def test_a_branch_ahead_is_found_when_its_assumption_was_committed(book, update):
    book.answer(ahead_of(update, ((7, 8, 9), (1, 2)), ((7, 3), (4, 4))))
    book.clock.advance(0.01)
    book.update(1, [7, 8, 9], num_wanted=2)
    assert book.found() == (1, 2)
    assert book.counters.lead_seconds == pytest.approx(0.01)
    assert book.counters.num_stale_answers == 0


def test_a_branch_ahead_of_the_last_state_still_counts_when_it_crosses_the_next_update(book, update):
    book.update(1, [7, 3], num_wanted=2)
    (newer,) = book.take()
    book.answer(ahead_of(update, ((7, 3), (4, 4))))
    assert book.found() == (4, 4)
    book.answer(answer_to(newer, 1))
    assert book.counters.num_stale_answers == 0


def test_an_assumption_that_did_not_come_true_is_no_lie(book, update):
    book.update(1, [7, 3], num_wanted=2)
    assert book.answer(ahead_of(update, ((7, 8), (9, 9))))
    assert book.found() == ()


@pytest.mark.parametrize("status", [DraftStatus.PROPOSED, DraftStatus.AHEAD])
@pytest.mark.parametrize(
    "lie",
    [
        {"branches": (DraftTree(2, 12345, (7,)),)},  # another hash for a committed prefix
        {"branches": (DraftTree(2 + 65, 0, (7,)),)},  # further ahead than any node drafts
        {"branches": (DraftTree(4, 0, (1000,)),)},  # no such id
        {"branches": (DraftTree(4, 0, (2**32 - 1,)),)},
        *({"branches": (DraftTree(4, 0, (1,) * size),)} for size in (11, 200)),  # longer than requested
        {"branches": (DraftTree(4, 0, (1,)),) * (MAX_BRANCHES_PER_SEQUENCE + 1)},
        {"acked_length": 3},  # acknowledges tokens that were not sent
    ],
)
def test_what_no_honest_node_could_say_costs_it_the_sequence(book, update, lie, status):
    book.update(1, [], num_wanted=2)
    book.take()
    assert not book.answer(ahead_of(update, ((9,), (1,)), **lie, status=status))
    assert (book.counters.num_quarantined, book.num_sequences) == (1, [0])


def test_what_exceeds_the_allowance_is_stale_and_counts_as_flooding(book, update):
    for _ in range(MAX_AHEAD_BRANCHES // 4):
        book.answer(ahead_of(update, *(((9, index), (1,)) for index in range(4))))
    assert book.counters.num_stale_answers == 0
    book.answer(*[ahead_of(update, ((7, 8, 9), (1, 2)))] * (MAX_UNSOLICITED_IN_A_ROW + 1))
    assert book.nodes[0].is_flooding
    book.update(1, [7, 8, 9], num_wanted=2)
    assert book.found() == ()


def test_branches_ahead_of_a_sequence_that_is_not_there_or_without_any_branch_are_stale(book, update):
    book.answer(ahead_of(update), ahead_of(update, ((9,), (1,)), sequence_id=77))
    book.close(1)
    book.answer(ahead_of(update, ((9,), (1,))))
    assert book.counters.num_stale_answers == 3


@given(data=st.data())
def test_whatever_order_messages_come_in_a_draft_continues_what_was_committed(data):
    """With lost, repeated, late or reordered answers, no draft is for another text, and no answer counts as invalid."""
    book = Book()
    book.open(1, 5, 6, num_wanted=2)
    text, sent, under_way = [5, 6], [], []
    for _ in range(data.draw(st.integers(1, 12))):
        sent += book.take()
        if sent:
            state = data.draw(st.sampled_from(sent[-3:]))
            whole = state._replace(token_ids=tuple(text[: state.length]))
            assumed = data.draw(st.lists(st.integers(7, 8), min_size=1, max_size=3))
            under_way += [ahead_of(whole, (assumed, (*assumed, 9)))]
            if state is sent[-1]:
                under_way += [answer_to(whole, 7, 8)]
        for _ in range(data.draw(st.integers(0, 2))):
            if under_way:
                book.answer(data.draw(st.sampled_from(under_way)))
        new = data.draw(st.lists(st.integers(7, 8), max_size=2))
        text += new
        book.update(1, new, num_wanted=2)
        assert set(book.found()) <= {7, 8, 9}
    assert book.counters.num_quarantined == 0


@pytest.mark.parametrize(
    ("takes_trees", "parents", "is_kept"),
    [(True, (-1, -1, 0), True), (False, (-1, -1, 0), False), (True, (-1, 1, 0), False), (True, (-1, -1), False)],
    ids=["a tree", "not asked for", "no tree", "too short"],
)
def test_branches_that_are_trees(book, takes_trees, parents, is_kept):
    book.open(1, 5, takes_trees=takes_trees)
    (update,) = book.take()
    tree = DraftTree(1, update.prefix_hash, (7, 8, 9), parents=parents)
    assert book.answer(answer_to(update, branches=(tree,))) == is_kept
    assert book.found() == ((7, 8, 9) if is_kept else ())
    if is_kept:
        book.update(1, [7], num_wanted=3)
        assert book.found() == (9,)
