"""Features in the draft book: which go in updates, which are offered, and what is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from outrider.drafting import book as book_module
from outrider.drafting.drafted_sequence import (
    KEEP_UP_TOKENS,
    MAX_FEATURE_BYTES_PER_UPDATE,
    RENEW_SECONDS,
)
from outrider.speculation.draft_stream import MAX_FEATURE_BYTES_PER_MESSAGE, FeatureOffer
from tests.drafting.books import Book, answer_to, catching_up, unknown_prefix

SIZE = 4
WIDE = MAX_FEATURE_BYTES_PER_UPDATE // 4  # bytes of a token of which four fit into an update


@dataclass
class Table:
    num_tokens: int


@dataclass
class Source:
    """A `FeatureSource` that records its offers. Features are zeros."""

    bytes_per_token: int
    can_offer: bool = True
    reads_wait: bool = False
    loses: bool = False  # whether sequences have lost their blocks
    offers: list[FeatureOffer] = field(default_factory=list)
    open: list[FeatureOffer] = field(default_factory=list)

    def read(self, ranges):
        return [None if self.loses else bytes((end - start) * self.bytes_per_token) for _, start, end in ranges]

    def offer(self, kv, end):
        if not self.can_offer:
            return None
        self.offers.append(FeatureOffer(len(self.offers).to_bytes(16, "big"), end, "decode:1"))
        self.open.append(self.offers[-1])
        return self.offers[-1]

    def withdraw(self, offer):
        self.open.remove(offer)


class Sent:
    """A book whose nodes have a head, and the tokens whose features are in its updates."""

    def __init__(self, num_nodes=1, *, size=SIZE, can_offer=True, **options):
        self.source = Source(size, can_offer)
        self.books = Book(num_nodes, features=self.source, **options)
        self.tables = {}

    def __getattr__(self, name):
        return getattr(self.books, name)

    def step(self, num_features, *token_ids, sequence_id=1, num_wanted=3):
        """Commits a step's tokens. `num_features`: the number of the sequence's tokens that have features."""
        table = self.tables.setdefault(sequence_id, Table(0))
        table.num_tokens = num_features
        self.books.update(sequence_id, token_ids, num_wanted=num_wanted, kv=table)

    def send(self, number=0):
        """Takes updates. Returns each with (start, end) of its features; (0, 0) if it has none."""
        size = self.source.bytes_per_token
        return [
            (update, (update.feature_start, update.feature_start + len(update.features) // size))
            if update.features
            else (update, (0, 0))
            for update in self.books.take(number)
        ]


def held(sent, **changes):
    """The answer of a node that holds what the update brought."""
    update, (_, end) = sent
    return answer_to(update, acked_features=max(end, update.feature_start), **changes)


def test_a_prompt_is_announced_before_its_features_which_follow_with_the_first_tokens():
    book = Sent()
    book.open(1, *range(10))
    (sent,) = book.send()
    assert (sent[0].length, sent[1], sent[0].feature_offer) == (10, (0, 0), None)
    book.answer(held(sent))
    book.step(10, 10)
    (sent,) = book.send()
    assert (sent[0].start_length, sent[0].token_ids, sent[1]) == (10, (10,), (0, 10))
    book.answer(held(sent))
    assert book.send() == []
    book.step(12, 11, 12)
    (sent,) = book.send()
    assert sent[1] == (10, 12), "nothing that is acknowledged is sent again"


def test_features_of_a_sequence_that_wants_no_drafts_go_out_many_at_a_time():
    book = Sent()
    book.open(1, 1, 2, num_wanted=0)
    book.answer(held(*book.send()))
    for number in range(KEEP_UP_TOKENS - 1):
        book.step(2 + number, 5, num_wanted=0)
    assert book.send() == []
    book.step(1 + KEEP_UP_TOKENS, 5, num_wanted=0)
    ((_, features),) = book.send()
    assert features == (0, 1 + KEEP_UP_TOKENS)


def test_the_newest_token_has_no_feature_yet_and_a_piece_of_a_text_none_beyond_it(monkeypatch):
    monkeypatch.setattr(book_module, "MAX_TOKENS_PER_UPDATE", 4)
    book = Sent()
    book.open(1, *range(9))
    book.step(9, 9)
    sent = []
    while updates := book.send():
        sent.append((updates[0][0].length, updates[0][1]))
        book.answer(held(*updates))
    assert sent == [(4, (0, 3)), (8, (3, 7)), (10, (7, 9))]


def test_nothing_is_sent_to_nodes_that_need_no_features():
    book = Sent(2, num_connected=0)
    book.book.connected(book.nodes[0])
    book.open(1, 1, 2, 3)
    assert not book.book.needs_features
    book.step(3, 4)
    assert [features for _, features in book.send()] == [(0, 0)]
    book.connect(1)
    assert book.book.needs_features
    book.disconnect(1)
    assert not book.book.needs_features


def test_a_node_that_has_lost_a_sequence_gets_its_features_again():
    book = Sent()
    book.open(1, *range(9))
    book.step(9, 9)
    book.answer(held(*book.send()))
    book.step(10, 10)
    (sent,) = book.send()
    book.answer(unknown_prefix(sent[0]))
    (sent,) = book.send()
    assert (sent[0].start_length, sent[0].feature_start, sent[1]) == (0, 0, (0, 10))


def test_a_sequence_that_moves_begins_without_features():
    book = Sent(2)
    book.open(1, *range(9))
    book.step(9, 9)
    book.answer(held(*book.send(0)))
    book.step(10, 10)
    book.disconnect(0)
    (sent,) = book.send(1)
    assert (sent[0].start_length, sent[1]) == (0, (0, 10))


def test_an_update_that_loses_its_features_on_the_way_is_answered_by_its_tokens():
    """The sequence is preempted while the message is made."""
    book = Sent()
    book.open(1, *range(9))
    book.answer(held(*book.send()))
    book.step(9, 9)
    book.source.loses = True
    ((update, features),) = book.send()
    assert features == (0, 0)
    book.answer(answer_to(update))
    book.step(0, 10)
    ((_, features),) = book.send()
    assert features == (0, 0), "it has none at present"


# Offers


def test_many_features_are_offered_and_those_of_later_steps_follow_what_was_read():
    book = Sent(size=WIDE)
    book.open(1, *range(20))
    book.answer(held(*book.send()))
    book.step(20, 20)
    (sent,) = book.send()
    (offer,) = book.source.offers
    assert (sent[0].feature_offer, offer.end_token, sent[1]) == (offer, 20, (0, 0))
    book.answer(catching_up(sent[0]))
    book.step(21, 21)
    (sent,) = book.send()
    assert (sent[0].feature_offer, sent[1]) == (offer, (0, 0)), "the same one again"
    book.answer(catching_up(sent[0]))
    book.answer(answer_to(sent[0], acked_features=20))
    (sent,) = book.send()
    assert (sent[0].feature_offer, sent[0].token_ids, sent[1]) == (None, (), (20, 21)), "without another token"
    assert book.source.open == []
    book.answer(held(sent, branches=()))
    assert book.send() == []


def test_a_long_text_is_offered_with_its_last_tokens(monkeypatch):
    monkeypatch.setattr(book_module, "MAX_TOKENS_PER_UPDATE", 8)
    book = Sent(size=WIDE)
    book.open(1, *range(20))
    book.step(20, 20)
    offered = []
    while updates := book.send():
        offered.append(updates[0][0].feature_offer)
        book.answer(catching_up(updates[0][0]))
    assert [each is not None for each in offered] == [False, False, True]


def test_an_offer_that_stays_unread_is_renewed_and_that_of_a_preempted_sequence_at_once():
    book = Sent(size=WIDE)
    book.open(1, *range(20))
    book.answer(held(*book.send()))

    def offered(number):
        book.step(20 + number, 20 + number)
        ((update, _),) = book.send()
        book.answer(answer_to(update))
        return update.feature_offer

    first = offered(0)
    book.clock.advance(RENEW_SECONDS * 0.9)
    assert offered(1) == first
    book.clock.advance(RENEW_SECONDS * 0.1)
    second = offered(2)
    assert second not in (None, first)
    assert offered(3) == second
    book.tables.clear()
    assert offered(4) not in (None, second)
    assert len(book.source.open) == 1


@pytest.mark.parametrize("end", ["close", "disconnect", "unknown_prefix"])
def test_an_offer_ends_with_its_sequence_at_the_node(end):
    book = Sent(size=WIDE)
    book.open(1, *range(20))
    book.step(20, 20)
    ((update, _),) = book.send()
    assert len(book.source.open) == 1
    if end == "close":
        book.close(1)
    elif end == "disconnect":
        book.disconnect()
    else:
        book.answer(unknown_prefix(update))
    assert book.source.open == []


def test_where_nothing_can_be_offered_all_goes_in_updates():
    book = Sent(size=WIDE, can_offer=False)
    book.open(1, *range(9))
    book.step(9, 9)
    ends = []
    for _ in range(3):
        (sent,) = book.send()
        ends.append(sent[1])
        book.answer(held(sent))
        book.step(9)
    assert ends == [(0, 4), (4, 8), (8, 9)]


# Limits


def test_a_message_carries_a_limited_number_of_bytes_of_features():
    book = Sent(size=WIDE)
    for sequence_id in range(9):
        book.open(sequence_id, *range(4))
        book.step(4, 4, sequence_id=sequence_id)
    sizes = []
    while updates := book.send():
        sizes.append(sum((end - start) * WIDE for _, (start, end) in updates))
        assert all(end > start for _, (start, end) in updates), "else its answer would be that there is nothing"
        book.answer(*map(held, updates))
    assert max(sizes) <= MAX_FEATURE_BYTES_PER_MESSAGE
    assert sum(sizes) == 9 * 4 * WIDE


# What a draft node may say


@pytest.mark.parametrize(("acked", "is_believed"), [(9, True), (10, False), (2**32 - 1, False)])
@pytest.mark.parametrize("size", [SIZE, WIDE])
def test_more_features_than_were_sent_or_offered_cannot_be_acknowledged(acked, is_believed, size):
    book = Sent(size=size)
    book.open(1, *range(9))
    book.step(9, 9)
    ((update, _),) = book.send()
    assert book.answer(answer_to(update, acked_features=acked)) is is_believed


def test_a_node_that_needs_none_acknowledges_none():
    book = Book()
    book.open(1, *range(10))
    (update,) = book.take()
    assert not book.answer(answer_to(update, acked_features=1))


def test_an_update_is_answered_when_its_features_are():
    """A node may answer the first update while another one, with the same tokens and with features, is in transit."""
    book = Sent()
    book.open(1, *range(9))
    book.step(0, 9)
    ((first, _),) = book.send()
    book.answer(catching_up(first))
    book.step(9)
    ((second, features),) = book.send()
    assert features == (0, 9)
    book.answer(answer_to(first))
    assert book.send() == [], "one unanswered update"
    book.answer(answer_to(second, 5, acked_features=9))
    assert book.found() == (5,)
    book.step(9, 5)
    assert len(book.send()) == 1
