"""What every connector promises, from attach to drain."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.errors import AbortedError, PeerLostError
from outrider.kv_transfer.base import CommitState, DrainState, Region, TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import make_connector
from outrider.kv_transfer.inbox import TransferInbox
from outrider.kv_transfer.receiver import KvReceiver
from tests.support.in_memory_connector import InMemoryConnector

INCARNATION = b"i" * 16
PLANES = (PlaneSpec("k", 4, 2, 8, "float32"), PlaneSpec("v", 4, 2, 8, "float32"))
BYTES_PER_CELL = 64
NUM_LAYERS = 4
FRAME_BYTES = 16 * 1024


@dataclass
class Receiving:
    """A receiver, an address that reaches it, and what it has said."""

    address: str = ""
    endpoint: object = None
    completed: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)
    news: threading.Event = field(default_factory=threading.Event)

    def on_complete(self, transfer_id, stats):
        self.completed[transfer_id] = stats
        self.news.set()

    def on_failed(self, transfer_id, reason):
        self.failed[transfer_id] = reason
        self.news.set()


class CellSink:
    """Keeps each (plane, layer, token)'s bytes; optionally blocks."""

    def __init__(self):
        self.cells = {}
        self.gate = threading.Event()
        self.gate.set()
        self.is_writing = threading.Event()

    def read(self, region):
        return memoryview(payload_of(region))

    def write(self, region, payload):
        self.is_writing.set()
        assert self.gate.wait(60)
        data, at = bytes(payload), 0
        for layer in region.layers:
            for token in range(region.start_token, region.end_token):
                assert (region.plane, layer, token) not in self.cells
                self.cells[region.plane, layer, token] = data[at : at + BYTES_PER_CELL]
                at += BYTES_PER_CELL
        assert at == len(data)


@pytest.fixture(params=["in_memory", "grpc", "shared_memory", "auto"])
def connection(request):
    receiving = Receiving()
    callbacks = {"on_complete": receiving.on_complete, "on_failed": receiving.on_failed}
    if request.param == "in_memory":
        receiving.endpoint = TransferInbox(incarnation=INCARNATION, **callbacks)
        receiving.address = "memory"
        connector = InMemoryConnector({"memory": receiving.endpoint}, max_frame_bytes=FRAME_BYTES)
        yield receiving, connector
        return
    receiver = KvReceiver(incarnation=INCARNATION, host="127.0.0.1", progress_seconds=5, **callbacks)
    receiving.address = f"127.0.0.1:{receiver.start()}"
    receiving.endpoint = receiver
    connector = make_connector(
        KvTransferConfig(
            connector=request.param,
            frame_bytes=FRAME_BYTES,
            arena_bytes=1 << 20,
            window_bytes=1 << 16,
            connect_seconds=5,
            progress_seconds=5,
        )
    )
    yield receiving, connector
    connector.close()
    receiver.stop()


def new_transfer(receiving, *, start=0, end=40):
    spec = TransferSpec(
        transfer_id=os.urandom(16), incarnation=INCARNATION, start_token=start, end_token=end, planes=PLANES
    )
    sink = CellSink()
    receiving.endpoint.open(spec, sink)
    return spec, sink


def frames_of(spec, *, layers_per_frame=2, tokens_per_frame=16):
    for start in range(spec.start_token, spec.end_token, tokens_per_frame):
        end = min(start + tokens_per_frame, spec.end_token)
        for layer in range(0, NUM_LAYERS, layers_per_frame):
            for plane in ("k", "v"):
                region = Region(
                    plane=plane,
                    start_layer=layer,
                    end_layer=layer + layers_per_frame,
                    start_token=start,
                    end_token=end,
                    end_head=2,
                )
                yield region, payload_of(region)


def payload_of(region):
    return b"".join(
        cell(region.plane, layer, token)
        for layer in region.layers
        for token in range(region.start_token, region.end_token)
    )


def cell(plane, layer, token):
    return f"{plane}{layer:08}{token:08}".encode().ljust(BYTES_PER_CELL, b".")


def expected_cells(spec):
    return {
        (plane, layer, token): cell(plane, layer, token)
        for plane in ("k", "v")
        for layer in range(NUM_LAYERS)
        for token in range(spec.start_token, spec.end_token)
    }


def test_every_token_of_every_layer_of_every_plane_arrives(connection):
    receiving, connector = connection
    spec, sink = new_transfer(receiving, start=7, end=55)
    sender = connector.connect(receiving.address, spec)
    for region, payload in frames_of(spec):
        sender.put(region, payload)
    assert sender.commit().state is CommitState.COMMITTED
    assert sink.cells == expected_cells(spec)
    stats = receiving.completed[spec.transfer_id]
    assert stats.payload_bytes == sender.payload_bytes == spec.bytes_per_token * (55 - 7)
    assert stats.connector == sender.connector
    assert stats.seconds >= 0
    assert sender.cancel() is DrainState.DRAINED
    assert receiving.endpoint.close(spec.transfer_id) is DrainState.DRAINED
    assert not receiving.failed


