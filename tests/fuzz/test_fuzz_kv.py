"""Any messages to KV ingest are answered or counted, and write no byte outside of the transfer."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import OutriderError
from outrider.kv_transfer.arena import ArenaReader
from outrider.kv_transfer.base import CommitState, Region
from outrider.kv_transfer.frames import ALIVE, CANCEL, encode_frame
from outrider.kv_transfer.receiver_stream import ReceiverStream
from tests.fuzz.messages import fuzzed
from tests.kv_transfer.conftest import INCARNATION, Peers
from tests.support.kv_messages import (
    decode_receiver_message,
    decode_sender_message,
    encode_commit,
    encode_hello,
    encode_read,
    encode_slot_frame,
)

IDS = st.sampled_from([INCARNATION, b"t" * 16, b"o" * 16]) | st.binary(min_size=16, max_size=16)
SMALL = st.integers(0, 20) | st.sampled_from([2**31, 2**32 - 1])
HEADS = st.just(0) | st.integers(0, 2**16 - 1)
SIZES = st.integers(0, 2**16) | st.sampled_from([0, 4096, 2**40, 2**63])


@st.composite
def sender_messages(draw, spec, frames):
    """Draws an encoded message of a sender, often with wrong fields, or any bytes."""
    number = draw(st.integers(0, 2**32 - 1))
    header, payload = draw(st.sampled_from(frames))
    match draw(
        st.sampled_from(["frame", "frame", "lie", "slot", "hello", "commit", "cancel", "alive", "read", "bytes"])
    ):
        case "frame":
            data = encode_frame(number, header, payload)
        case "lie":
            region = Region(
                draw(st.sampled_from(["k", "v", "x", ""])),
                range(draw(SMALL), draw(SMALL)),
                range(draw(SMALL), draw(SMALL)),
                range(draw(HEADS), draw(HEADS)),
            )
            lie = dataclasses.replace(
                header,
                transfer_id=draw(st.just(spec.transfer_id) | IDS),
                incarnation=draw(IDS),
                region=draw(st.sampled_from([region, header.region])),
                length=draw(st.just(header.length) | SIZES),
                checksum=draw(st.sampled_from([header.checksum, 0])),
            )
            data = encode_frame(number, lie, payload)
        case "slot":
            data = encode_slot_frame(number, header, draw(SIZES))
        case "hello":
            data = encode_hello(draw(IDS), draw(IDS), arena_id=draw(IDS), arena_bytes=draw(SIZES))
        case "commit":
            data = encode_commit(Peers.sent(frames[: draw(st.integers(0, len(frames)))]))
        case "cancel":
            data = CANCEL
        case "alive":
            data = ALIVE
        case "read":
            data = encode_read(header.region)
        case _:
            data = draw(st.binary(max_size=64))
    if draw(st.integers(0, 5)) == 0 and data:
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    return data


def begun(peers, spec, *connectors):
    """Returns (the inbox that expects the transfer, its sink, the stream of a sender)."""
    inbox, sink = peers.new_inbox(), peers.sink()
    inbox.open(spec, sink)
    readers = {"grpc": None, "shared_memory": ArenaReader("/nonexistent")}
    readers = {name: readers[name] for name in connectors}
    stream = ReceiverStream(inbox=inbox, readers=readers, cancel=lambda: None)
    return inbox, sink, stream


@fuzzed(25)
@given(st.data())
def test_any_messages_leave_a_transfer_whole(data):
    peers = Peers()
    spec = peers.spec(start=0, end=6)
    frames = peers.frames(spec)
    inbox, sink, stream = begun(peers, spec, "grpc", "shared_memory")
    if data.draw(st.booleans()):
        stream.handle(encode_hello(spec.transfer_id, INCARNATION))
    for _ in range(data.draw(st.integers(0, 10))):
        answer = stream.handle(data.draw(sender_messages(spec, frames)))
        if answer is not None:
            decode_receiver_message(answer)
    stream.break_off()
    assert sink.cells.items() <= peers.expected_cells(spec).items()
    inbox.close(spec.transfer_id)


@fuzzed(100)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(data):
    for decode in (decode_sender_message, decode_receiver_message):
        try:
            decode(data)
        except OutriderError:
            continue


@fuzzed(12)
@given(st.data())
def test_after_any_lies_the_same_transfer_still_completes(data):
    """Checks that the transfer still completes unless it was cancelled."""
    peers = Peers()
    spec = peers.spec(start=0, end=6)
    _, sink, stream = begun(peers, spec, "grpc")
    stream.handle(encode_hello(spec.transfer_id, INCARNATION))
    frames = peers.frames(spec)
    for _ in range(data.draw(st.integers(0, 6))):
        message = data.draw(sender_messages(spec, frames))
        if message != CANCEL:
            stream.handle(message)
    for number, (header, payload) in enumerate(frames):
        stream.handle(encode_frame(number, header, payload))
    result = decode_receiver_message(stream.handle(encode_commit(peers.sent(frames))))
    assert result.state in (CommitState.COMMITTED, CommitState.UNKNOWN)
    if result.state is CommitState.COMMITTED:
        assert sink.cells == peers.expected_cells(spec)
