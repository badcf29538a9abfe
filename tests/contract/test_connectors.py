"""The promises of every connector, from attach to drain."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import AbortedError, PeerLostError
from outrider.kv_transfer.base import CommitState, DrainState
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from tests.kv_transfer.conftest import Peers, RecordingSink
from tests.support.fake_cuda_driver import device_rows, fake_shared_gpu
from tests.support.in_memory_connector import InMemoryConnector
from tests.support.waiting import wait_for

FRAME_BYTES = 16 * 1024
WAIT_SECONDS = 60.0


@dataclass
class Link:
    """A receiver, an address that reaches it, and a connector of a sender."""

    peers: Peers
    receiver: Any
    address: str
    connector: Any
    gpu: Any = None  # the fake GPU of both sides, if they have one

    def open(self, *, start=0, end=40, sink=None):
        spec, sink = self.peers.spec(start=start, end=end), sink or RecordingSink()
        getattr(self.receiver, "inbox", self.receiver).open(spec, sink)
        return spec, sink

    def connect(self, spec):
        sender = self.connector.connect(self.address, spec)
        if sender.connector == "cuda_ipc":
            put = sender.put
            sender.put = lambda region, payload: put(region, device_rows(self.gpu, payload))
        return sender

    def begin(self, **bounds):
        """Opens a transfer, and returns its (spec, sink, sender)."""
        spec, sink = self.open(**bounds)
        return spec, sink, self.connect(spec)


@pytest.fixture(params=["in_memory", "grpc", "shared_memory", "auto", "cuda_ipc"])
def link(request, monkeypatch, tmp_path):
    peers = Peers()
    if request.param == "in_memory":
        inbox = peers.new_inbox()
        yield Link(peers, inbox, "memory", InMemoryConnector({"memory": inbox}, max_frame_bytes=FRAME_BYTES))
        return
    gpu = fake_shared_gpu(monkeypatch, tmp_path)[0] if request.param == "cuda_ipc" else None
    receiver = peers.new_receiver(progress_seconds=5, gpu=gpu)
    config = KvTransferConfig(
        connector=request.param,
        frame_bytes=FRAME_BYTES,
        device_frame_bytes=FRAME_BYTES,
        arena_bytes=1 << 20,
        device_arena_bytes=1 << 20,
        window_bytes=1 << 16,
        connect_seconds=5,
        progress_seconds=5,
    )
    connector = Connector(config, gpu=gpu)
    yield Link(peers, receiver, f"127.0.0.1:{receiver.start()}", connector, gpu)
    connector.close()
    receiver.stop()


def frames_of(spec):
    return [(region, Peers.payload(region)) for region in Peers.regions(spec)]


def put_all(sender, frames):
    """Puts frames until the transfer ends."""
    try:
        for region, payload in frames:
            sender.put(region, payload)
    except (AbortedError, PeerLostError):
        return


def test_every_token_of_every_layer_of_every_plane_arrives(link):
    spec, sink, sender = link.begin(start=7, end=55)
    put_all(sender, frames_of(spec))
    assert sender.commit().state is CommitState.COMMITTED
    assert sink.cells == link.peers.expected_cells(spec)
    stats = link.peers.completed[spec.transfer_id]
    assert stats.payload_bytes == sender.payload_bytes == (55 - 7) * sum(plane.bytes_per_token for plane in spec.planes)
    assert stats.connector == sender.connector
    assert stats.seconds >= 0
    assert sender.cancel() is DrainState.DRAINED
    assert link.receiver.close(spec.transfer_id) is DrainState.DRAINED
    assert not link.peers.failed


def test_auto_shares_memory_where_the_receiver_can_attach(link):
    *_, sender = link.begin()
    assert sender.connector == ("shared_memory" if link.connector.name == "auto" else link.connector.name)
    sender.cancel()


def test_a_commit_before_the_last_frame_says_what_is_missing_and_the_next_one_succeeds(link):
    spec, sink, sender = link.begin()
    *first, last = frames_of(spec)
    put_all(sender, first)
    early = sender.commit()
    assert early.state is CommitState.INCOMPLETE
    assert early.complete_until == last[0].tokens.start
    assert not link.peers.completed
    sender.put(*last)
    assert sender.commit().state is CommitState.COMMITTED
    assert sink.cells == link.peers.expected_cells(spec)


def test_frames_in_any_order_and_twice_do_no_harm(link):
    spec, sink, sender = link.begin()
    frames = frames_of(spec)
    put_all(sender, [frame for frame in reversed(frames) for _ in range(2)])
    assert sender.commit().state is CommitState.COMMITTED
    assert sink.cells == link.peers.expected_cells(spec)
    assert sink.num_writes == len(frames)


def test_a_transfer_without_tokens_is_complete_at_once(link):
    spec, sink, sender = link.begin(start=5, end=5)
    assert sender.commit().state is CommitState.COMMITTED
    assert link.peers.completed[spec.transfer_id].payload_bytes == 0
    assert sink.cells == {}


def test_who_is_not_expected_is_refused(link):
    spec, _ = link.open()
    nobody_opened = replace(spec, transfer_id=os.urandom(16))
    of_an_earlier_process = replace(nobody_opened, incarnation=b"o" * 16)
    for other, address, error in (
        (nobody_opened, link.address, AbortedError),
        (of_an_earlier_process, link.address, PeerLostError),
        (spec, "127.0.0.1:1", PeerLostError),
    ):
        with pytest.raises(error):
            link.connector.connect(address, other)
    sender = link.connect(spec)
    with pytest.raises(AbortedError):
        link.connect(spec)  # a second sender
    assert sender.cancel() is DrainState.DRAINED


def test_a_cancelled_transfer_fails_once_and_writes_nothing_more(link):
    spec, sink, sender = link.begin()
    sender.put(*frames_of(spec)[0])
    assert sender.cancel() is DrainState.DRAINED
    assert sender.cancel() is DrainState.DRAINED
    assert link.peers.news.get(timeout=WAIT_SECONDS) == ("failed", spec.transfer_id)
    assert link.peers.failed == {spec.transfer_id: "cancelled by the sender"}
    assert sink.num_writes in (0, 1)
    assert link.receiver.close(spec.transfer_id) is DrainState.DRAINED


def test_close_drains_and_the_sender_hears_of_it(link):
    spec, sink, sender = link.begin()
    sink.gate.clear()
    sending = threading.Thread(target=put_all, args=(sender, frames_of(spec)))
    sending.start()
    assert sink.is_writing.wait(WAIT_SECONDS)
    threading.Timer(0.05, sink.gate.set).start()
    assert link.receiver.close(spec.transfer_id) is DrainState.DRAINED
    assert sink.gate.is_set()
    num_written = len(sink.cells)
    sending.join(WAIT_SECONDS)
    assert not sending.is_alive()
    with pytest.raises((AbortedError, PeerLostError)):
        sender.commit()
    sender.cancel()
    assert len(sink.cells) == num_written
    assert not link.peers.completed
    assert not link.peers.failed


def test_a_committed_transfer_stays_committed_and_takes_no_more_frames(link):
    spec, sink, sender = link.begin(end=16)
    put_all(sender, frames_of(spec))
    assert sender.commit().state is CommitState.COMMITTED
    link.receiver.close(spec.transfer_id)
    assert link.connect(spec).commit().state is CommitState.COMMITTED
    assert link.peers.news.qsize() == 1
    assert sink.cells == link.peers.expected_cells(spec)


def test_an_interrupted_sender_ends_at_once(link):
    spec, _, sender = link.begin()
    sender.interrupt()
    with pytest.raises(AbortedError):
        sender.put(*frames_of(spec)[0])
    with pytest.raises(AbortedError):
        sender.commit()
    assert sender.cancel() is DrainState.DRAINED


def test_progress_without_frames_is_noted_and_that_of_an_idle_sender_is_not(link):
    spec, _, sender = link.begin()
    inbox = getattr(link.receiver, "inbox", link.receiver)
    sender.keep_alive()
    assert inbox.last_frame_at(spec.transfer_id) is None
    sender.keep_alive(has_progressed=True)
    wait_for(lambda: inbox.last_frame_at(spec.transfer_id) is not None)
    put_all(sender, frames_of(spec))
    assert sender.commit().state is CommitState.COMMITTED


def test_a_refused_frame_ends_the_sender_at_once(link):
    spec, _, sender = link.begin()
    ended, told_late = threading.Event(), threading.Event()
    sender.when_ended(ended.set)
    (region, payload), *others = frames_of(spec)
    sender.put(region, payload)
    assert not ended.is_set()
    put_all(sender, [(region, payload[::-1])])  # other bytes for cells that are written already
    assert ended.wait(WAIT_SECONDS)
    for attempt in (lambda: sender.put(*others[0]), sender.keep_alive, sender.commit):
        with pytest.raises(AbortedError, match="refused a frame: CONFLICTING"):
            attempt()
    sender.when_ended(told_late.set)
    assert told_late.is_set()
    assert sender.cancel() is DrainState.DRAINED
    assert not link.peers.completed


def test_a_sender_whose_receiver_closes_the_transfer_is_told(link):
    spec, _, sender = link.begin()
    ended = threading.Event()
    sender.when_ended(ended.set)
    link.receiver.close(spec.transfer_id)
    put_all(sender, frames_of(spec))
    assert ended.wait(WAIT_SECONDS)
    sender.cancel()


def test_transfers_side_by_side_do_not_mix(link):
    transfers = [link.open(start=start, end=start + 30) for start in (0, 3, 11, 64)]
    results = {}

    def push(spec):
        sender = link.connect(spec)
        put_all(sender, frames_of(spec))
        results[spec.transfer_id] = sender.commit().state

    threads = [threading.Thread(target=push, args=(spec,)) for spec, _ in transfers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    for spec, sink in transfers:
        assert results[spec.transfer_id] is CommitState.COMMITTED
        assert sink.cells == link.peers.expected_cells(spec)


def test_a_sink_that_refuses_fails_the_transfer(link):
    class FullSink(RecordingSink):
        def write(self, region, payload):
            raise MemoryError("no room")

    spec, _, sender = link.begin(sink=FullSink())
    put_all(sender, frames_of(spec))
    assert link.peers.news.get(timeout=WAIT_SECONDS) == ("failed", spec.transfer_id)
    assert "no room" in link.peers.failed[spec.transfer_id]
    sender.cancel()
    assert link.receiver.close(spec.transfer_id) is DrainState.DRAINED


def held_regions(start, end):
    return list(Peers.regions(SimpleNamespace(start_token=start, end_token=end)))


def test_what_the_receiver_holds_can_be_read_before_the_rest_is_sent(link):
    spec, sink, sender = link.begin(start=40, end=60)
    copy = RecordingSink()
    sender.read(held_regions(7, 40), copy.write)
    assert copy.cells == link.peers.expected_cells(SimpleNamespace(start_token=7, end_token=40))
    put_all(sender, frames_of(spec))
    assert sender.commit().state is CommitState.COMMITTED
    assert sink.cells == link.peers.expected_cells(spec)


def test_a_transfer_without_tokens_is_for_reading(link):
    spec, _, sender = link.begin(start=16, end=16)
    taken = RecordingSink()
    sender.read(held_regions(0, 16), taken.write)
    assert sender.commit().state is CommitState.COMMITTED
    whole = replace(spec, start_token=0)
    assert taken.cells == link.peers.expected_cells(whole)


def test_what_is_no_longer_held_cannot_be_read(link):
    sink = RecordingSink()
    sink.are_held = lambda: False
    spec, _, sender = link.begin(start=16, end=48, sink=sink)
    with pytest.raises(AbortedError, match=r"hold|held"):
        sender.read(held_regions(0, 16), RecordingSink().write)
    put_all(sender, frames_of(spec))
    assert sender.commit().state is CommitState.COMMITTED


def test_what_is_not_held_cannot_be_read_and_the_transfer_goes_on(link):
    for regions in (held_regions(0, 17), held_regions(16, 17), held_regions(0, 16) * 2):
        spec, _, sender = link.begin(start=16, end=48)
        with pytest.raises(AbortedError, match=r"hold|held"):
            sender.read(regions, RecordingSink().write)
        put_all(sender, frames_of(spec))
        assert sender.commit().state is CommitState.COMMITTED