def test_auto_shares_memory_where_the_receiver_can_attach(connection):
    receiving, connector = connection
    spec, _ = new_transfer(receiving)
    sender = connector.connect(receiving.address, spec)
    assert sender.connector == ("shared_memory" if connector.name == "auto" else connector.name)
    sender.cancel()


def test_a_commit_before_the_last_frame_says_what_is_missing_and_the_next_one_succeeds(connection):
    receiving, connector = connection
    spec, sink = new_transfer(receiving)
    sender = connector.connect(receiving.address, spec)
    *first, (last_region, last_payload) = frames_of(spec)
    for region, payload in first:
        sender.put(region, payload)
    early = sender.commit()
    assert early.state is CommitState.INCOMPLETE
    assert early.missing == (last_region,)
    assert not receiving.completed
    sender.put(last_region, last_payload)
    assert sender.commit().state is CommitState.COMMITTED
    assert sink.cells == expected_cells(spec)


def test_frames_in_any_order_and_twice_do_no_harm(connection):
    receiving, connector = connection
    spec, sink = new_transfer(receiving)
    sender = connector.connect(receiving.address, spec)
    for region, payload in reversed(list(frames_of(spec))):
        sender.put(region, payload)
        sender.put(region, payload)
    assert sender.commit().state is CommitState.COMMITTED
    assert sink.cells == expected_cells(spec)


def test_a_transfer_without_tokens_is_complete_at_once(connection):
    receiving, connector = connection
    spec, sink = new_transfer(receiving, start=5, end=5)
    sender = connector.connect(receiving.address, spec)
    assert sender.commit().state is CommitState.COMMITTED
    assert receiving.completed[spec.transfer_id].payload_bytes == 0
    assert sink.cells == {}


def test_a_transfer_that_nobody_opened_is_refused(connection):
    receiving, connector = connection
    spec = TransferSpec(transfer_id=os.urandom(16), incarnation=INCARNATION, start_token=0, end_token=4, planes=PLANES)
    with pytest.raises(AbortedError):
        connector.connect(receiving.address, spec)


def test_a_transfer_granted_by_an_earlier_process_is_refused(connection):
    receiving, connector = connection
    spec = TransferSpec(transfer_id=os.urandom(16), incarnation=b"o" * 16, start_token=0, end_token=4, planes=PLANES)
    with pytest.raises(PeerLostError):
        connector.connect(receiving.address, spec)


def test_nobody_at_the_address_is_a_lost_peer(connection):
    receiving, connector = connection
    spec, _ = new_transfer(receiving)
    with pytest.raises(PeerLostError):
        connector.connect("127.0.0.1:1", spec)


def test_a_second_sender_of_the_same_transfer_is_refused(connection):
    receiving, connector = connection
    spec, _ = new_transfer(receiving)
    sender = connector.connect(receiving.address, spec)
    with pytest.raises(AbortedError):
        connector.connect(receiving.address, spec)
    assert sender.cancel() is DrainState.DRAINED


