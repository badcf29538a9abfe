"""The draft book: which updates are sent, and which answers are accepted."""

from __future__ import annotations

import pytest

from outrider.drafting import book as book_module
from outrider.drafting.draft_nodes import MAX_UNSOLICITED_IN_A_ROW
from outrider.request import VerificationMethod
from outrider.speculation.draft_stream import StepNotice
from outrider.speculation.prefix_hash import prefix_hash
from tests.drafting.books import Book, answer_to, catching_up, unknown_prefix


@pytest.fixture
def book():
    return Book()


def test_the_first_update_carries_the_start_and_later_ones_only_what_was_not_acknowledged(book):
    book.open(1, 5, 6)
    (first,) = book.take()
    assert first.start.prompt_length == 2
    assert (first.start_length, first.token_ids, first.length) == (0, (5, 6), 2)
    assert first.prefix_hash == prefix_hash([5, 6])
    book.answer(answer_to(first, 7))
    book.update(1, [7, 8], num_wanted=3)
    (second,) = book.take()
    assert second.start is None
    assert (second.start_length, second.token_ids, second.length) == (2, (7, 8), 4)


def test_a_draft_may_end_where_it_no_longer_pays_unless_its_tokens_are_drawn(book):
    """If a drawn draft might end early, it would arrive earlier, so its tokens would affect whether it is verified."""
    book.book.min_reach = 0.25
    book.open(1, 5)
    book.open(2, 6, verification_method=VerificationMethod.REJECTION)
    assert [update.min_reach for update in book.take()] == [0.25, 0.0]


def test_a_slow_sequence_does_not_hold_the_others_back(book):
    book.open(1, 5)
    book.open(2, 6)
    _, second = book.take()
    book.answer(answer_to(second))
    book.update(1, [7], num_wanted=3)
    book.update(2, [7], num_wanted=3)
    assert [update.sequence_id for update in book.take()] == [second.sequence_id]


def test_a_node_that_lost_a_sequence_is_sent_it_from_the_start_in_pieces(book, monkeypatch):
    monkeypatch.setattr(book_module, "MAX_TOKENS_PER_UPDATE", 3)
    book.open(1, 1, 2, 3, 4, 5, 6, 7)
    lengths = []
    for _ in range(4):
        for update in book.take():
            lengths.append((update.start_length, update.length, update.num_wanted))
            assert update.prefix_hash == prefix_hash(range(1, update.length + 1))
            book.answer(answer_to(update))
    assert lengths == [(0, 3, 0), (3, 6, 0), (6, 7, 3)]
    book.update(1, [8], num_wanted=3)
    book.answer(*map(unknown_prefix, book.take()))
    (update,) = book.take()
    assert (update.start_length, update.length) == (0, 3)
    assert update.start is not None


def test_a_sequence_that_is_lost_again_within_a_second_is_put_off(book):
    book.open(1, 1, 2)
    for _ in range(2):
        book.answer(*map(unknown_prefix, book.take()))
    assert book.take() == []
    book.clock.advance(1.1)
    assert len(book.take()) == 1


def test_a_message_has_a_budget_of_tokens(book, monkeypatch):
    monkeypatch.setattr(book_module, "MAX_TOKENS_PER_MESSAGE", 5)
    for sequence_id in range(3):
        book.open(sequence_id, 1, 2, 3)
    assert sum(len(update.token_ids) for update in book.take()) == 5
    assert book.book.has_unsent
    assert sum(len(update.token_ids) for update in book.take()) == 3


def test_a_sequence_whose_node_had_nothing_is_not_waited_for(book):
    book.open(1, 1, 2)
    (update,) = book.take()
    assert book.is_waited_for()
    book.answer(answer_to(update))
    assert not book.is_waited_for()


def test_a_sequence_that_wants_no_drafts_is_told_of_now_and_then_only(book):
    book.open(1, 5)
    lengths = []
    for _ in range(80):
        for update in book.take():
            lengths.append(update.length)
            book.answer(answer_to(update))
        book.update(1, [7], num_wanted=0)
    assert lengths == [1, 2, 34, 66]
    book.update(1, [7], num_wanted=2)
    assert [update.num_wanted for update in book.take()] == [2]


def test_while_its_node_catches_up_a_sequence_is_told_of_and_not_put_off(book):
    """The second answer to the prompt is in transit at the same time as the next update."""
    book.open(1, *range(600))
    (prompt,) = book.take()
    book.answer(catching_up(prompt))
    book.update(1, [7], num_wanted=3)
    (first,) = book.take()
    book.answer(catching_up(prompt))
    assert not book.is_waited_for(), "it would not come in time"
    book.answer(answer_to(first, 8, 9))
    book.update(1, [8], num_wanted=3)
    assert [update.length for update in book.take()] == [602]
    assert book.found() == (9,)


