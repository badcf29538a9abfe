"""Reservations whose transfers fail, are late or are replaced. KV of two transfers is never mixed."""

from __future__ import annotations

import pytest

from decode_node.commands import TransferCompleted, TransferFailed
from outrider.kv_transfer.base import CommitState, Region, TransferStats
from outrider.session import (
    Granted,
    KvFailed,
    KvReady,
    Rejected,
    RejectReason,
    SampleStart,
    SampleTokens,
    SequenceGroupFailed,
)
from tests.support.in_memory_connector import InMemoryConnector

SHORT = (1, 2, 3)  # the node computes it
PROMPT = tuple(range(1, 30))  # seven blocks of four tokens, and one token: transferred
SECOND = b"2" * 16
THIRD = b"3" * 16


@pytest.fixture
def node(make_scripted_node):
    return make_scripted_node()


def put_one_frame(node, transfer_id, *, payload=bytes(4)):
    connector = InMemoryConnector({"decode:1": node.ingest.inbox})
    sender = connector.connect("decode:1", node.ingest.specs[transfer_id])
    sender.put(Region("k", range(1), range(1), range(1)), memoryview(payload))
    return sender


def test_a_failed_transfer_is_reported_once_and_another_one_fills_the_reservation(node):
    group_id = node.open(prompt=PROMPT)
    first = node.granted(group_id)
    put_one_frame(node, group_id[::-1], payload=b"junk")
    node.ingest.inbox.fail(group_id[::-1], "the stream broke")
    node.iterate()
    (failed,) = node.find(KvFailed, group_id)
    assert (failed.transfer_id, failed.message) == (group_id[::-1], "the KV transfer failed: the stream broke")
    node.loop.submit(TransferFailed(group_id[::-1], "late"))
    node.loop.submit(TransferCompleted(group_id[::-1], TransferStats(connector="", payload_bytes=0, seconds=0.0)))
    node.retarget(group_id, SECOND)
    second = node.granted(group_id)
    assert (second.transfer_id, second.kv_address) == (SECOND, first.kv_address)
    assert (second.held_prefix_length, second.num_tokens_to_compute) == (0, 1)
    node.push(group_id, PROMPT, transfer_id=SECOND)
    node.run()
    assert node.tokens(group_id) == node.model.generate(PROMPT, 5)
    assert [ready.transfer_id for ready in node.find(KvReady, group_id)] == [SECOND]
    assert node.num_rows == 5, "transferred KV is not computed again"
    assert len(node.find(KvFailed, group_id)) == 1
    assert not node.find(SequenceGroupFailed, group_id)
    node.assert_nothing_is_held()


def test_what_a_failed_transfer_has_brought_does_not_complete_the_next_one(node):
    group_id = node.open(prompt=PROMPT)
    node.granted(group_id)
    put_one_frame(node, group_id[::-1])
    node.ingest.inbox.fail(group_id[::-1], "the stream broke")
    node.retarget(group_id, SECOND)
    node.granted(group_id)
    sender = InMemoryConnector({"decode:1": node.ingest.inbox}).connect("decode:1", node.ingest.specs[SECOND])
    assert sender.commit().state is CommitState.INCOMPLETE
    assert not node.find(KvReady, group_id)


@pytest.mark.parametrize("before", ["no transfer", "a transfer under way", "a failed transfer"])
def test_without_a_prefill_node_the_node_computes_what_is_missing(node, before):
    transfer_id = b"" if before == "no transfer" else None
    group_id = node.open(prompt=PROMPT, sampling={"n": 2}, transfer_id=transfer_id)
    granted = node.granted(group_id)
    if before != "no transfer":
        put_one_frame(node, group_id[::-1], payload=b"junk")
        if before == "a failed transfer":
            node.ingest.inbox.fail(group_id[::-1], "the stream broke")
        node.retarget(group_id, b"")
        granted = node.granted(group_id)
    assert (granted.transfer_id, granted.kv_address, granted.num_tokens_to_compute) == (b"", "", len(PROMPT))
    node.run()
    assert [node.tokens(group_id, sample) for sample in range(2)] == [node.model.generate(PROMPT, 5)] * 2
    node.assert_nothing_is_held()


