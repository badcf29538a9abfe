from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kv_transfer.base import CommitResult, CommitState, DrainState, FrameHeader, Region
from outrider.kv_transfer.frames import (
    ALIVE,
    CANCEL,
    NOT_HELD,
    Ack,
    Frame,
    Hello,
    Kind,
    MalformedMessageError,
    SlotFrame,
    Welcome,
    decode_receiver_message,
    decode_sender_message,
    encode_ack,
    encode_cancelled,
    encode_commit,
    encode_commit_answer,
    encode_frame,
    encode_hello,
    encode_read,
    encode_slot_frame,
    encode_welcome,
)
from outrider.kv_transfer.inbox import AttachState, Disposition

REGION = Region("latent", range(1, 9), range(100, 2**32 - 1), range(6, 2**16 - 1))
HEADER = FrameHeader(transfer_id=b"t" * 16, incarnation=b"i" * 16, region=REGION, length=2**40, checksum=2**64 - 1)
HELLO = Hello(transfer_id=b"t" * 16, incarnation=b"i" * 16, arena_id=b"a" * 16, arena_bytes=2**33)
MANIFEST = {REGION: 7, replace(REGION, layers=range(9)): 8}


def test_what_a_sender_says_comes_back_equal():
    assert decode_sender_message(encode_hello(HELLO)) == HELLO
    for manifest in (MANIFEST, {}):
        assert decode_sender_message(encode_commit(manifest)) == manifest
    assert decode_sender_message(encode_read(REGION)) == REGION
    assert decode_sender_message(CANCEL) is Kind.CANCEL
    assert decode_sender_message(ALIVE) is Kind.ALIVE


def test_what_is_said_of_a_frame_comes_back_equal():
    slot_frame = SlotFrame(sequence=5, header=HEADER, offset=2**35)
    assert decode_sender_message(encode_slot_frame(5, HEADER, 2**35)) == slot_frame
    frame = decode_sender_message(encode_frame(6, HEADER, memoryview(b"payload")))
    assert isinstance(frame, Frame)
    assert (frame.sequence, frame.header, bytes(frame.payload)) == (6, HEADER, b"payload")
    held = decode_receiver_message(encode_frame(0, HEADER, memoryview(b"payload"), kind=Kind.HELD))
    assert isinstance(held, Frame)
    assert (held.sequence, held.header, bytes(held.payload)) == (0, HEADER, b"payload")


def test_what_a_receiver_says_comes_back_equal():
    incomplete = CommitResult(state=CommitState.INCOMPLETE, missing=(REGION, REGION))
    assert decode_receiver_message(NOT_HELD) is Kind.NOT_HELD
    welcome = Welcome(state=AttachState.ATTACHED, nonce=b"n" * 16)
    assert decode_receiver_message(encode_welcome(welcome)) == welcome
    for disposition in Disposition:
        ack = Ack(sequence=2**32 - 1, disposition=disposition)
        assert decode_receiver_message(encode_ack(ack)) == ack
    assert decode_receiver_message(encode_commit_answer(incomplete)) == incomplete
    for drain in DrainState:
        assert decode_receiver_message(encode_cancelled(drain)) is drain


@pytest.mark.parametrize("kind", ["frame", "slot"])
def test_no_flipped_bit_in_a_header_goes_unnoticed(kind):
    message = encode_frame(6, HEADER, memoryview(b"")) if kind == "frame" else encode_slot_frame(6, HEADER, 4096)
    for bit in range(8, 8 * len(message)):
        altered = bytearray(message)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedMessageError):
            decode_sender_message(bytes(altered))


SENT = (encode_hello(HELLO), encode_slot_frame(5, HEADER, 4096), encode_commit(MANIFEST), encode_read(REGION))


@pytest.mark.parametrize("message", [*SENT, encode_frame(6, HEADER, memoryview(b""))])
def test_a_message_cut_anywhere_is_refused(message):
    for length in range(len(message)):
        with pytest.raises(MalformedMessageError):
            decode_sender_message(message[:length])


@pytest.mark.parametrize("message", [*SENT, CANCEL, ALIVE])
def test_a_message_with_more_behind_it_is_refused(message):
    with pytest.raises(MalformedMessageError):
        decode_sender_message(message + b"x")


def test_another_version_is_refused():
    message = bytearray(encode_hello(HELLO))
    message[1] += 1
    with pytest.raises(MalformedMessageError, match="version"):
        decode_sender_message(bytes(message))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(Kind)), st.binary(max_size=200))
def test_garbage_behind_a_known_kind_raises_nothing_but_malformed(kind, garbage):
    for decode in (decode_sender_message, decode_receiver_message):
        try:
            decode(bytes((kind,)) + garbage)
        except MalformedMessageError:
            continue
