"""The draft stream's bookkeeping, without IO and on a clock that stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node import draft_book
from decode_node.draft_book import DraftBook, DraftWant
from decode_node.draft_targets import MAX_UNASKED_IN_A_ROW
from decode_node.drafted_sequence import DraftedSequence
from outrider.request import SamplingParams
from outrider.speculation import prefix_hash as prefix_hash_module
from outrider.speculation.draft_stream import (
    MAX_AHEAD_BRANCHES,
    MAX_BRANCHES_PER_SEQUENCE,
    DraftStatus,
    SequenceProposals,
    SequenceStart,
    SequenceUpdate,
)
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import prefix_hash
from outrider.speculation.token_distribution import TokenDistribution


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_book(num_targets: int, *, vocab_size: int = 10, clock: Clock) -> DraftBook:
    book = DraftBook(vocab_size=vocab_size, clock=clock)
    assert [book.add_target() for _ in range(num_targets)] == list(range(num_targets))
    return book


@pytest.fixture
def book(clock) -> DraftBook:
    book = make_book(1, vocab_size=1000, clock=clock)
    book.connected(0)
    return book


def start_of(*prompt) -> tuple[SequenceStart, tuple[int, ...]]:
    params = SamplingParams(seed=1, max_tokens=100)
    return SequenceStart(params=params, sample=0, prompt_length=len(prompt)), prompt


def tokens(found) -> dict[int, tuple[int, ...]]:
    return {sequence_id: tree.token_ids for sequence_id, tree in found.items()}


def catching_up(update, num_computed) -> SequenceProposals:
    return SequenceProposals(
        sequence_id=update.sequence_id,
        status=DraftStatus.CATCHING_UP,
        acked_length=update.length,
        num_computed=num_computed,
    )


def answer_to(update, *proposed, **changes) -> SequenceProposals:
    branches = (DraftTree(update.length, update.prefix_hash, proposed),) if proposed else ()
    values = {
        "sequence_id": update.sequence_id,
        "status": DraftStatus.PROPOSED if branches or "branches" in changes else DraftStatus.NOTHING,
        "acked_length": update.length,
        "branches": branches,
        **changes,
    }
    return SequenceProposals(**values)


def test_the_first_update_carries_the_start_and_later_ones_only_what_was_not_acknowledged(book):
    book.open(1, *start_of(5, 6), num_wanted=3)
    (first,) = book.take_updates(0)
    assert first.start is not None
    assert first.start.prompt_length == 2
    assert (first.start_length, first.token_ids, first.length) == (0, (5, 6), 2)
    assert first.prefix_hash == prefix_hash([5, 6])
    book.take_proposals(0, [answer_to(first, 7)])
    book.update(1, [7, 8], num_wanted=3)
    (second,) = book.take_updates(0)
    assert second.start is None
    assert (second.start_length, second.token_ids, second.length) == (2, (7, 8), 4)


def test_states_that_pass_while_an_update_is_unanswered_become_one_update(book):
    book.open(1, *start_of(5), num_wanted=3)
    (first,) = book.take_updates(0)
    for token_id in range(100):
        book.update(1, [token_id], num_wanted=3)
        assert book.take_updates(0) == []
    book.take_proposals(0, [answer_to(first)])
    (newest,) = book.take_updates(0)
    assert newest.length == 101


def test_a_slow_sequence_does_not_hold_the_others_back(book):
    book.open(1, *start_of(5), num_wanted=3)
    book.open(2, *start_of(6), num_wanted=3)
    _, second = book.take_updates(0)
    book.take_proposals(0, [answer_to(second)])
    book.update(1, [7], num_wanted=3)
    book.update(2, [7], num_wanted=3)
    assert [update.sequence_id for update in book.take_updates(0)] == [2]


def test_need_sync_resends_from_the_start_in_pieces(book, monkeypatch):
    monkeypatch.setattr(draft_book, "MAX_TOKENS_PER_UPDATE", 3)
    book.open(1, *start_of(1, 2, 3, 4, 5, 6, 7), num_wanted=3)
    lengths = []
    for _ in range(4):
        for update in book.take_updates(0):
            lengths.append((update.start_length, update.length, update.num_wanted))
            assert update.prefix_hash == prefix_hash(range(1, update.length + 1))
            book.take_proposals(0, [answer_to(update)])
    assert lengths == [(0, 3, 0), (3, 6, 0), (6, 7, 3)]
    book.update(1, [8], num_wanted=3)
    (update,) = book.take_updates(0)
    book.take_proposals(0, [answer_to(update, status=DraftStatus.UNKNOWN_PREFIX)])
    (update,) = book.take_updates(0)
    assert (update.start_length, update.length) == (0, 3)
    assert update.start is not None


def test_a_second_need_sync_within_a_second_is_put_off(book, clock):
    book.open(1, *start_of(1, 2), num_wanted=3)
    for _ in range(2):
        (update,) = book.take_updates(0)
        book.take_proposals(0, [answer_to(update, status=DraftStatus.UNKNOWN_PREFIX)])
    assert book.take_updates(0) == []
    clock.now += 1.1
    assert len(book.take_updates(0)) == 1


def test_a_node_without_room_is_asked_again_after_a_second(book, clock):
    book.open(1, *start_of(1, 2), num_wanted=3)
    (update,) = book.take_updates(0)
    book.take_proposals(0, [answer_to(update, status=DraftStatus.NO_ROOM, acked_length=0)])
    assert book.take_updates(0) == []
    clock.now += 1.1
    assert len(book.take_updates(0)) == 1


def test_a_message_has_a_budget_of_tokens(book, monkeypatch):
    monkeypatch.setattr(draft_book, "MAX_TOKENS_PER_MESSAGE", 5)
    for sequence_id in range(3):
        book.open(sequence_id, *start_of(1, 2, 3), num_wanted=1)
    assert sum(len(update.token_ids) for update in book.take_updates(0)) == 5
    assert book.has_unsent
    assert sum(len(update.token_ids) for update in book.take_updates(0)) == 3


def test_a_want_tells_what_no_update_has_told(book):
    book.open(1, *start_of(1, 2), num_wanted=0)
    (update,) = book.take_updates(0)
    book.take_proposals(0, [answer_to(update)])
    found, missing = book.find([DraftWant(1, [1, 2, 3], 4)], wait_seconds=0.002)
    assert (found, len(missing)) == ({}, 1)
    (update,) = book.take_updates(0)
    assert (update.length, update.num_wanted) == (3, 4)


def test_a_sequence_whose_node_had_nothing_is_not_waited_for(book):
    book.open(1, *start_of(1, 2), num_wanted=3)
    (update,) = book.take_updates(0)
    assert len(book.find([DraftWant(1, [1, 2], 3)], wait_seconds=0.002)[1]) == 1
    book.take_proposals(0, [answer_to(update)])
    assert book.find([DraftWant(1, [1, 2], 3)], wait_seconds=0.002)[1] == []


def miss(book: DraftBook, *sequence_ids: int) -> None:
    wants = [DraftWant(sequence_id, (), 3) for sequence_id in sequence_ids]
    found, missing = book.find(wants, wait_seconds=0.002)
    book.judge(wants, found, unanswered=missing)


def test_the_breaker_opens_after_five_misses_in_a_row(book):
    book.open(1, *start_of(1), num_wanted=3)
    book.take_updates(0)
    for _ in range(4):
        miss(book, 1)
    assert not book.is_breaker_open(0)
    miss(book, 1)
    assert book.is_breaker_open(0)
    assert book.find([DraftWant(1, [1], 3)], wait_seconds=0.002)[1] == []


def test_one_sequence_that_finds_something_is_enough_for_the_whole_node(book):
    for sequence_id in (1, 2):
        book.open(sequence_id, *start_of(sequence_id), num_wanted=3)
    first, _ = book.take_updates(0)
    book.take_proposals(0, [answer_to(first, 4, 5)])
    for _ in range(20):
        miss(book, 1, 2)
    assert not book.is_breaker_open(0)


def test_an_open_breaker_lets_one_message_a_second_through_and_closes_on_a_quick_answer(book, clock):
    book.open(1, *start_of(1), num_wanted=3)
    (unanswered,) = book.take_updates(0)
    for _ in range(5):
        miss(book, 1)
    book.open(2, *start_of(2), num_wanted=3)
    assert book.take_updates(0) == []
    clock.now += 1.1
    (probe,) = book.take_updates(0)
    book.open(3, *start_of(3), num_wanted=3)
    assert book.take_updates(0) == []
    clock.now += 0.5
    book.take_proposals(0, [answer_to(probe)])
    assert book.is_breaker_open(0)  # too late to be of use
    clock.now += 0.6
    (probe,) = book.take_updates(0)
    book.take_proposals(0, [answer_to(probe)])
    assert not book.is_breaker_open(0)
    book.take_proposals(0, [answer_to(unanswered, 5)])
    assert tokens(book.find([DraftWant(1, [1], 3)], wait_seconds=0.002)[0]) == {1: (5,)}


def test_a_step_that_did_not_wait_is_a_miss_only_when_the_answer_is_long_overdue(book, clock):
    book.open(1, *start_of(1), num_wanted=3)
    book.take_updates(0)
    for _ in range(10):
        book.judge([DraftWant(1, (), 3)], {}, unanswered=())
    assert not book.is_breaker_open(0)
    for _ in range(4):
        clock.now += 0.1
        for _ in range(3):  # steps in quick succession are one miss
            book.judge([DraftWant(1, (), 3)], {}, unanswered=())
    assert not book.is_breaker_open(0)
    clock.now += 0.1
    book.judge([DraftWant(1, (), 3)], {}, unanswered=())
    assert book.is_breaker_open(0)


def test_sequences_are_spread_over_the_connected_targets(clock):
    book = make_book(3, clock=clock)
    book.connected(0)
    book.connected(2)
    for sequence_id in range(4):
        book.open(sequence_id, *start_of(1), num_wanted=1)
    assert [book.num_sequences(target) for target in range(3)] == [2, 0, 2]
    book.disconnected(0)
    assert [book.num_sequences(target) for target in range(3)] == [0, 0, 4]
    assert all(update.start is not None for update in book.take_updates(2))


def test_targets_come_and_go_and_numbers_are_never_used_twice(clock):
    book = make_book(1, clock=clock)
    book.connected(0)
    book.open(1, *start_of(1), num_wanted=1)
    added = book.add_target()
    book.connected(added)
    book.open(2, *start_of(1), num_wanted=1)
    assert (book.num_sequences(0), book.num_sequences(added)) == (1, 1)
    book.remove_target(0)
    assert book.num_sequences(added) == 2
    assert book.add_target() == 2
    book.remove_target(added)
    book.open(3, *start_of(1), num_wanted=1)
    book.connected(2)
    assert book.num_sequences(2) == 3
    assert all(update.start is not None for update in book.take_updates(2))


def test_the_rank_decides_between_targets_with_equally_many_sequences(clock):
    book = DraftBook(vocab_size=10, clock=clock)
    for rank in (5, 1, 3):
        book.connected(book.add_target(rank=rank))
    for sequence_id in range(4):
        book.open(sequence_id, *start_of(1), num_wanted=1)
    assert [book.num_sequences(target) for target in range(3)] == [1, 2, 1]


def test_openings_of_breakers_that_are_gone_still_count(book, clock):
    book.open(1, *start_of(1), num_wanted=1)
    book.take_updates(0)
    for _ in range(5):
        miss(book, 1)
    assert book.counters().num_breaker_openings == 1
    book.remove_target(0)
    assert book.counters().num_breaker_openings == 1


def test_a_target_whose_breaker_opens_keeps_one_sequence_and_gives_the_others_away(clock):
    book = make_book(2, clock=clock)
    book.connected(0)
    book.connected(1)
    for sequence_id in range(6):
        book.open(sequence_id, *start_of(1), num_wanted=1)
    for update in book.take_updates(1):
        book.take_proposals(1, [answer_to(update)])
    book.take_updates(0)
    for _ in range(5):
        miss(book, *range(6))
    assert [book.num_sequences(target) for target in range(2)] == [1, 5]


def test_a_quarantined_sequence_is_offered_to_another_target(clock):
    book = make_book(2, clock=clock)
    book.connected(0)
    book.open(1, *start_of(1), num_wanted=1)
    (update,) = book.take_updates(0)
    book.connected(1)
    book.take_proposals(0, [answer_to(update, 10)])
    assert book.counters().num_quarantined == 1
    assert [book.num_sequences(target) for target in range(2)] == [0, 1]
    assert [update.closed for update in book.take_updates(0)] == [True]
    (update,) = book.take_updates(1)
    book.take_proposals(1, [answer_to(update, 9)])
    assert tokens(book.find([DraftWant(1, [1], 1)], wait_seconds=0.0)[0]) == {1: (9,)}


def moved_away(clock, *sequence_ids, num_wanted) -> tuple[DraftBook, list[SequenceUpdate]]:
    """Sequences that were asked of target 0, which has opened its breaker, and are served by target 1."""
    book = make_book(2, clock=clock)
    book.connected(0)
    for sequence_id in (0, *sequence_ids):
        book.open(sequence_id, *start_of(1), num_wanted=num_wanted)
    updates = book.take_updates(0)
    book.connected(1)
    for _ in range(5):
        miss(book, 0, *sequence_ids)
    assert [book.num_sequences(target) for target in range(2)] == [1, len(sequence_ids)]
    return book, updates


def test_what_a_node_was_asked_before_a_sequence_moved_and_came_back_is_no_lie(clock):
    book, (_, old) = moved_away(clock, 1, num_wanted=8)
    book.disconnected(1)
    clock.now += 1.1  # a probe is due
    book.find([DraftWant(1, (1,), 1)], wait_seconds=0.0)
    book.update(1, [2], num_wanted=1)
    assert any(update.sequence_id == 1 and update.num_wanted == 1 for update in book.take_updates(0))
    book.take_proposals(0, [answer_to(old, 2, *range(9), 3, 4, 5, 6, 7, 8)])  # 16 tokens, as one that wants 8 gets
    assert book.counters().num_quarantined == 0
    assert tokens(book.find([DraftWant(1, (1, 2), 1)], wait_seconds=0.0)[0]) == {1: (0,)}


def test_answers_that_were_under_way_when_their_sequences_moved_are_no_flood(clock):
    book, (_, *old) = moved_away(clock, *range(1, MAX_UNASKED_IN_A_ROW + 10), num_wanted=3)
    book.take_proposals(0, [answer_to(update) for update in old])
    assert not book.is_flooding(0)
    assert book.counters().num_stale_answers == len(old)
    book.take_proposals(0, [answer_to(update) for update in old] * (MAX_AHEAD_BRANCHES + 1))
    assert book.is_flooding(0)


@pytest.mark.parametrize(
    "distributions",
    [
        (TokenDistribution((9, 8), (0.5, 0.5)),),  # one for two tokens
        (TokenDistribution((9, 8), (0.5, 0.5)), TokenDistribution((9, 8), (0.5, 0.5))),  # the second lacks token 7
    ],
    ids=["too few", "another token"],
)
def test_a_draft_that_was_not_drawn_from_what_it_comes_with_is_not_believed(book, distributions):
    book.open(1, *start_of(1), num_wanted=2)
    (update,) = book.take_updates(0)
    tree = DraftTree(update.length, update.prefix_hash, (9, 7), distributions=distributions)
    book.take_proposals(0, [answer_to(update, branches=(tree,))])
    assert book.counters().num_quarantined == 1
    assert tokens(book.find([DraftWant(1, [1], 2)], wait_seconds=0.0)[0]) == {}


def test_a_stream_that_leaves_an_update_unanswered_for_very_long_is_stuck(book, clock):
    book.open(1, *start_of(1), num_wanted=1)
    book.take_updates(0)
    assert not book.is_stuck(0)
    clock.now += 11.0
    assert book.is_stuck(0)


def test_sequences_that_opened_before_any_node_was_there_are_served_once_one_is(clock):
    book = make_book(1, clock=clock)
    book.open(1, *start_of(1), num_wanted=1)
    assert book.take_updates(0) == []
    book.connected(0)
    assert len(book.take_updates(0)) == 1


def test_a_sequence_that_wants_no_drafts_is_told_of_now_and_then_only(book):
    book.open(1, *start_of(5), num_wanted=3)
    lengths = []
    for _ in range(80):
        for update in book.take_updates(0):
            lengths.append(update.length)
            book.take_proposals(0, [answer_to(update)])
        book.update(1, [7], num_wanted=0)
    assert lengths == [1, 2, 34, 66]
    book.update(1, [7], num_wanted=2)
    assert [update.num_wanted for update in book.take_updates(0)] == [2]


def test_a_node_whose_answers_take_longer_than_the_budget_is_not_waited_for_until_they_are_quick_again(book, clock):
    text = [5]
    book.open(1, *start_of(5), num_wanted=3)

    def is_waited_for(answer_seconds: float) -> bool:
        waits = bool(book.find([DraftWant(1, text, 3)], wait_seconds=0.002)[1])
        (update,) = book.take_updates(0)
        clock.now += answer_seconds
        book.take_proposals(0, [answer_to(update, 900)])
        text.append(7)
        book.update(1, [7], num_wanted=3)
        return waits

    assert is_waited_for(0.030)
    assert not any(is_waited_for(0.030) for _ in range(5))
    assert [is_waited_for(0.001) for _ in range(20)][-1]
    assert not book.is_breaker_open(0)


def test_a_late_answer_of_a_node_that_a_sequence_has_come_back_to_is_stale_and_no_lie(clock):
    book = make_book(2, vocab_size=1000, clock=clock)
    book.connected(0)
    book.open(1, *start_of(5), num_wanted=3)
    book.open(2, *start_of(5), num_wanted=3)
    _, asked = book.take_updates(0)
    book.connected(1)
    for _ in range(5):
        miss(book, 1, 2)
    assert book.num_sequences(1) == 1
    book.disconnected(1)
    assert book.num_sequences(0) == 2
    book.take_proposals(0, [answer_to(asked, 7)])
    assert (book.counters().num_quarantined, book.counters().num_stale_answers) == (0, 1)
    assert book.num_sequences(0) == 2


def test_while_its_node_catches_up_a_sequence_is_told_of_and_not_put_off(book):
    """The second answer to the prompt crosses the update that follows on it."""
    book.open(1, *start_of(*range(600)), num_wanted=3)
    (prompt,) = book.take_updates(0)
    book.take_proposals(0, [catching_up(prompt, 300)])
    book.update(1, [7], num_wanted=3)
    (first,) = book.take_updates(0)
    book.take_proposals(0, [catching_up(prompt, 500)])
    assert book.find([DraftWant(1, [*range(600), 7], 3)], wait_seconds=0.002) == ({}, [])  # it would not come in time
    book.take_proposals(0, [answer_to(first, 8, 9)])
    book.update(1, [8], num_wanted=3)
    assert [update.length for update in book.take_updates(0)] == [602]
    assert tokens(book.find([DraftWant(1, [*range(600), 7, 8], 3)], wait_seconds=0.0)[0]) == {1: (9,)}


def test_an_answer_that_there_is_nothing_to_an_older_state_leaves_the_newer_one_asked(book):
    book.open(1, *start_of(*range(600)), num_wanted=3)
    (prompt,) = book.take_updates(0)
    book.take_proposals(0, [catching_up(prompt, 300)])
    book.update(1, [7], num_wanted=3)
    (newer,) = book.take_updates(0)
    book.take_proposals(0, [answer_to(prompt)])
    book.take_proposals(0, [answer_to(newer, 8)])
    assert tokens(book.find([DraftWant(1, [*range(600), 7], 3)], wait_seconds=0.0)[0]) == {1: (8,)}


def test_an_old_prefix_is_refused_before_it_is_hashed(book, monkeypatch):
    book.open(1, *start_of(*range(900)), num_wanted=3)
    (update,) = book.take_updates(0)
    old = DraftTree(100, prefix_hash(range(100)), (100, 101))

    def hash_again(*_):
        raise AssertionError("hashed under the lock")

    monkeypatch.setattr(prefix_hash_module, "prefix_hash", hash_again)
    book.take_proposals(0, [answer_to(update, branches=(old,) * 8)])
    assert book.find([DraftWant(1, range(900), 3)], wait_seconds=0.0)[0] == {}


def test_an_answer_that_nobody_asked_for_is_stale(book):
    book.open(1, *start_of(5), num_wanted=3)
    (update,) = book.take_updates(0)
    book.take_proposals(0, [answer_to(update)])
    for _ in range(3):
        book.take_proposals(0, [answer_to(update, 7)])
    assert book.counters().num_stale_answers == 3
    assert book.find([DraftWant(1, [5], 3)], wait_seconds=0.0)[0] == {}


def test_a_node_that_floods_the_stream_with_unasked_answers_is_to_be_left(book):
    book.open(1, *start_of(5), num_wanted=3)
    (update,) = book.take_updates(0)
    book.take_proposals(0, [answer_to(update)] * MAX_UNASKED_IN_A_ROW)
    assert not book.is_flooding(0)
    book.take_proposals(0, [answer_to(update)] * 2)
    assert book.is_flooding(0)
    book.update(1, [6], num_wanted=3)
    (update,) = book.take_updates(0)
    book.take_proposals(0, [answer_to(update)])
    assert not book.is_flooding(0)


def test_what_is_late_is_a_share_of_a_step(book, clock):
    for _ in range(50):
        book.observe_step(0.1)
    book.open(1, *start_of(1), num_wanted=3)
    book.take_updates(0)
    for _ in range(10):
        clock.now += 0.06
        book.judge([DraftWant(1, (), 3)], {}, unanswered=())
    assert not book.is_breaker_open(0)
    for _ in range(5):
        miss(book, 1)
    assert book.is_breaker_open(0)
    book.open(2, *start_of(2), num_wanted=3)
    clock.now += 1.1
    (probe,) = book.take_updates(0)
    clock.now += 0.15
    book.take_proposals(0, [answer_to(probe)])
    assert not book.is_breaker_open(0)


def ahead_of(update, *assumed_and_proposed, probability=0.5, **changes) -> SequenceProposals:
    """Each (assumed tokens, proposed tokens) after the update's own tokens."""
    branches = tuple(
        DraftTree(
            update.length + len(assumed),
            prefix_hash([*update.token_ids, *assumed]),
            tuple(proposed),
            probability=probability,
        )
        for assumed, proposed in assumed_and_proposed
    )
    return answer_to(update, **{"branches": branches, "status": DraftStatus.AHEAD, **changes})


