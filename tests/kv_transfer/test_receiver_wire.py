"""The receiver's reaction to peers that break the protocol."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
from contextlib import closing

import grpc
import pytest

from outrider.errors import ConfigError, NotSupportedError
from outrider.kv_transfer.arena import Arena
from outrider.kv_transfer.base import CommitState, DrainState
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.frames import (
    ALIVE,
    MAX_MESSAGE_BYTES,
    encode_frame,
)
from outrider.kv_transfer.inbox import AttachState, Disposition
from tests.support.kv_messages import decode_receiver_message, encode_commit, encode_slot_frame


@pytest.fixture
def attached(peers, receiver_factory, raw):
    """A receiver, an open transfer, and a raw stream that is attached to it."""
    receiver, port = receiver_factory()
    spec, sink = peers.spec(), peers.sink()
    receiver.inbox.open(spec, sink)
    stream = raw(port)
    assert stream.ask(peers.hello(spec)).state is AttachState.ATTACHED
    return receiver, port, spec, sink, stream


def encoded(sequence, frame):
    return encode_frame(sequence, *frame)


def test_refused_frames_are_counted_and_do_not_disturb_the_transfer(peers, attached):
    receiver, _, spec, sink, stream = attached
    good = peers.frames(spec)[0]
    header, payload = good
    flipped = bytearray(encoded(1, good))
    flipped[-1] ^= 1
    outside = dataclasses.replace(
        header, region=dataclasses.replace(header.region, tokens=range(header.region.tokens.start, 1000))
    )
    refused = {
        bytes(flipped): Disposition.CORRUPT,
        encoded(2, good)[:-5]: Disposition.CORRUPT,
        encoded(3, (outside, payload)): Disposition.OUT_OF_BOUNDS,
        encoded(4, (dataclasses.replace(header, transfer_id=b"o" * 16), payload)): Disposition.STALE,
        encoded(5, (dataclasses.replace(header, incarnation=b"o" * 16), payload)): Disposition.STALE,
        encode_slot_frame(6, header, 4096): Disposition.OUT_OF_BOUNDS,  # no arena is attached
    }
    for message, disposition in refused.items():
        assert stream.ask(message).disposition is disposition
    assert sink.num_writes == 0
    assert receiver.inbox.counters() == {"frames_corrupt": 2, "frames_out_of_bounds": 2, "frames_stale": 2}
    assert peers.finish(spec, stream) is CommitState.COMMITTED
    assert sink.cells == peers.expected_cells(spec)


def test_messages_that_do_not_parse_are_counted_and_the_commit_misses_their_frames(peers, attached):
    receiver, _, spec, _, stream = attached
    frames = peers.frames(spec)
    broken_header = bytearray(encoded(1, frames[0]))
    broken_header[30] ^= 0x80
    for message in (b"", b"\xff" * 100, bytes(broken_header), encoded(2, frames[0])[:40], os.urandom(5000)):
        stream.say(message)
    answer = stream.ask(encode_commit(peers.sent(frames)))
    assert answer.state is CommitState.INCOMPLETE
    assert receiver.inbox.counters()["messages_malformed"] == 5
    assert peers.finish(spec, stream) is CommitState.COMMITTED


def test_another_transfers_frames_are_dropped_even_if_that_one_is_open(peers, attached):
    receiver, _, _, _, stream = attached
    other, other_sink = peers.spec(), peers.sink()
    receiver.inbox.open(other, other_sink)
    assert stream.ask(encoded(1, peers.frames(other)[0])).disposition is Disposition.STALE
    assert stream.ask(peers.hello(other)).state is AttachState.BUSY
    assert other_sink.num_writes == 0


def test_a_stream_that_does_not_begin_with_a_hello_is_ended(peers, receiver_factory, raw):
    receiver, port = receiver_factory()
    spec, sink = peers.spec(), peers.sink()
    receiver.inbox.open(spec, sink)
    for first in (b"GET / HTTP/1.1", encoded(1, peers.frames(spec)[0]), encode_commit({}), ALIVE):
        stream = raw(port)
        stream.say(first)
        with pytest.raises(grpc.RpcError):
            next(stream.call)
    assert receiver.inbox.counters()["messages_malformed"] == 4
    assert sink.num_writes == 0
    assert not peers.failed


@pytest.mark.parametrize(
    "end", [lambda stream: stream.call.cancel(), lambda stream: stream.outgoing.put(None)], ids=["breaks", "ends"]
)
def test_a_stream_that_is_over_before_the_commit_fails_the_transfer(peers, attached, end):
    receiver, _, spec, sink, stream = attached
    stream.ask(encoded(1, peers.frames(spec)[0]))
    end(stream)
    assert peers.news.get(timeout=60) == ("failed", spec.transfer_id)
    assert "ended before the commit" in peers.failed[spec.transfer_id]
    assert receiver.close(spec.transfer_id) is DrainState.DRAINED
    assert sink.num_writes == 1


def test_a_stream_that_ends_after_its_commit_does_no_harm(peers, attached):
    _, _, spec, _, stream = attached
    assert peers.finish(spec, stream) is CommitState.COMMITTED
    stream.outgoing.put(None)
    assert list(stream.call) == []
    assert not peers.failed


def test_a_commit_whose_answer_was_lost_is_answered_on_another_stream(peers, attached, raw):
    _, port, spec, _, stream = attached
    frames = peers.frames(spec)
    for sequence, frame in enumerate(frames):
        stream.ask(encoded(sequence, frame))
    stream.say(encode_commit(peers.sent(frames)))
    assert peers.news.get(timeout=60) == ("complete", spec.transfer_id)
    stream.call.cancel()
    again = raw(port)
    again.ask(peers.hello(spec))
    assert again.ask(encode_commit(peers.sent(frames))).state is CommitState.COMMITTED
    assert len(peers.completed) == 1
    assert not peers.failed


def test_a_message_over_the_limit_breaks_its_stream_only(peers, attached, raw):
    _, port, spec, _, stream = attached
    big = raw(port)
    big.say(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(grpc.RpcError):
        next(big.call)
    assert peers.finish(spec, stream) is CommitState.COMMITTED


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500]
)
def test_garbage_on_the_port_disturbs_nobody(peers, attached, garbage):
    _, port, spec, _, stream = attached
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(garbage)
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):  # until it is closed
                pass
    assert peers.finish(spec, stream) is CommitState.COMMITTED


@pytest.fixture
def sharing(peers, receiver_factory, raw, tmp_path):
    """An open transfer's spec and sink, the arena of the sender that is attached to it, and its raw stream."""
    receiver, port = receiver_factory(arena_directory=str(tmp_path))
    spec, sink = peers.spec(), peers.sink()
    receiver.inbox.open(spec, sink)
    arena = Arena(directory=str(tmp_path), num_bytes=1 << 16, slot_bytes=1 << 14)
    stream = raw(port)
    hello = peers.hello(spec, arena_id=arena.arena_id, arena_bytes=arena.num_bytes)
    assert stream.ask(hello).nonce == arena.nonce
    yield spec, sink, arena, stream
    arena.retire()


