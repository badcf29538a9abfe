from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kv_transfer.base import CommitState, FrameHeader, Region
from outrider.kv_transfer.frames import (
    ALIVE,
    CANCEL,
    Frame,
    MalformedMessageError,
    decode_message,
    decode_region,
    encode_frame,
)
from outrider.kv_transfer.inbox import AttachState, Disposition
from outrider.v1 import kv_pb2
from tests.support.kv_messages import (
    decode_receiver_message,
    decode_sender_message,
    encode_commit,
    encode_hello,
    encode_read,
    encode_slot_frame,
)

REGION = Region("latent", range(1, 9), range(100, 2**32 - 1), range(6, 2**16 - 1))
HEADER = FrameHeader(transfer_id=b"t" * 16, incarnation=b"i" * 16, region=REGION, length=2**40, checksum=2**64 - 1)
HELLO = encode_hello(b"t" * 16, b"i" * 16, arena_id=b"a" * 16, arena_bytes=2**33)
OTHER = replace(REGION, layers=range(9))


def test_what_is_said_of_a_frame_comes_back_equal():
    slot_frame = Frame(sequence=5, header=HEADER, offset=2**35, payload=memoryview(b""))
    assert decode_sender_message(encode_slot_frame(5, HEADER, 2**35)) == slot_frame
    for decode in (decode_sender_message, decode_receiver_message):
        frame = decode(encode_frame(6, HEADER, memoryview(b"payload")))
        assert (frame.sequence, frame.header, frame.offset, bytes(frame.payload)) == (6, HEADER, 0, b"payload")


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (AttachState, kv_pb2.KvAttachState, "KV_ATTACH_STATE"),
        (Disposition, kv_pb2.KvDisposition, "KV_DISPOSITION"),
        (CommitState, kv_pb2.KvCommitState, "KV_COMMIT_STATE"),
    ],
)
def test_enums_have_the_numbers_of_the_wire(ours, theirs, prefix):
    assert {f"{prefix}_{member.name}": member.value for member in ours} | {f"{prefix}_UNSPECIFIED": 0} == dict(
        theirs.items()
    )


@pytest.mark.parametrize("kind", ["frame", "slot"])
def test_no_flipped_bit_in_a_header_goes_unnoticed(kind):
    message = encode_frame(6, HEADER, memoryview(b"")) if kind == "frame" else encode_slot_frame(6, HEADER, 4096)
    for bit in range(8 * len(message)):
        altered = bytearray(message)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedMessageError):
            decode_sender_message(bytes(altered))


SENT = (HELLO, encode_slot_frame(5, HEADER, 4096), encode_commit({REGION: 7}), encode_read(REGION))


@pytest.mark.parametrize("message", [*SENT, encode_frame(6, HEADER, memoryview(b""))])
def test_a_message_cut_anywhere_is_refused(message):
    for length in range(len(message)):
        with pytest.raises(MalformedMessageError):
            decode_sender_message(message[:length])


@pytest.mark.parametrize("message", [*SENT, CANCEL, ALIVE])
def test_a_message_with_more_behind_it_is_refused(message):
    with pytest.raises(MalformedMessageError):
        decode_sender_message(message + b"x")


def test_what_is_no_frame_is_short():
    """The parsed form of many small fields would take several times the bytes of the message."""
    with pytest.raises(MalformedMessageError, match="8000 bytes"):
        decode_sender_message(ALIVE * 4000)


def test_a_region_of_another_length_or_with_a_name_that_is_no_text_is_refused():
    packed = REGION.pack()
    for wrong in (packed[:-1], packed + b"x", b"", b"\xff" + packed[1:]):
        with pytest.raises(MalformedMessageError):
            decode_region(wrong)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([0, *(number << 3 | 2 for number in range(1, 7))]), st.binary(max_size=200))
def test_garbage_behind_a_known_kind_raises_nothing_but_malformed(kind, garbage):
    for others in (kv_pb2.KvSenderMessage, kv_pb2.KvReceiverMessage):
        try:
            decode_message(bytes((kind,)) + garbage, others)
        except MalformedMessageError:
            continue
