"""The protocol without a transport: what is written, what is refused, what a commit answers."""

from __future__ import annotations

import dataclasses
import os
import random
import threading

import pytest

from outrider.kv_transfer.base import CommitState, DrainState, Region, frames_digest
from outrider.kv_transfer.inbox import AttachState, Disposition


@pytest.fixture
def transfer(peers, inbox):
    spec, sink = peers.spec(), peers.sink()
    inbox.open(spec, sink)
    assert inbox.attach(spec.transfer_id, spec.incarnation) is AttachState.ATTACHED
    return spec, sink


def digest_of(peers, frames):
    return frames_digest(peers.sent(frames))


def accept_all(inbox, frames):
    return [inbox.accept(header, payload) for header, payload in frames]


def test_a_commit_is_idempotent_even_after_close_and_nothing_is_written_after_it(peers, inbox, transfer):
    spec, sink = transfer
    frames = peers.frames(spec)
    accept_all(inbox, frames)
    for _ in range(3):
        assert inbox.commit(spec.transfer_id, digest_of(peers, frames), connector="test").state is CommitState.COMMITTED
    assert set(accept_all(inbox, frames)) == {Disposition.STALE}
    assert sink.num_writes == len(frames)
    inbox.close(spec.transfer_id)
    assert inbox.commit(spec.transfer_id, 0, connector="test").state is CommitState.COMMITTED
    assert len(peers.completed) == 1


def test_who_asks_again_while_the_commit_is_made_is_not_unknown(peers, inbox, transfer):
    spec, _ = transfer
    frames = peers.frames(spec)
    accept_all(inbox, frames)
    lock = inbox._lock

    class AfterTheFirstLook:
        """A lock of the inbox that, at its first release, commits and closes the transfer like another stream."""

        def __enter__(self):
            lock.acquire()

        def __exit__(self, *_error):
            inbox._lock = lock
            lock.release()
            assert (
                inbox.commit(spec.transfer_id, digest_of(peers, frames), connector="test").state
                is CommitState.COMMITTED
            )
            inbox.close(spec.transfer_id)

    inbox._lock = AfterTheFirstLook()
    assert inbox.attach(spec.transfer_id, spec.incarnation) is AttachState.ATTACHED


def test_a_commit_of_other_frames_than_those_that_arrived_is_not_complete(peers, inbox, transfer):
    spec, _ = transfer
    frames = peers.frames(spec)
    accept_all(inbox, frames)
    sent = peers.sent(frames)
    first, *rest = sent
    unsent = dataclasses.replace(first, layers=range(first.layers.start, 1))
    lies = (
        {each: sent[each] for each in rest},
        sent | {first: sent[first] ^ 1},
        sent | {first: sent[rest[0]], rest[0]: sent[first]},
        {unsent: sent[first]} | sent,
        {},
    )
    for lie in lies:
        answer = inbox.commit(spec.transfer_id, frames_digest(lie), connector="test")
        assert (answer.state, answer.complete_until) == (CommitState.INCOMPLETE, spec.end_token)
    in_another_order = frames_digest(dict(reversed(sent.items())))
    assert inbox.commit(spec.transfer_id, in_another_order, connector="test").state is CommitState.COMMITTED


@pytest.mark.parametrize("at", range(9))
def test_a_transfer_that_lacks_any_one_frame_is_not_complete(peers, inbox, transfer, at):
    spec, _ = transfer
    frames = peers.frames(spec)
    missing, _ = frames.pop(at)
    accept_all(inbox, frames)
    answer = inbox.commit(spec.transfer_id, digest_of(peers, frames), connector="test")
    assert (answer.state, answer.complete_until) == (CommitState.INCOMPLETE, missing.region.tokens.start)


def region(**changes):
    inside = {"plane": "k", "start_layer": 0, "end_layer": 2, "start_token": 3, "end_token": 7, "end_head": 1}
    edges = {**inside, "start_head": 0, **changes}
    parts = (range(edges[f"start_{part}"], edges[f"end_{part}"]) for part in ("layer", "token", "head"))
    return Region(edges["plane"], *parts)


OUTSIDE = (
    region(plane="x"),
    region(plane=""),
    region(plane="v", start_layer=1, end_layer=3),
    region(start_layer=3, end_layer=5),
    region(start_layer=2, end_layer=2),
    region(start_layer=2, end_layer=1),
    region(start_token=2),
    region(end_token=14),
    region(start_token=13, end_token=13),
    region(start_token=9, end_token=5),
    region(end_token=2**32 - 1),
    region(end_head=2),
    region(start_head=1, end_head=2),
    region(start_head=1, end_head=0),
    region(end_head=0),
    region(end_head=2**16 - 1),
)
LENGTHS = (0, 8 * 16 - 1, 8 * 16 + 1, 2**63)


@pytest.mark.parametrize("lie", [*({"region": each} for each in OUTSIDE), *({"length": each} for each in LENGTHS)])
def test_nothing_is_written_out_of_bounds_or_of_another_length_than_its_regions(peers, inbox, transfer, lie):
    spec, sink = transfer
    header, payload = peers.frame(spec, region())
    assert inbox.accept(dataclasses.replace(header, **lie), payload) is Disposition.OUT_OF_BOUNDS
    assert sink.cells == {}
    assert inbox.counters()["frames_out_of_bounds"] == 1


