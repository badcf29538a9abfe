"""Which draft node serves a sequence: sequences are spread, and moved from nodes that are lost, late or full."""

from __future__ import annotations

import itertools

import pytest

from outrider.drafting.book import DraftBook
from outrider.drafting.draft_nodes import MAX_RETRY_SECONDS
from tests.drafting.books import Book, answer_to, no_room, take_updates

STEP_SECONDS = 0.0125
LATE_SECONDS = 5 * STEP_SECONDS


def test_sequences_are_spread_over_the_connected_nodes():
    book = Book(3, num_connected=1)
    book.connect(2)
    for sequence_id in range(4):
        book.open(sequence_id, 1)
    assert book.num_sequences == [2, 0, 2]
    book.book.remove_node(book.nodes[0])
    assert book.num_sequences == [0, 0, 4]
    assert all(update.start is not None for update in book.take(2))


def test_the_rank_decides_between_nodes_with_equally_many_sequences():
    book = Book(0)
    book.book = DraftBook(clock=book.clock)
    book.nodes = [book.book.nodes.add(rank=rank) for rank in (5, 1, 3)]
    for number in range(3):
        book.connect(number)
    for sequence_id in range(4):
        book.open(sequence_id, 1)
    assert book.num_sequences == [1, 2, 1]


def test_a_late_answer_after_a_sequence_went_and_came_back_is_stale_and_no_lie():
    book = Book(2, num_connected=1)
    book.open(1, 1, num_wanted=8)
    (old,) = book.take()
    book.connect(1)
    book.disconnect(0)
    book.connect(0)
    book.disconnect(1)
    assert book.num_sequences == [1, 0]
    (new,) = book.take()
    assert new.sequence_id != old.sequence_id
    assert book.answer(answer_to(old, *range(16)))
    assert (book.counters.num_stale_answers, book.counters.num_quarantined) == (1, 0)
    book.answer(answer_to(new, 7))
    assert book.found() == (7,)


# Late nodes


@pytest.mark.parametrize("other_comes_late", [False, True])
def test_a_node_with_an_old_unanswered_update_is_late_and_gives_all_sequences_but_one_away(other_comes_late):
    book = Book(2, num_connected=1)
    for sequence_id in range(4):
        book.open(sequence_id, 1)
    book.take(0)
    if not other_comes_late:
        book.connect(1)
    book.observe_step(STEP_SECONDS)
    assert (book.is_late(0), book.num_sequences) == (False, [4, 0])
    book.clock.advance(LATE_SECONDS)
    book.observe_step(STEP_SECONDS)
    if other_comes_late:
        assert (book.is_late(0), book.num_sequences) == (True, [4, 0])
        book.connect(1)
        book.observe_step(STEP_SECONDS)
    assert (book.is_late(0), book.num_sequences) == (True, [1, 3])
    assert not book.is_waited_for(0)


def test_without_another_node_the_sequences_of_a_late_one_stay():
    book = Book(1)
    book.open(1, 1)
    (update,) = book.take()
    book.clock.advance(LATE_SECONDS)
    book.observe_step(STEP_SECONDS)
    assert (book.is_late(), book.num_sequences) == (True, [1])
    book.answer(answer_to(update, 5))
    assert book.found() == (5,), "late drafts serve all the same"
    assert not book.is_late()


def test_what_is_late_is_a_share_of_a_step():
    book = Book(1)
    book.open(1, 1)
    for _ in range(50):
        book.observe_step(0.1)
    book.take()
    book.clock.advance(0.35)
    assert not book.is_late()
    book.clock.advance(0.1)
    assert book.is_late()


def test_a_late_node_recovers_by_answers_in_time_and_gets_one_sequence_until_then():
    book = Book(2)
    book.disconnect(1)
    book.connect(1)
    for sequence_id in range(6):
        book.open(sequence_id, 1)
    assert book.num_sequences == [5, 1]
    num_answers = 0
    while book.is_late(1):
        (update,) = book.take(1)
        book.answer(answer_to(update, 7), node=1)
        book.update(1, [7], num_wanted=3)
        num_answers += 1
    assert 5 < num_answers < 20
    book.open(6, 1)
    assert book.num_sequences == [5, 2]


def test_a_flapping_node_does_not_draw_all_new_sequences():
    book = Book(2)
    for sequence_id in range(4):
        book.open(sequence_id, 1)
    for _ in range(3):
        book.disconnect(0)
        book.connect(0)
    for sequence_id in range(4, 8):
        book.open(sequence_id, 1)
    assert book.num_sequences == [1, 7]


def test_a_node_that_lied_about_a_sequence_does_not_get_it_back_by_connecting_again():
    book = Book(1)
    book.open(1, 1)
    (update,) = book.take()
    assert not book.answer(answer_to(update, 1000))
    book.disconnect()
    book.connect()
    assert (book.num_sequences, book.counters.num_quarantined) == ([0], 1)