def test_a_cancelled_transfer_fails_once_and_writes_nothing_more(connection):
    receiving, connector = connection
    spec, sink = new_transfer(receiving)
    sender = connector.connect(receiving.address, spec)
    region, payload = next(frames_of(spec))
    sender.put(region, payload)
    assert sender.cancel() is DrainState.DRAINED
    assert sender.cancel() is DrainState.DRAINED
    assert receiving.news.wait(60)
    assert receiving.failed == {spec.transfer_id: "cancelled by the sender"}
    assert len(sink.cells) in (0, region.num_bytes(PLANES[0]) // BYTES_PER_CELL)
    assert receiving.endpoint.close(spec.transfer_id) is DrainState.DRAINED


def test_close_drains_and_the_sender_hears_of_it(connection):
    receiving, connector = connection
    spec, sink = new_transfer(receiving)
    sender = connector.connect(receiving.address, spec)
    frames = list(frames_of(spec))
    sink.gate.clear()
    sending = threading.Thread(target=put_all, args=(sender, frames))
    sending.start()
    assert sink.is_writing.wait(60)
    threading.Timer(0.05, sink.gate.set).start()
    assert receiving.endpoint.close(spec.transfer_id) is DrainState.DRAINED
    assert sink.gate.is_set()
    num_written = len(sink.cells)
    sending.join(60)
    assert not sending.is_alive()
    with pytest.raises((AbortedError, PeerLostError)):
        sender.commit()
    sender.cancel()
    assert len(sink.cells) == num_written
    assert not receiving.completed
    assert not receiving.failed


def test_a_committed_transfer_stays_committed_and_takes_no_more_frames(connection):
    receiving, connector = connection
    spec, sink = new_transfer(receiving, end=16)
    sender = connector.connect(receiving.address, spec)
    put_all(sender, list(frames_of(spec)))
    assert sender.commit().state is CommitState.COMMITTED
    receiving.endpoint.close(spec.transfer_id)
    again = connector.connect(receiving.address, spec)
    assert again.commit().state is CommitState.COMMITTED
    assert len(receiving.completed) == 1
    assert sink.cells == expected_cells(spec)


def test_an_interrupted_sender_ends_at_once(connection):
    receiving, connector = connection
    spec, _ = new_transfer(receiving)
    sender = connector.connect(receiving.address, spec)
    sender.interrupt()
    region, payload = next(frames_of(spec))
    with pytest.raises(AbortedError):
        sender.put(region, payload)
    with pytest.raises(AbortedError):
        sender.commit()
    assert sender.cancel() is DrainState.DRAINED


def test_a_refused_frame_ends_the_sender_at_once(connection):
    receiving, connector = connection
    spec, _ = new_transfer(receiving)
    sender = connector.connect(receiving.address, spec)
    ended = threading.Event()
    sender.when_ended(ended.set)
    (region, payload), *others = frames_of(spec)
    sender.put(region, payload)
    assert not ended.is_set()
    put_all(sender, [(region, payload[::-1])])  # other bytes for cells that were written
    assert ended.wait(60)
    for attempt in (lambda: sender.put(*others[0]), sender.keep_alive, sender.commit):
        with pytest.raises(AbortedError, match="refused a frame: CONFLICTING"):
            attempt()
    told_late = threading.Event()
    sender.when_ended(told_late.set)
    assert told_late.is_set()
    assert sender.cancel() is DrainState.DRAINED
    assert not receiving.completed


def test_a_sender_whose_receiver_closes_the_transfer_is_told(connection):
    receiving, connector = connection
    spec, _ = new_transfer(receiving)
    sender = connector.connect(receiving.address, spec)
    ended = threading.Event()
    sender.when_ended(ended.set)
    receiving.endpoint.close(spec.transfer_id)
    put_all(sender, list(frames_of(spec)))
    assert ended.wait(60)
    sender.cancel()


def test_transfers_side_by_side_do_not_mix(connection):
    receiving, connector = connection
    transfers = [new_transfer(receiving, start=start, end=start + 30) for start in (0, 3, 11, 64)]
    results = {}

    def push(spec):
        sender = connector.connect(receiving.address, spec)
        put_all(sender, list(frames_of(spec)))
        results[spec.transfer_id] = sender.commit().state

    threads = [threading.Thread(target=push, args=(spec,)) for spec, _ in transfers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for spec, sink in transfers:
        assert results[spec.transfer_id] is CommitState.COMMITTED
        assert sink.cells == expected_cells(spec)


def test_a_sink_that_refuses_fails_the_transfer(connection):
    receiving, connector = connection
    spec = TransferSpec(transfer_id=os.urandom(16), incarnation=INCARNATION, start_token=0, end_token=40, planes=PLANES)

    class FullSink:
        def write(self, region, payload):
            raise MemoryError("no room")

    receiving.endpoint.open(spec, FullSink())
    sender = connector.connect(receiving.address, spec)
    put_all(sender, list(frames_of(spec)))
    assert receiving.news.wait(60)
    assert "no room" in receiving.failed[spec.transfer_id]
    sender.cancel()


def held_regions(start, end):
    return [region for region, _ in frames_of(SimpleNamespace(start_token=start, end_token=end))]


def test_what_the_receiver_holds_can_be_read_before_the_rest_is_sent(connection):
    receiving, connector = connection
    spec, sink = new_transfer(receiving, start=40, end=60)
    sender, copy = connector.connect(receiving.address, spec), CellSink()
    sender.read(held_regions(7, 40), copy)
    assert copy.cells == expected_cells(SimpleNamespace(start_token=7, end_token=40))
    put_all(sender, frames_of(spec))
    assert sender.commit().state is CommitState.COMMITTED
    assert sink.cells == expected_cells(spec)


def test_what_is_not_held_cannot_be_read_and_the_transfer_goes_on(connection):
    receiving, connector = connection
    spec, _ = new_transfer(receiving, start=16, end=48)
    sender = connector.connect(receiving.address, spec)
    for regions in (held_regions(0, 17), held_regions(16, 17), [*held_regions(0, 16)] * 2):
        with pytest.raises(AbortedError, match=r"hold|held"):
            sender.read(regions, CellSink())
    put_all(sender, frames_of(spec))
    assert sender.commit().state is CommitState.COMMITTED


def put_all(sender, frames):
    """Puts what the receiver takes."""
    try:
        for region, payload in frames:
            sender.put(region, payload)
    except (AbortedError, PeerLostError):
        return
