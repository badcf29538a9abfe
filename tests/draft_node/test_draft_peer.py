"""The queues of updates from, and answers to, a decode node that reads slowly."""

from __future__ import annotations

import pytest

from draft_node.draft_peer import AHEAD_SECONDS, MAX_WAITING_FEATURE_BYTES, MAX_WAITING_TOKENS, DraftPeer
from outrider.speculation.draft_stream import (
    MAX_ANSWERS_PER_MESSAGE,
    MAX_BRANCHES_PER_SEQUENCE,
    DraftStatus,
    SequenceProposals,
    SequenceUpdate,
    StepNotice,
)
from outrider.speculation.draft_tree import DraftTree
from tests.support.draft_messages import hello_of


@pytest.fixture
def peer() -> DraftPeer:
    return DraftPeer(0, hello_of(), lambda: None)


def answer(status: DraftStatus, *trees: DraftTree, sequence_id=1, length=5) -> SequenceProposals:
    return SequenceProposals(sequence_id=sequence_id, status=status, acked_length=length, branches=trees)


def branch(prefix_hash: int, *token_ids: int, probability=0.5) -> DraftTree:
    return DraftTree(7, prefix_hash, token_ids or (1,), probability=probability)


def test_branches_ahead_join_those_that_wait_and_go_out_after_the_answer(peer):
    peer.answer([answer(DraftStatus.PROPOSED, branch(0))])
    peer.answer([answer(DraftStatus.AHEAD, branch(1, 1), branch(2, 1))])
    peer.answer([answer(DraftStatus.AHEAD, branch(1, 1, 2))])
    first, second = peer.take_answers()
    assert (first.status, second.status) == (DraftStatus.PROPOSED, DraftStatus.AHEAD)
    assert {tree.prefix_hash: tree.token_ids for tree in second.branches} == {1: (1, 2), 2: (1,)}
    assert peer.take_answers() == []


def test_a_newer_answer_voids_what_waits_of_older_states(peer):
    peer.answer([answer(DraftStatus.PROPOSED, branch(0))])
    peer.answer([answer(DraftStatus.AHEAD, branch(1))])
    peer.answer([answer(DraftStatus.PROPOSED, branch(3), length=6)])
    (only,) = peer.take_answers()
    assert only.acked_length == 6


def test_the_least_likely_of_too_many_branches_is_left_out(peer):
    for index in range(MAX_BRANCHES_PER_SEQUENCE + 2):
        peer.answer([answer(DraftStatus.AHEAD, branch(index, probability=0.5 + 0.01 * index))])
    (sent,) = peer.take_answers()
    assert {tree.prefix_hash for tree in sent.branches} == set(range(2, MAX_BRANCHES_PER_SEQUENCE + 2))


def test_a_message_carries_no_more_than_a_peer_may_read(peer):
    for sequence_id in range(MAX_ANSWERS_PER_MESSAGE):
        peer.answer([answer(DraftStatus.PROPOSED, branch(0), sequence_id=sequence_id)])
        peer.answer([answer(DraftStatus.AHEAD, branch(1), sequence_id=sequence_id)])
    sizes = []
    while sent := peer.take_answers():
        sizes.append(len(sent))
    assert sum(sizes) == 2 * MAX_ANSWERS_PER_MESSAGE
    assert max(sizes) <= MAX_ANSWERS_PER_MESSAGE


@pytest.mark.parametrize(
    "content",
    [{"token_ids": (1,) * (MAX_WAITING_TOKENS // 4)}, {"features": bytes(MAX_WAITING_FEATURE_BYTES // 4)}],
    ids=["tokens", "features"],
)
def test_a_stream_is_not_read_while_much_waits_and_then_again(content):
    notified = []
    peer = DraftPeer(0, hello_of(), lambda: notified.append(peer.has_room))
    for sequence_id in (0, 0, 1, 2, 3):  # a replaced update no longer counts
        assert peer.has_room
        peer.submit([SequenceUpdate(sequence_id, **content)], look_ahead_deadline=0.0)
    assert not peer.has_room
    taken = [received.update.sequence_id for received in peer.take_updates()]
    assert notified == [True]
    while peer.has_updates:
        taken += [received.update.sequence_id for received in peer.take_updates()]
    assert taken == [0, 1, 2, 3]


def test_branches_are_collected_for_a_while_and_answers_are_not():
    calls = []
    peer = DraftPeer(0, hello_of(), lambda: calls.append(len(calls)))
    peer.answer([answer(DraftStatus.AHEAD, branch(0))], now=1.0)
    peer.answer([answer(DraftStatus.AHEAD, branch(1))], now=1.001)
    assert len(calls) == 1
    peer.answer([answer(DraftStatus.AHEAD, branch(2))], now=1.0 + AHEAD_SECONDS)
    peer.answer([answer(DraftStatus.PROPOSED, branch(0))], now=1.001 + AHEAD_SECONDS)
    assert len(calls) == 3
    peer.answer([answer(DraftStatus.AHEAD, branch(1))], now=1.002 + AHEAD_SECONDS)
    assert len(calls) == 3
    peer.flush(1.003 + AHEAD_SECONDS)
    assert len(calls) == 3, "it is too early"
    peer.flush(1.004 + AHEAD_SECONDS, at_once=True)
    assert len(calls) == 4
    peer.answer([answer(DraftStatus.AHEAD, branch(1))], now=1.005 + AHEAD_SECONDS)
    peer.flush(2.0)
    assert len(calls) == 5
    peer.flush(3.0, at_once=True)
    assert len(calls) == 5, "the stream knows of all answers"


def test_a_notice_waits_behind_its_update_and_only_the_newest_is_kept():
    peer = DraftPeer(0, hello_of(), lambda: None)
    peer.submit([StepNotice(1, 4, (9,))], look_ahead_deadline=0.0)
    peer.submit([SequenceUpdate(1, start_length=4, token_ids=(5,), length=5)], look_ahead_deadline=0.0)
    peer.submit([StepNotice(1, 5, (6, 7))], look_ahead_deadline=0.0)
    assert [each.update for each in peer.take_updates()][1:] == [StepNotice(1, 5, (6, 7))]
    assert not peer.has_updates