def test_an_answer_that_there_is_nothing_to_an_older_state_leaves_the_newer_one_asked(book):
    book.open(1, *range(600))
    (prompt,) = book.take()
    book.answer(catching_up(prompt))
    book.update(1, [7], num_wanted=3)
    (newer,) = book.take()
    book.answer(answer_to(prompt))
    book.answer(answer_to(newer, 8))
    assert book.found() == (8,)


def test_an_answer_that_nobody_asked_for_is_stale(book):
    book.open(1, 5)
    (update,) = book.take()
    book.answer(answer_to(update))
    for _ in range(3):
        assert book.answer(answer_to(update, 7))
    book.close(1)
    book.answer(answer_to(update, 7))
    assert book.counters.num_stale_answers == 4
    assert book.found() == ()


def test_a_node_that_floods_the_stream_with_unsolicited_answers_is_to_be_left(book):
    book.open(1, 5)
    (update,) = book.take()
    book.answer(*[answer_to(update)] * (MAX_UNSOLICITED_IN_A_ROW + 1))
    assert not book.nodes[0].is_flooding
    book.answer(answer_to(update))
    assert book.nodes[0].is_flooding
    book.update(1, [6], num_wanted=3)
    book.answer(*map(answer_to, book.take()))
    assert not book.nodes[0].is_flooding


def test_an_answer_on_another_nodes_stream_is_stale():
    book = Book(2)
    book.open(1, 5)
    (update,) = book.take(0)
    book.answer(answer_to(update, 7), node=1)
    assert book.counters.num_stale_answers == 1
    book.answer(answer_to(update, 7), node=0)
    assert book.found() == (7,)


def test_only_sequences_with_news_are_looked_at(book):
    for sequence_id in range(3):
        book.open(sequence_id, 1, 2)
    book.answer(*[answer_to(update, 9) for update in book.take()])
    assert not book.nodes[0].dirty
    book.update(1, [9], num_wanted=1)
    (update,) = book.take()
    book.update(1, [9], num_wanted=1)  # sent only after the answer to the last update
    assert (book.take(), len(book.nodes[0].dirty)) == ([], 0)
    book.answer(answer_to(update))
    assert [each.length for each in book.take()] == [4]


def test_while_an_update_is_unanswered_steps_wake_no_stream(book):
    """A stopped node would otherwise cost every step a system call and a turn of the event loop."""
    book.open(1, 5, 6)
    (update,) = book.take()
    book.update(1, [7], num_wanted=3)
    assert not book.book.has_unsent
    book.answer(answer_to(update, 7, 8))
    assert book.book.has_unsent
    assert [update.token_ids for update in book.take()] == [(7,)]


def test_a_notice_names_what_a_step_verifies_to_the_node_that_has_the_sequence():
    book = Book(2, num_connected=1)
    book.open(1, 1, 2, 3)
    book.open(2, 4, 5, num_wanted=0)
    book.book.begin_step({1: (7,)})
    assert not book.book.take_notices(book.nodes[0]), "the node does not know the sequence yet"
    (first, _) = book.take()
    book.book.begin_step({1: (7, 8), 2: (), 3: (9,)})
    assert book.book.has_unsent
    assert book.book.take_notices(book.nodes[0]) == [StepNotice(first.sequence_id, 3, (7, 8))]
    assert not book.book.take_notices(book.nodes[0])
    book.book.begin_step({1: (5,)})
    book.book.begin_step({1: ()})
    assert book.book.take_notices(book.nodes[0]) == [StepNotice(first.sequence_id, 3, ())], "the newest step counts"
    book.book.begin_step({1: ()})
    book.disconnect()
    assert not book.book.take_notices(book.nodes[0])


def test_a_notice_waits_for_the_update_that_it_belongs_to(book):
    book.open(1, 5)
    (update,) = book.take()
    book.book.begin_step({1: ()})
    book.book.take_notices(book.nodes[0])
    for token_id in (7, 8):
        book.update(1, [token_id], num_wanted=3)
        book.book.begin_step({1: (token_id,)})
        assert not book.book.has_unsent
        assert not book.take()
        assert not book.book.take_notices(book.nodes[0])
    book.answer(answer_to(update, 7))
    (update,) = book.take()
    assert update.length == 3
    assert book.book.take_notices(book.nodes[0]) == [StepNotice(update.sequence_id, 3, (8,))]


def test_a_notice_of_a_sequence_that_has_ended_is_dropped(book):
    book.open(1, 5)
    book.take()
    book.update(1, [7], num_wanted=3)
    book.book.begin_step({1: (8,)})
    book.close(1)
    assert not book.book.take_notices(book.nodes[0])


def test_a_notice_for_a_node_that_is_gone_leaves_nothing_to_send(book):
    book.open(1, 5)
    book.take()
    book.book.begin_step({1: (8,)})
    assert book.book.has_unsent
    book.disconnect()
    assert not book.book.has_unsent