def test_a_quarantined_sequence_is_offered_to_another_node():
    book = Book(2, num_connected=1)
    book.open(1, 1)
    (update,) = book.take()
    book.connect(1)
    book.answer(answer_to(update, 1000))
    assert book.num_sequences == [0, 1]
    assert [update.closed for update in take_updates(book.book, book.nodes[0])] == [True]
    (update,) = book.take(1)
    book.answer(answer_to(update, 9), node=1)
    assert book.found() == (9,)


def test_a_node_whose_answers_take_longer_than_the_budget_is_not_waited_for_until_they_are_quick_again():
    book = Book(1)
    book.open(1, 5)

    def is_waited_for(answer_seconds):
        waits = book.is_waited_for()
        (update,) = book.take()
        book.clock.advance(answer_seconds)
        book.answer(answer_to(update, 900))
        book.update(1, [7], num_wanted=3)
        return waits

    assert is_waited_for(0.030)
    assert not any(is_waited_for(0.030) for _ in range(5))
    assert [is_waited_for(0.001) for _ in range(20)][-1]
    assert not book.is_late()


# Nodes without room


def test_a_sequence_without_room_moves_to_a_node_that_has_some():
    book = Book(2, num_connected=1)
    book.open(1, 1, 2)
    (update,) = book.take(0)
    book.connect(1)
    book.answer(no_room(update))
    assert book.num_sequences == [0, 1]
    (update,) = book.take(1)
    assert update.start is not None
    book.open(2, 1)
    assert book.num_sequences == [0, 2], "the full one is left alone"


def test_a_sequence_for_which_there_is_never_room_takes_no_turn_of_others():
    book = Book(1)
    book.open(1, *range(100))
    waits = []
    for sequence_id in range(2, 12):
        is_open = False
        for quarter in range(40):
            for update in book.take():
                too_long = update.length == 100
                is_open |= not too_long
                book.answer(no_room(update) if too_long else answer_to(update))
            if is_open:
                waits.append(quarter)
                break
            if quarter == 4:
                book.open(sequence_id, 1, 2)
            book.clock.advance(0.25)
    assert len(waits) == 10
    assert max(waits) <= 4 + 4 * 2.0


def test_a_sequence_that_is_too_long_for_a_node_keeps_no_short_one_from_it():
    """This holds even if the long sequence is offered again and again, and whatever else the node refuses."""
    book = Book(1)
    book.open(0, *range(100))
    for sequence_id in range(1, 9):
        book.answer(*map(no_room, book.take()))
        assert book.num_sequences == [sequence_id - 1]
        book.open(sequence_id, *range(3))
        (update,) = book.take()
        assert update.length == 3, "at once"
        assert book.book.nodes.choose(book.clock(), 60, refused=set()) is None, "about as long as what was refused"
        book.answer(answer_to(update, 7))
        book.clock.advance(MAX_RETRY_SECONDS)


def test_a_full_node_that_refuses_short_ones_as_well_is_asked_for_few_of_them():
    book = Book(1)
    num_refused = 0
    for length in range(200, 0, -1):
        book.open(length, *range(length))
        updates = book.take()
        num_refused += len(updates)
        book.answer(*map(no_room, updates))
    assert num_refused <= 8, "each of less than half the length"


def test_a_full_node_is_tried_ever_more_rarely_and_with_one_sequence():
    book = Book(1)
    for sequence_id in range(5):
        book.open(sequence_id, *range(100))
    book.answer(*map(no_room, book.take()))
    sent_at, started = [], book.clock()
    while book.clock() < started + 100.0:
        book.clock.advance(0.25)
        updates = book.take()
        assert len(updates) <= 1
        sent_at += [book.clock() - started] * len(updates)
        book.answer(*map(no_room, updates))
    gaps = [after - before for before, after in itertools.pairwise(sent_at)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(MAX_RETRY_SECONDS, abs=0.5)
    assert len(sent_at) < 9


def test_a_node_that_has_room_again_gets_what_waits_one_after_the_other():
    book = Book(1)
    for sequence_id in range(3):
        book.open(sequence_id, 1, 2)
    book.answer(*map(no_room, book.take()))
    book.clock.advance(1.1)
    for expected in (1, 2, 3):
        updates = book.take()
        assert (len(updates), book.num_sequences) == (1, [expected])
        book.answer(*map(answer_to, updates))
        assert book.book.has_unsent is (expected < 3), "the next one is sent at once"
    book.open(3, 1)
    book.open(4, 1)
    assert book.num_sequences == [5]


def test_a_sequence_that_ends_makes_room_at_once():
    book = Book(1)
    for sequence_id in range(2):
        book.open(sequence_id, 1, 2)
    first, second = book.take()
    book.answer(answer_to(first, 7), no_room(second))
    assert book.num_sequences == [1]
    book.close(0)
    assert len(book.take()) == 1