def opened(book) -> SequenceUpdate:
    """The text is 5 6; the draft 7 8 has been answered."""
    book.open(1, *start_of(5, 6), num_wanted=2)
    (update,) = book.take_updates(0)
    book.take_proposals(0, [answer_to(update, 7, 8)])
    return update


def found(book, *text) -> tuple[int, ...]:
    return tokens(book.find([DraftWant(1, text, 2)], wait_seconds=0.0)[0]).get(1, ())


def test_a_branch_ahead_is_found_when_its_assumption_was_committed(book, clock):
    update = opened(book)
    book.take_proposals(0, [ahead_of(update, ((7, 8, 9), (1, 2)), ((7, 3), (4, 4)))])
    clock.now += 0.01
    assert found(book, 5, 6, 7, 8, 9) == (1, 2)
    assert book.counters().lead_seconds == pytest.approx(0.01)
    assert (book.counters().num_ahead_branches, book.counters().num_stale_answers) == (2, 0)


def test_a_branch_ahead_of_the_last_state_still_counts_when_it_crosses_the_next_update(book):
    update = opened(book)
    book.update(1, [7, 3], num_wanted=2)
    (newer,) = book.take_updates(0)
    book.take_proposals(0, [ahead_of(update, ((7, 3), (4, 4)))])
    assert found(book, 5, 6, 7, 3) == (4, 4)
    book.take_proposals(0, [answer_to(newer, 1)])
    assert book.counters().num_stale_answers == 0


