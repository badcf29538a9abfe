"""Features in the draft book: what is copied from the plane, sent, acknowledged, and copied again."""

from __future__ import annotations

import pytest

from outrider.drafting import book as book_module
from outrider.drafting.drafted_sequence import KEEP_UP_TOKENS, MAX_UNACKED_BYTES
from outrider.speculation.draft_stream import MAX_FEATURE_BYTES_PER_MESSAGE
from tests.drafting.books import Book, answer_to, catching_up, unknown_prefix

SIZE = 4


def numbered(start, end) -> bytes:
    """Returns features of tokens [start, end)."""
    return b"".join(number.to_bytes(SIZE, "little") for number in range(start, end))


def book_of(*args, **options) -> Book:
    return Book(*args, feature_bytes=SIZE, **options)


def copy(book, **available) -> list[tuple[int, int, int]]:
    """Copies features as the engine does after a step. `s1=…`: the tokens of sequence 1 that have features."""
    ranges = book.book.missing_features({int(name[1:]): number for name, number in available.items()})
    for each in ranges:
        book.book.add_features(each, numbered(each.start, each.end))
    return [(each.sequence_id, each.start, each.end) for each in ranges]


def held_by_node(update):
    return answer_to(update, acked_features=update.feature_start + len(update.features) // SIZE)


def test_a_prompt_is_announced_before_its_features_which_follow_with_the_first_tokens():
    book = book_of()
    book.open(1, *range(10))
    (update,) = book.take()
    assert (update.length, update.features) == (10, b"")
    book.answer(held_by_node(update))
    book.update(1, [10], num_wanted=3)
    assert copy(book, s1=10) == [(1, 0, 10)]
    (update,) = book.take()
    assert (update.start_length, update.token_ids) == (10, (10,))
    assert (update.feature_start, update.features) == (0, numbered(0, 10))
    book.answer(held_by_node(update))
    assert book.take() == []
    book.update(1, [11, 12], num_wanted=3)
    assert copy(book, s1=12) == [(1, 10, 12)], "nothing that is acknowledged is read again"
    (update,) = book.take()
    assert (update.feature_start, update.features) == (10, numbered(10, 12))


def test_features_that_come_after_the_tokens_are_news():
    book = book_of()
    book.open(1, *range(10))
    book.answer(held_by_node(*book.take()))
    assert book.take() == []
    copy(book, s1=9)
    (update,) = book.take()
    assert (update.token_ids, update.length, update.num_wanted) == ((), 10, 3)
    assert update.features == numbered(0, 9)


def test_features_of_a_sequence_that_wants_no_drafts_go_out_many_at_a_time():
    book = book_of()
    book.open(1, 1, 2, num_wanted=0)
    book.answer(held_by_node(*book.take()))
    copy(book, s1=KEEP_UP_TOKENS - 1)
    assert book.take() == []
    copy(book, s1=KEEP_UP_TOKENS)
    assert len(book.take()) == 1


def test_the_newest_token_has_no_feature_yet_and_a_piece_of_a_text_none_beyond_it(monkeypatch):
    monkeypatch.setattr(book_module, "MAX_TOKENS_PER_UPDATE", 4)
    book = book_of()
    book.open(1, *range(10))
    copy(book, s1=9)
    sent = []
    while updates := book.take():
        sent.append((updates[0].length, updates[0].feature_start, updates[0].features))
        book.answer(held_by_node(*updates))
    assert sent == [(4, 0, numbered(0, 3)), (8, 3, numbered(3, 7)), (10, 7, numbered(7, 9))]


def test_nothing_is_copied_for_nodes_that_need_no_features():
    book = book_of(2, num_connected=0)
    book.book.connected(book.nodes[0])
    book.open(1, 1, 2, 3)
    assert not book.book.needs_features
    assert copy(book, s1=2, s7=5) == []
    book.connect(1)
    assert book.book.needs_features
    book.disconnect(1)
    assert not book.book.needs_features


def test_a_node_that_has_lost_a_sequence_gets_its_features_again():
    book = book_of()
    book.open(1, *range(10))
    copy(book, s1=9)
    (update,) = book.take()
    book.answer(held_by_node(update))
    book.update(1, [10], num_wanted=3)
    (stale,) = book.book.missing_features({1: 10})
    (update,) = book.take()
    book.answer(unknown_prefix(update))
    book.book.add_features(stale, numbered(stale.start, stale.end))  # were copied before the node lost the sequence
    (update,) = book.take()
    assert (update.start_length, update.feature_start, update.features) == (0, 0, b"")
    book.answer(held_by_node(update))
    assert copy(book, s1=10) == [(1, 0, 10)]
    (update,) = book.take()
    assert (update.feature_start, update.features) == (0, numbered(0, 10))


def test_a_sequence_that_moves_begins_without_features():
    book = book_of(2)
    book.open(1, *range(10))
    copy(book, s1=9)
    (update,) = book.take(0)
    book.answer(held_by_node(update))
    book.update(1, [10], num_wanted=3)
    (stale,) = book.book.missing_features({1: 10})
    book.disconnect(0)
    book.book.add_features(stale, numbered(stale.start, stale.end))
    (update,) = book.take(1)
    assert (update.start_length, update.feature_start, update.features) == (0, 0, b"")
    assert copy(book, s1=10) == [(1, 0, 10)]


# Limits


def test_a_step_copies_a_limited_number_of_bytes_and_the_fewest_first(monkeypatch):
    monkeypatch.setattr(book_module, "MAX_COPIED_BYTES", 10 * SIZE)
    book = book_of()
    for sequence_id in (1, 2, 3):
        book.open(sequence_id, *range(30))
    assert copy(book, s1=29, s2=3, s3=2) == [(3, 0, 2), (2, 0, 3), (1, 0, 5)]
    assert copy(book, s1=29, s2=3, s3=2) == [(1, 5, 15)]


def test_of_prompts_that_lack_as_much_one_is_ended_before_the_next_the_newest_first(monkeypatch):
    """If the prompts took turns, all copies would end late, and those of wide features only after their sequences."""
    monkeypatch.setattr(book_module, "MAX_COPIED_BYTES", 10 * SIZE)
    book = book_of()
    for sequence_id in (1, 2, 3):
        book.open(sequence_id, *range(30))
    assert copy(book, s1=29, s2=29, s3=29) == [(3, 0, 10)]
    assert copy(book, s1=29, s2=29, s3=29) == [(3, 10, 20)]
    book.update(1, [30], num_wanted=3)
    assert copy(book, s1=30, s2=29, s3=29) == [(3, 20, 29), (2, 0, 1)]


def test_a_transfer_that_cannot_end_before_its_sequence_is_not_begun(monkeypatch):
    monkeypatch.setattr(book_module, "MAX_COPIED_BYTES", 10 * SIZE)
    book = book_of()
    book.open(1, *range(30), max_tokens=2)
    book.open(2, *range(50), max_tokens=20)
    assert copy(book, s1=29, s2=49) == [(2, 0, 10)]
    book.update(2, range(17), num_wanted=3)
    assert copy(book, s2=66) == []


def test_what_all_nodes_have_not_acknowledged_is_limited(monkeypatch):
    monkeypatch.setattr(book_module, "MAX_ALL_UNACKED_BYTES", 10 * SIZE)
    book = book_of()
    for sequence_id in (1, 2):
        book.open(sequence_id, *range(30))
    assert copy(book, s1=4, s2=29) == [(1, 0, 4), (2, 0, 6)]
    assert copy(book, s1=4, s2=29) == []
    book.answer(*map(held_by_node, book.take()))
    assert copy(book, s1=4, s2=29) == [(2, 6, 16)]


def test_what_is_not_acknowledged_is_limited():
    size = MAX_UNACKED_BYTES // 4
    book = Book(feature_bytes=size)
    book.open(1, *range(10))

    def copied():
        ranges = book.book.missing_features({1: 9})
        for each in ranges:
            book.book.add_features(each, bytes((each.end - each.start) * size))
        return [(each.start, each.end) for each in ranges]

    assert [copied(), copied()] == [[(0, 4)], []]
    (update,) = book.take()
    book.answer(answer_to(update, acked_features=3))
    assert copied() == [(4, 7)]


def test_a_message_carries_a_limited_number_of_bytes_of_features():
    size = MAX_UNACKED_BYTES // 4
    book = Book(feature_bytes=size)
    for sequence_id in range(5):
        book.open(sequence_id, *range(10))
        for each in book.book.missing_features({sequence_id: 9}):
            book.book.add_features(each, bytes((each.end - each.start) * size))
    sizes = []
    while updates := book.take():
        sizes.append(sum(len(update.features) for update in updates))
        assert all(update.features for update in updates), "else its answer would be that there is nothing"
    assert max(sizes) <= MAX_FEATURE_BYTES_PER_MESSAGE
    assert sum(sizes) == 5 * MAX_UNACKED_BYTES


# What a draft node may say


@pytest.mark.parametrize(("acked", "is_believed"), [(9, True), (10, False), (2**32 - 1, False)])
def test_more_features_than_were_sent_cannot_be_acknowledged(acked, is_believed):
    book = book_of()
    book.open(1, *range(10))
    copy(book, s1=9)
    (update,) = book.take()
    assert book.answer(answer_to(update, acked_features=acked)) is is_believed


def test_a_node_that_needs_none_acknowledges_none():
    book = Book()
    book.open(1, *range(10))
    (update,) = book.take()
    assert not book.answer(answer_to(update, acked_features=1))


def test_an_update_is_answered_when_its_features_are():
    """A node may answer the first update while another one, with the same tokens and with features, is in transit."""
    book = book_of()
    book.open(1, *range(10))
    (first,) = book.take()
    book.answer(catching_up(first))
    copy(book, s1=9)
    (second,) = book.take()
    book.answer(answer_to(first))
    copy(book, s1=9)
    assert book.take() == [], "one unanswered update"
    book.answer(answer_to(second, 5, acked_features=9))
    assert book.found() == (5,)
    book.update(1, [5], num_wanted=3)
    assert len(book.take()) == 1