def test_other_bytes_for_cells_that_were_written_are_refused(peers, inbox, transfer):
    spec, sink = transfer
    inbox.accept(*peers.frame(spec, region()))
    before = dict(sink.cells)
    assert inbox.accept(*peers.frame(spec, region(), salt=1)) is Disposition.CONFLICTING
    assert inbox.accept(*peers.frame(spec, region(start_token=6, end_token=9))) is Disposition.CONFLICTING
    assert sink.cells == before


def test_good_payload_steered_to_a_wrong_place_never_completes(peers, inbox, transfer):
    spec, _ = transfer
    frames = peers.frames(spec)
    header, payload = frames[1]
    inbox.accept(dataclasses.replace(header, region=frames[0][0].region), payload)
    accept_all(inbox, frames)
    assert inbox.commit(spec.transfer_id, digest_of(peers, frames), connector="test").state is CommitState.INCOMPLETE


def test_a_failure_is_reported_once_and_the_transfer_stays_dead(peers, inbox, transfer):
    spec, sink = transfer
    frames = peers.frames(spec)
    inbox.fail(spec.transfer_id, "first")
    inbox.fail(spec.transfer_id, "second")
    assert peers.failed == {spec.transfer_id: "first"}
    assert set(accept_all(inbox, frames)) == {Disposition.STALE}
    assert inbox.commit(spec.transfer_id, digest_of(peers, frames), connector="test").state is CommitState.UNKNOWN
    assert inbox.attach(spec.transfer_id, spec.incarnation) is AttachState.UNKNOWN
    assert sink.cells == {}


def test_close_waits_for_the_write_in_flight(peers, inbox, transfer):
    spec, sink = transfer
    sink.gate.clear()
    writing = threading.Thread(target=inbox.accept, args=peers.frame(spec, region()))
    writing.start()
    assert sink.is_writing.wait(60)
    assert inbox.close(spec.transfer_id, timeout_seconds=0.05) is DrainState.UNKNOWN
    sink.gate.set()
    assert inbox.close(spec.transfer_id) is DrainState.DRAINED
    num_writes = sink.num_writes
    assert num_writes == 1
    assert set(accept_all(inbox, peers.frames(spec))) == {Disposition.STALE}
    assert sink.num_writes == num_writes
    writing.join(60)


def test_closing_is_silent_and_idempotent(peers, inbox, transfer):
    spec, _ = transfer
    for _ in range(2):
        assert inbox.close(spec.transfer_id) is DrainState.DRAINED
    inbox.fail(spec.transfer_id, "late")
    assert inbox.close(b"never opened 123") is DrainState.DRAINED
    assert not peers.failed
    assert inbox.commit(spec.transfer_id, 0, connector="test").state is CommitState.UNKNOWN


def test_frames_from_many_threads_are_each_written_once(peers, inbox):
    spec, sink = peers.spec(start=0, end=200), peers.sink()
    inbox.open(spec, sink)
    frames = [peers.frame(spec, r) for r in peers.regions(spec, num_tokens=7)]
    results = []

    def push(seed):
        mine = list(frames)
        random.Random(seed).shuffle(mine)
        results.extend(accept_all(inbox, mine))

    threads = [threading.Thread(target=push, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results.count(Disposition.WRITTEN) == len(frames) == sink.num_writes
    assert inbox.commit(spec.transfer_id, digest_of(peers, frames), connector="test").state is CommitState.COMMITTED
    assert sink.cells == peers.expected_cells(spec)


@pytest.mark.parametrize(
    "asked",
    [{}, {"end_token": 4}, {"start_layer": 2, "end_layer": 5}, {"end_head": 2}, {"plane": "x"}, {"start_token": 2}],
    ids=["the transfer's own", "beyond", "layers", "heads", "plane", "empty"],
)
def test_only_what_is_held_before_the_transfer_can_be_read(peers, inbox, asked):
    spec = peers.spec(start=3)
    inbox.open(spec, peers.sink())
    within = {"start_token": 0, "end_token": 2} if asked and "end_token" not in asked else {"start_token": 0}
    assert inbox.read(spec.transfer_id, region(**({**within, **asked} if asked else asked))) is None
    assert inbox.read(os.urandom(16), region(start_token=0, end_token=2)) is None


def test_each_held_byte_is_read_once_and_nothing_after_the_end(peers, inbox):
    spec = peers.spec(start=3)
    inbox.open(spec, peers.sink())
    asked = region(start_token=0, end_token=2)
    num_bytes = asked.num_bytes(spec.planes[0])
    for _ in range(sum(plane.bytes_per_token for plane in spec.planes) * spec.start_token // num_bytes):
        header, payload = inbox.read(spec.transfer_id, asked)
        assert (header.region, bytes(payload)) == (asked, peers.payload(asked))
    assert inbox.read(spec.transfer_id, asked) is None
    other = peers.spec(start=3)
    inbox.open(other, peers.sink())
    inbox.fail(other.transfer_id, "the stream broke")
    assert inbox.read(other.transfer_id, asked) is None


def test_what_has_arrived_whole_is_known_once_nothing_is_written_any_more(peers, inbox):
    spec, sink = peers.spec(), peers.sink()
    inbox.open(spec, sink)
    assert inbox.received_until(os.urandom(16)) == 0
    for plane in spec.planes:
        whole = region(plane=plane.name, end_layer=plane.num_layers)
        assert inbox.accept(*peers.frame(spec, whole)) is Disposition.WRITTEN
    assert inbox.received_until(spec.transfer_id) == 7
    header, payload = peers.frame(spec, region(start_token=7, end_token=8))
    assert inbox.accept(header, payload) is Disposition.STALE, "the transfer has ended"