def test_pages_that_change_after_their_check_change_nothing_that_is_written(peers, sharing):
    spec, sink, arena, stream = sharing
    header, payload = peers.frames(spec)[0]
    slot = arena.take(spec)
    arena.write(slot, payload)
    sink.gate.clear()
    stream.say(encode_slot_frame(1, header, slot))
    assert sink.is_writing.wait(60)  # the checksum is verified, but nothing is written yet
    arena.write(slot, memoryview(bytes(len(payload))))
    sink.gate.set()
    assert decode_receiver_message(next(stream.call)).disposition is Disposition.WRITTEN
    assert b"".join(sink.cells.values()) == bytes(payload)


def test_slots_outside_the_arena_are_refused(peers, sharing):
    spec, sink, arena, stream = sharing
    header, payload = peers.frames(spec)[0]
    for sequence, offset in enumerate((1, 4095, arena.num_bytes - 1, arena.num_bytes, 2**63, 2**64 - 1)):
        assert stream.ask(encode_slot_frame(sequence, header, offset)).disposition is Disposition.OUT_OF_BOUNDS
    slot = arena.take(spec)
    arena.write(slot, payload)
    assert stream.ask(encode_slot_frame(99, header, slot + 1)).disposition is Disposition.CORRUPT
    assert stream.ask(encode_slot_frame(99, header, slot)).disposition is Disposition.WRITTEN
    assert sink.num_writes == 1


@pytest.mark.parametrize(("taken", "other"), [*itertools.permutations(("shared_memory", "grpc"))])
def test_auto_uses_what_the_receiver_takes_and_another_connector_is_refused(peers, receiver_factory, taken, other):
    receiver, port = receiver_factory(connectors=(taken,))
    spec = peers.spec()
    receiver.inbox.open(spec, peers.sink())
    refused = pytest.raises(NotSupportedError, match=f"cannot attach by {other}")
    with closing(Connector(KvTransferConfig(connector=other))) as connector, refused:
        connector.connect(f"127.0.0.1:{port}", spec)
    with closing(Connector(KvTransferConfig())) as connector:
        sender = connector.connect(f"127.0.0.1:{port}", spec)
        assert sender.connector == taken
        sender.cancel()


def test_auto_falls_back_to_grpc_when_the_receiver_cannot_attach(peers, receiver_factory, tmp_path):
    receiver, port = receiver_factory(arena_directory=str(tmp_path))  # not the sender's, as in another container
    spec, sink = peers.spec(), peers.sink()
    receiver.inbox.open(spec, sink)
    connector = Connector(KvTransferConfig(connector="auto"))
    sender = connector.connect(f"127.0.0.1:{port}", spec)
    assert sender.connector == "grpc"
    for header, payload in peers.frames(spec):
        sender.put(header.region, payload)
    assert sender.commit().state is CommitState.COMMITTED
    assert peers.completed[spec.transfer_id].connector == "grpc"
    connector.close()


def test_a_port_that_is_taken_is_a_config_error(peers, receiver_factory):
    _, port = receiver_factory()
    with pytest.raises(ConfigError):
        peers.new_receiver(port=port).start()