def test_an_assumption_that_did_not_come_true_is_no_lie(book):
    update = opened(book)
    book.update(1, [7, 3], num_wanted=2)
    book.take_proposals(0, [ahead_of(update, ((7, 8), (9, 9)))])
    assert (book.counters().num_quarantined, book.num_sequences(0)) == (0, 1)
    assert found(book, 5, 6, 7, 3) == ()


@pytest.mark.parametrize(
    "lie",
    [
        {"branches": (DraftTree(2, 12345, (7,)),)},  # of a prefix that was committed when it was made
        {"branches": (DraftTree(2 + 65, 0, (7,)),)},  # further ahead than anybody drafts
        {"branches": (DraftTree(4, 0, (1000,)),)},  # no such id
        {"branches": (DraftTree(4, 0, (1,) * 11),)},  # longer than anybody asked for
        {"branches": (DraftTree(4, 0, (1,)),) * (MAX_BRANCHES_PER_SEQUENCE + 1)},
        {"acked_length": 3},  # of what it was never sent
    ],
)
def test_what_no_honest_node_could_say_ahead_costs_it_the_sequence(book, lie):
    update = opened(book)
    book.take_proposals(0, [ahead_of(update, ((9,), (1,)), **lie)])
    assert book.counters().num_quarantined == 1