@pytest.mark.parametrize("cancelled", [None, (0,), (2,), (0, 2), ()], ids=str)
def test_what_all_samples_begin_with_is_computed_once(node, cancelled):
    group_id = node.open(prompt=PROMPT, sampling={"n": 3})
    node.granted(group_id)
    node.retarget(group_id, b"")
    node.loop._handle_commands(wait=False)
    assert node.engine.scheduler.num_running == 1
    assert node.groups.num_sequences_free == 16 - 3
    if cancelled is not None:
        node.cancel(group_id, *cancelled)
    node.run()
    for sample in range(3):
        is_cancelled = cancelled is not None and (not cancelled or sample in cancelled)
        assert node.tokens(group_id, sample) == ([] if is_cancelled else node.model.generate(PROMPT, 5))
    if cancelled is None:
        assert node.num_rows == len(PROMPT) - 1 + 3 * 5
    node.assert_nothing_is_held()


def test_the_others_go_on_when_the_first_sample_ends_with_its_first_token(node):
    whole = node.model.generate(PROMPT, 6)
    group_id = node.open(
        prompt=PROMPT,
        sampling={"n": 2, "max_tokens": 6},
        samples=(SampleStart(0, tuple(whole[:5])), SampleStart(1, tuple(whole[:3]))),
    )
    node.granted(group_id)
    node.retarget(group_id, b"")
    node.run()
    assert node.tokens(group_id, 0) == whole[5:]
    assert node.tokens(group_id, 1) == whole[3:]
    node.assert_nothing_is_held()


@pytest.mark.parametrize("transfer_id", [SECOND, b""])
def test_a_retarget_does_not_wait_for_a_write_that_does_not_end(node, transfer_id):
    """The group gets other blocks. Those with a write in progress are freed later."""
    group_id = node.open(prompt=PROMPT)
    node.granted(group_id)
    with node.writing(put_one_frame, node, group_id[::-1], payload=b"junk"):
        node.retarget(group_id, transfer_id)
        assert node.granted(group_id).transfer_id == transfer_id
        if transfer_id:
            node.ingest.gate.set()  # the old write ends while new ones run
            node.push(group_id, PROMPT, transfer_id=transfer_id)
        node.run()
        assert node.tokens(group_id) == node.model.generate(PROMPT, 5)
        assert not node.find(KvFailed, group_id)
        assert node.groups.num_groups == 0
    node.iterate()
    node.assert_nothing_is_held()


@pytest.mark.parametrize("then", ["another transfer", "computes itself", "cancel"])
def test_without_other_blocks_a_retarget_waits_until_nothing_is_written_any_more(node, then):
    group_id = node.open(prompt=PROMPT)
    node.granted(group_id)
    held = node.engine.pool.allocate(node.engine.pool.num_free_blocks - 3)
    with node.writing(put_one_frame, node, group_id[::-1]):
        node.retarget(group_id, b"" if then == "computes itself" else SECOND)
        node.iterate()
        assert len(node.find(Granted, group_id)) == 1
        assert not node.engine.scheduler.has_work
        if then == "cancel":
            node.cancel(group_id)
            node.iterate()
            assert node.engine.pool.num_free_blocks == 3
    node.iterate()
    node.engine.pool.release(held)
    if then == "another transfer":
        assert node.granted(group_id).transfer_id == SECOND
        node.push(group_id, PROMPT, transfer_id=SECOND)
    node.run()
    assert node.tokens(group_id) == ([] if then == "cancel" else node.model.generate(PROMPT, 5))
    node.assert_nothing_is_held()


@pytest.mark.parametrize("waits", [False, True])
def test_a_retarget_of_a_group_that_does_not_wait_is_ignored(node, waits):
    group_id = node.open() if not waits else bytes(16)
    node.iterate()
    node.retarget(group_id, SECOND)
    node.run()
    assert len(node.find(Granted, group_id)) == (0 if waits else 1)
    assert node.tokens(group_id) == ([] if waits else node.model.generate((1, 2, 3), 5))


def test_another_session_cannot_retarget(node):
    group_id = node.open(prompt=PROMPT, session=2)
    node.granted(group_id)
    node.retarget(group_id, SECOND)
    node.iterate()
    assert len(node.find(Granted, group_id)) == 1


def test_a_retarget_to_an_id_that_was_used_ends_the_group(node):
    group_id, other = node.open(prompt=PROMPT), node.open(prompt=PROMPT[::-1])
    node.granted(group_id)
    node.retarget(group_id, other[::-1])
    node.iterate()
    assert node.find(SequenceGroupFailed, group_id)[0].code == 13
    assert not node.find(SequenceGroupFailed, other)


def test_the_deadline_of_a_transfer_follows_its_frames(node):
    group_id = node.open(prompt=PROMPT)
    node.granted(group_id)
    node.clock.advance(node.transfer_timeout_seconds - 1.0)
    put_one_frame(node, group_id[::-1])
    node.clock.advance(node.transfer_timeout_seconds - 1.0)
    node.iterate()
    assert not node.find(KvFailed, group_id)
    node.clock.advance(1.0)
    node.iterate()
    (failed,) = node.find(KvFailed, group_id)
    assert "no KV arrived for 60 s" in failed.message


