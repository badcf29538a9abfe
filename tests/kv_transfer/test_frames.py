from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kv_transfer.base import CommitResult, CommitState, DrainState, FrameHeader, Region
from outrider.kv_transfer.frames import (
    Ack,
    Alive,
    Cancel,
    Cancelled,
    Commit,
    Frame,
    Hello,
    MalformedMessageError,
    SlotFrame,
    Welcome,
    decode_receiver_message,
    decode_sender_message,
    encode_ack,
    encode_alive,
    encode_cancel,
    encode_cancelled,
    encode_commit,
    encode_commit_answer,
    encode_frame,
    encode_hello,
    encode_slot_frame,
    encode_welcome,
)
from outrider.kv_transfer.inbox import AttachState, Disposition
from outrider.kv_transfer.manifest import ManifestEntry

REGION = Region(plane="latent", start_layer=1, end_layer=9, start_token=100, end_token=2**32 - 1)
HEADER = FrameHeader(transfer_id=b"t" * 16, incarnation=b"i" * 16, region=REGION, length=2**40, checksum=2**64 - 1)
REGION_OF_HEADS = dataclasses.replace(REGION, start_head=6, end_head=2**16 - 1)
HEADER_OF_HEADS = dataclasses.replace(HEADER, region=REGION_OF_HEADS)
HELLO = Hello(transfer_id=b"t" * 16, incarnation=b"i" * 16, arena_id=b"a" * 16, arena_bytes=2**33)
MANIFEST = (ManifestEntry(REGION, 7), ManifestEntry(REGION, 8))
MANIFEST_OF_HEADS = (ManifestEntry(REGION_OF_HEADS, 7), ManifestEntry(REGION, 8))
both_cuts = pytest.mark.parametrize("header", [HEADER, HEADER_OF_HEADS], ids=["all heads", "some heads"])


def test_what_a_sender_says_comes_back_equal():
    assert decode_sender_message(encode_hello(HELLO)) == HELLO
    for manifest in (MANIFEST, MANIFEST_OF_HEADS, ()):
        assert decode_sender_message(encode_commit(manifest)) == Commit(manifest=manifest)
    assert decode_sender_message(encode_cancel()) == Cancel()
    assert decode_sender_message(encode_alive()) == Alive()


@both_cuts
def test_what_a_sender_says_of_a_frame_comes_back_equal(header):
    slot_frame = SlotFrame(sequence=5, header=header, offset=2**35)
    assert decode_sender_message(encode_slot_frame(5, header, 2**35)) == slot_frame
    frame = decode_sender_message(encode_frame(6, header, memoryview(b"payload")))
    assert isinstance(frame, Frame)
    assert (frame.sequence, frame.header, bytes(frame.payload)) == (6, header, b"payload")


def test_frames_of_all_heads_look_as_before_there_were_ranges():
    """A node that shares its heads among no devices can be mixed with nodes that know of no ranges."""
    assert [encode_frame(6, HEADER, memoryview(b""))[0], encode_slot_frame(5, HEADER, 4096)[0]] == [2, 3]
    assert len(encode_frame(6, HEADER, memoryview(b""))) == 9 + 80
    assert [encode_commit(MANIFEST)[0], len(encode_commit(MANIFEST))] == [4, 5 + 2 * 40]


@pytest.mark.parametrize("missing", [(REGION, REGION), (REGION_OF_HEADS, REGION)])
def test_what_a_receiver_says_comes_back_equal(missing):
    incomplete = CommitResult(state=CommitState.INCOMPLETE, missing=missing)
    welcome = Welcome(state=AttachState.ATTACHED, nonce=b"n" * 16)
    assert decode_receiver_message(encode_welcome(welcome)) == welcome
    for disposition in Disposition:
        ack = Ack(sequence=2**32 - 1, disposition=disposition)
        assert decode_receiver_message(encode_ack(ack)) == ack
    assert decode_receiver_message(encode_commit_answer(incomplete)) == incomplete
    for drain in DrainState:
        assert decode_receiver_message(encode_cancelled(drain)) == Cancelled(drain=drain)


@both_cuts
@pytest.mark.parametrize("kind", ["frame", "slot"])
def test_no_flipped_bit_in_a_header_goes_unnoticed(kind, header):
    message = encode_frame(6, header, memoryview(b"")) if kind == "frame" else encode_slot_frame(6, header, 4096)
    for bit in range(8, 8 * len(message)):
        altered = bytearray(message)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedMessageError):
            decode_sender_message(bytes(altered))


@pytest.mark.parametrize(
    "message",
    [
        encode_hello(HELLO),
        encode_frame(6, HEADER, memoryview(b"")),
        encode_slot_frame(5, HEADER, 4096),
        encode_commit(MANIFEST),
        encode_frame(6, HEADER_OF_HEADS, memoryview(b"")),
        encode_slot_frame(5, HEADER_OF_HEADS, 4096),
        encode_commit(MANIFEST_OF_HEADS),
    ],
)
def test_a_message_cut_anywhere_is_refused(message):
    for length in range(len(message)):
        with pytest.raises(MalformedMessageError):
            decode_sender_message(message[:length])


def test_another_version_is_refused():
    message = bytearray(encode_hello(HELLO))
    message[1] += 1
    with pytest.raises(MalformedMessageError, match="version"):
        decode_sender_message(bytes(message))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_raises_nothing_but_malformed(garbage):
    for decode in (decode_sender_message, decode_receiver_message):
        try:
            decode(garbage)
        except MalformedMessageError:
            continue


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 7, 8, 9, 16, 17, 18, 19, 20]), st.binary(max_size=200))
def test_garbage_behind_a_known_kind_raises_nothing_but_malformed(kind, garbage):
    for decode in (decode_sender_message, decode_receiver_message):
        try:
            decode(bytes((kind,)) + garbage)
        except MalformedMessageError:
            continue