def test_what_exceeds_the_allowance_is_stale_and_counts_as_flooding(book):
    update = opened(book)
    for _ in range(MAX_AHEAD_BRANCHES // 4):
        book.take_proposals(0, [ahead_of(update, *(((9, index), (1,)) for index in range(4)))])
    assert (book.counters().num_ahead_branches, book.counters().num_stale_answers) == (MAX_AHEAD_BRANCHES, 0)
    book.take_proposals(0, [ahead_of(update, ((7, 8, 9), (1, 2)))] * (MAX_UNASKED_IN_A_ROW + 1))
    assert book.counters().num_ahead_branches == MAX_AHEAD_BRANCHES
    assert book.is_flooding(0)
    assert found(book, 5, 6, 7, 8, 9) == ()


def test_branches_ahead_of_a_sequence_that_is_not_there_or_without_any_branch_are_stale(book):
    update = opened(book)
    book.take_proposals(0, [ahead_of(update), ahead_of(update, ((9,), (1,)), sequence_id=77)])
    assert book.counters().num_stale_answers == 2
    book.close(1)
    book.take_proposals(0, [ahead_of(update, ((9,), (1,)))])
    assert book.counters().num_stale_answers == 3


def test_the_newest_step_time_is_told(book):
    assert book.step_seconds == 0.0
    book.observe_step(0.004)
    assert book.step_seconds == pytest.approx(0.004)


@given(data=st.data())
def test_whatever_order_messages_come_in_a_draft_continues_what_was_committed(data):
    """Lost, repeated, late and reordered answers: no draft of another text, and nobody is accused."""
    clock = Clock()
    book = make_book(1, vocab_size=1000, clock=clock)
    book.connected(0)
    book.open(1, *start_of(5, 6), num_wanted=2)
    text, sent, under_way = [5, 6], [], []
    for _ in range(data.draw(st.integers(1, 12))):
        sent += book.take_updates(0)
        if sent:
            state = data.draw(st.sampled_from(sent[-3:]))
            prefix = text[: state.length]
            whole = state._replace(token_ids=tuple(prefix))
            assumed = data.draw(st.lists(st.integers(7, 8), min_size=1, max_size=3))
            under_way += [ahead_of(whole, (assumed, (*assumed, 9)))]
            if state is sent[-1]:
                under_way += [answer_to(whole, 7, 8)]
        for _ in range(data.draw(st.integers(0, 2))):
            if under_way:
                book.take_proposals(0, [data.draw(st.sampled_from(under_way))])
        new = data.draw(st.lists(st.integers(7, 8), max_size=2))
        text += new
        book.update(1, new, num_wanted=2)
        proposed = found(book, *text)
        assert not proposed or set(proposed) <= {7, 8, 9}
    assert book.counters().num_quarantined == 0


def test_a_wake_looks_only_at_sequences_with_news(book, monkeypatch):
    for sequence_id in range(3):
        book.open(sequence_id, *start_of(1, 2), num_wanted=1)
    book.take_proposals(0, [answer_to(update, 9) for update in book.take_updates(0)])
    looked_at = []
    stage = DraftedSequence.stage
    monkeypatch.setattr(
        DraftedSequence, "stage", lambda self, now: (looked_at.append(self.sequence_id), stage(self, now))[1]
    )
    assert book.take_updates(0) == []
    book.update(1, [9], num_wanted=1)
    assert [update.sequence_id for update in book.take_updates(0)] == [1]
    book.update(1, [9], num_wanted=1)  # while the last is unanswered: told of when that is answered
    assert [book.take_updates(0), book.take_updates(0)] == [[], []]
    assert looked_at == [1, 1]


@pytest.mark.parametrize(
    ("takes_trees", "parents", "is_kept"),
    [(True, (-1, -1, 0), True), (False, (-1, -1, 0), False), (True, (-1, 1, 0), False), (True, (-1, -1), False)],
    ids=["a tree", "not asked for", "no tree", "too short"],
)
def test_branches_that_are_trees(book, takes_trees, parents, is_kept):
    start, prompt = start_of(5)
    book.open(1, replace(start, takes_trees=takes_trees), prompt, num_wanted=3)
    (update,) = book.take_updates(0)
    tree = DraftTree(1, update.prefix_hash, (7, 8, 9), parents=parents)
    book.take_proposals(0, [answer_to(update, branches=(tree,))])
    found, _ = book.find([DraftWant(1, prompt, 3)], wait_seconds=0.0)
    assert tokens(found) == ({1: (7, 8, 9)} if is_kept else {})
    assert book.counters().num_quarantined == (not is_kept)
    if is_kept:
        found, _ = book.find([DraftWant(1, (5, 7), 3)], wait_seconds=0.0)
        assert tokens(found) == {1: (9,)}