def test_the_deadline_of_a_transfer_follows_signs_of_progress_before_its_frames(node):
    group_id = node.open(prompt=PROMPT)
    node.granted(group_id)
    for _ in range(3):
        node.clock.advance(node.transfer_timeout_seconds - 1.0)
        node.ingest.inbox.note_progress(group_id[::-1])
        node.iterate()
        assert not node.find(KvFailed, group_id)
    node.clock.advance(node.transfer_timeout_seconds)
    node.iterate()
    assert node.find(KvFailed, group_id)


def test_a_reservation_that_nobody_fills_is_given_up(node):
    group_id = node.open(prompt=PROMPT)
    node.granted(group_id)
    node.clock.advance(node.transfer_timeout_seconds)
    later = node.open(prompt=PROMPT[::-1])
    node.iterate()
    assert node.find(KvFailed, group_id)
    node.clock.advance(node.transfer_timeout_seconds - 1.0)
    node.iterate()
    assert not node.find(SequenceGroupFailed, group_id)
    node.clock.advance(1.0)
    node.iterate()
    assert node.find(SequenceGroupFailed, group_id)[0].code == 14
    assert node.find(KvFailed, later)
    node.cancel(later)
    node.iterate()
    node.assert_nothing_is_held()


def test_samples_go_on_from_where_each_of_them_is(node):
    """KV is transferred for the tokens that samples have in common. Each sample computes the rest itself."""
    whole = node.model.generate(PROMPT, 8)
    starts = [tuple(whole[:5]), tuple(whole[:2]), tuple(whole[:3])]
    group_id = node.open(
        prompt=PROMPT,
        sampling={"n": 4, "max_tokens": 8},
        samples=tuple(SampleStart(index, tokens) for index, tokens in zip((0, 1, 3), starts, strict=True)),
    )
    granted = node.granted(group_id)
    shared = [*PROMPT, whole[0]]
    assert granted.num_tokens_to_compute == len(PROMPT) + 5 - len(shared)
    node.push(group_id, shared)
    node.run()
    for index, tokens in zip((0, 1, 3), starts, strict=True):
        assert node.tokens(group_id, index) == whole[len(tokens) :]
        first = next(event for event in node.find(SampleTokens, group_id) if event.sample == index)
        assert first.start_position == len(PROMPT) + len(tokens)
    assert node.tokens(group_id, 2) == []
    node.assert_nothing_is_held()


def open_two_long_and_a_reservation(make_scripted_node, **reserved):
    """Opens two sequences that will grow to eleven blocks each, and a reservation of eight blocks, in a pool of 24."""
    node = make_scripted_node(num_blocks=24)
    node.groups._admission.observe_finished = lambda _num_generated: None
    node.groups._admission._mean_output_tokens = 2.0  # so far, answers have been short
    running = [node.open(sampling={"max_tokens": 40}) for _ in range(2)]
    node.iterate()
    waiting = node.open(prompt=PROMPT, **reserved)
    node.granted(waiting)
    return node, running, waiting


def test_a_reservation_that_nothing_came_for_gives_way_before_a_running_sequence(make_scripted_node):
    node, running, waiting = open_two_long_and_a_reservation(make_scripted_node)
    node.run()
    assert node.num_preempted == 0
    assert [node.tokens(group_id) for group_id in running] == [node.model.generate(SHORT, 40)] * 2
    (rejected,) = node.find(Rejected, waiting)
    assert (rejected.reason, rejected.num_sequences_needed) == (RejectReason.NO_ROOM, 1)
    assert 8 <= rejected.kv_blocks_needed <= 24
    assert not node.find(KvFailed, waiting)
    node.assert_nothing_is_held()


@pytest.mark.parametrize("reason", ["a frame has come", "it has the higher priority"])
def test_a_reservation_keeps_its_blocks_where(make_scripted_node, reason):
    fields = {"priority": 1} if reason == "it has the higher priority" else {}
    node, running, waiting = open_two_long_and_a_reservation(make_scripted_node, **fields)
    if reason == "a frame has come":
        put_one_frame(node, waiting[::-1])
    node.run()
    assert node.num_preempted > 0
    assert not node.find(Rejected, waiting)
    assert [node.tokens(group_id) for group_id in running] == [node.model.generate(SHORT, 40)] * 2
    node.cancel(waiting)
    node.iterate()
    node.assert_nothing_is_held()
