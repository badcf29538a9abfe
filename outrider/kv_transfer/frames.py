"""The KV wire: one bidirectional gRPC stream of raw bytes for each transfer. Little-endian structs.

Sender → receiver: Hello first, then Read in any number; Frame (payload inline) or SlotFrame (payload
in the shared arena), Commit, Cancel, Alive in any number. Receiver → sender: Welcome for each
Hello, Held or NotHeld for each Read, Ack for each frame, CommitAnswer, Cancelled. A message is one
byte of kind and a body; integers are unsigned. Whatever does not parse raises
`MalformedMessageError`, before anything is looked up or written.

    region   plane 16s (UTF-8, zero-padded), start_layer u32, end_layer u32, start_token u32,
             end_token u32, start_head u16, end_head u16
    header   transfer_id 16s, incarnation 16s, region, length u64, checksum u64 (xxh3-64 of the payload)
    Frame    sequence u32, check u32 (xxh32 of sequence and header), header, payload
    Slot     sequence u32, check u32, header, offset u64 into the arena (under the check too)
    Held     as Frame, with sequence 0
    Read     region
    Commit   number u32 of entries: region, checksum u64
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from outrider.errors import OutriderError
from outrider.kv_transfer.base import MAX_FRAME_BYTES, CommitResult, CommitState, DrainState, FrameHeader, Region
from outrider.kv_transfer.coverage import Manifest
from outrider.kv_transfer.inbox import AttachState, Disposition

SERVICE_NAME = "outrider.v1.KvIngest"
METHOD_NAME = "Push"
METHOD = f"/{SERVICE_NAME}/{METHOD_NAME}"
WIRE_VERSION = 2

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + 65_536
"""A payload and its header; also bounds a manifest to about 150,000 frames."""

PLANE_NAME_BYTES = 16
NO_ARENA = b"\0" * 16


class MalformedMessageError(OutriderError):
    """A message that does not parse, or whose header was altered on the way."""

    reason = "MALFORMED_KV_MESSAGE"


class Kind(enum.IntEnum):
    """First byte of a message."""

    HELLO = 1
    FRAME = 2
    SLOT_FRAME = 3
    COMMIT = 4
    CANCEL = 5
    ALIVE = 6  # nothing to send yet; the sender's process runs
    READ = 7
    WELCOME = 16
    ACK = 17
    COMMIT_ANSWER = 18
    CANCELLED = 19
    HELD = 20
    NOT_HELD = 21  # what was asked for is not held here, or no longer, or was read already


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Which transfer, and an arena on offer. Without one: payload comes inline."""

    transfer_id: bytes
    incarnation: bytes
    arena_id: bytes = NO_ARENA
    arena_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """`nonce` is what the receiver read in the arena: proof that it has attached. `NO_ARENA`: it has not."""

    state: AttachState
    nonce: bytes = NO_ARENA


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    sequence: int  # counts a sender's frames, for the acknowledgement; 0 of a Held
    header: FrameHeader
    payload: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFrame:
    sequence: int
    header: FrameHeader
    offset: int  # of the payload in the arena


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The payload is not needed any more."""

    sequence: int
    disposition: Disposition


SenderMessage = Hello | Region | Frame | SlotFrame | Manifest | Literal[Kind.CANCEL, Kind.ALIVE]
"""A region: a Read of it, of tokens before those that the receiver expects. A manifest: a Commit."""

ReceiverMessage = Welcome | Frame | Ack | CommitResult | DrainState | Literal[Kind.NOT_HELD]
"""A frame: a Held. A drain's state: Cancelled."""

_HELLO = struct.Struct("<BB16s16s16sQ")
_REGION = struct.Struct("<16sIIIIHH")
_IDS = struct.Struct("<16s16s")
_LENGTH = struct.Struct("<QQ")
_HEADER_BYTES = _IDS.size + _REGION.size + _LENGTH.size
_PREFIX = struct.Struct("<BII")
_OFFSET = struct.Struct("<Q")
_COUNT = struct.Struct("<BI")
_CHECKSUM = struct.Struct("<Q")
_WELCOME = struct.Struct("<BB16s")
_ACK = struct.Struct("<BIB")
_ANSWER = struct.Struct("<BBI")
_CANCELLED = struct.Struct("<BB")
_DRAINS = (DrainState.DRAINED, DrainState.UNKNOWN)

CANCEL = bytes((Kind.CANCEL,))
ALIVE = bytes((Kind.ALIVE,))
NOT_HELD = bytes((Kind.NOT_HELD,))


def encode_frame(sequence: int, header: FrameHeader, payload: memoryview, *, kind: Kind = Kind.FRAME) -> bytes:
    """A Frame, or a Held, with its payload behind it: one copy."""
    body = _encode_header(header)
    return b"".join((_PREFIX.pack(kind, sequence, _check(sequence, body)), body, payload))


def encode_slot_frame(sequence: int, header: FrameHeader, offset: int) -> bytes:
    body = _encode_header(header) + _OFFSET.pack(offset)
    return _PREFIX.pack(Kind.SLOT_FRAME, sequence, _check(sequence, body)) + body


def encode_hello(hello: Hello) -> bytes:
    return _HELLO.pack(
        Kind.HELLO, WIRE_VERSION, hello.transfer_id, hello.incarnation, hello.arena_id, hello.arena_bytes
    )


def encode_read(region: Region) -> bytes:
    return bytes((Kind.READ,)) + _encode_region(region)


def encode_commit(manifest: Manifest) -> bytes:
    parts = [_COUNT.pack(Kind.COMMIT, len(manifest))]
    for region, checksum in manifest.items():
        parts += (_encode_region(region), _CHECKSUM.pack(checksum))
    return b"".join(parts)


def encode_welcome(welcome: Welcome) -> bytes:
    return _WELCOME.pack(Kind.WELCOME, welcome.state, welcome.nonce)


def encode_ack(ack: Ack) -> bytes:
    return _ACK.pack(Kind.ACK, ack.sequence, ack.disposition)


def encode_commit_answer(result: CommitResult) -> bytes:
    regions = b"".join(map(_encode_region, result.missing))
    return _ANSWER.pack(Kind.COMMIT_ANSWER, result.state.value, len(result.missing)) + regions


def encode_cancelled(drain: DrainState) -> bytes:
    return _CANCELLED.pack(Kind.CANCELLED, _DRAINS.index(drain))


def decode_sender_message(message: bytes) -> SenderMessage:
    """What a receiver gets. `Frame.payload` is a view of the message. Raises: MalformedMessageError."""
    try:
        kind = message[0]
        if kind == Kind.FRAME:
            return _decode_frame(message)
        if kind == Kind.SLOT_FRAME:
            return _decode_slot_frame(message)
        if message == ALIVE:
            return Kind.ALIVE
        if kind == Kind.READ:
            return _region_of(_REGION.unpack(message[1:]))
        if kind == Kind.COMMIT:
            return _decode_manifest(message)
        if message == CANCEL:
            return Kind.CANCEL
        if kind == Kind.HELLO:
            return _decode_hello(message)
    except (struct.error, ValueError, IndexError) as error:
        raise MalformedMessageError(f"not a KV message ({len(message)} bytes): {error}") from error
    raise MalformedMessageError(f"unknown kind {message[0]}")


def decode_receiver_message(message: bytes) -> ReceiverMessage:
    """What a sender gets. Raises: MalformedMessageError."""
    try:
        kind = message[0]
        if kind == Kind.ACK:
            _, sequence, disposition = _ACK.unpack(message)
            return Ack(sequence=sequence, disposition=Disposition(disposition))
        if kind == Kind.WELCOME:
            _, state, nonce = _WELCOME.unpack(message)
            return Welcome(state=AttachState(state), nonce=nonce)
        if kind == Kind.HELD:
            return _decode_frame(message)
        if message == NOT_HELD:
            return Kind.NOT_HELD
        if kind == Kind.COMMIT_ANSWER:
            return _decode_answer(message)
        if kind == Kind.CANCELLED:
            return _DRAINS[_CANCELLED.unpack(message)[1]]
    except (struct.error, ValueError, IndexError) as error:
        raise MalformedMessageError(f"not a KV answer ({len(message)} bytes): {error}") from error
    raise MalformedMessageError(f"unknown kind {message[0]}")


def _decode_hello(message: bytes) -> Hello:
    _, version, transfer_id, incarnation, arena_id, arena_bytes = _HELLO.unpack(message)
    if version != WIRE_VERSION:
        raise MalformedMessageError(f"KV wire version {version}, this side speaks {WIRE_VERSION}")
    return Hello(transfer_id=transfer_id, incarnation=incarnation, arena_id=arena_id, arena_bytes=arena_bytes)


def _decode_frame(message: bytes) -> Frame:
    head_end = _PREFIX.size + _HEADER_BYTES
    sequence, header = _decode_header(message, head_end)
    return Frame(sequence=sequence, header=header, payload=memoryview(message)[head_end:])


def _decode_slot_frame(message: bytes) -> SlotFrame:
    if len(message) != _PREFIX.size + _HEADER_BYTES + _OFFSET.size:
        raise MalformedMessageError("a slot frame of the wrong length")
    sequence, header = _decode_header(message, len(message))
    (offset,) = _OFFSET.unpack_from(message, len(message) - _OFFSET.size)
    return SlotFrame(sequence=sequence, header=header, offset=offset)


def _decode_header(message: bytes, head_end: int) -> tuple[int, FrameHeader]:
    """The sequence number and the header; everything up to `head_end` is under the check."""
    _, sequence, check = _PREFIX.unpack_from(message)
    if len(message) < head_end or check != _check(sequence, memoryview(message)[_PREFIX.size : head_end]):
        raise MalformedMessageError("a frame's header was cut or altered")
    transfer_id, incarnation = _IDS.unpack_from(message, _PREFIX.size)
    region_at = _PREFIX.size + _IDS.size
    length, checksum = _LENGTH.unpack_from(message, region_at + _REGION.size)
    header = FrameHeader(
        transfer_id=transfer_id,
        incarnation=incarnation,
        region=_region_of(_REGION.unpack_from(message, region_at)),
        length=length,
        checksum=checksum,
    )
    return sequence, header


def _decode_manifest(message: bytes) -> Manifest:
    _, count = _COUNT.unpack_from(message)
    size = _REGION.size + _CHECKSUM.size
    if len(message) != _COUNT.size + count * size:
        raise MalformedMessageError("a manifest of the wrong length")
    return {
        _region_of(_REGION.unpack_from(message, offset)): _CHECKSUM.unpack_from(message, offset + _REGION.size)[0]
        for offset in range(_COUNT.size, len(message), size)
    }


def _decode_answer(message: bytes) -> CommitResult:
    _, state, count = _ANSWER.unpack_from(message)
    if len(message) != _ANSWER.size + count * _REGION.size:
        raise MalformedMessageError("a commit's answer of the wrong length")
    missing = tuple(_region_of(fields) for fields in _REGION.iter_unpack(message[_ANSWER.size :]))
    return CommitResult(state=CommitState(state), missing=missing)


def _encode_header(header: FrameHeader) -> bytes:
    return (
        _IDS.pack(header.transfer_id, header.incarnation)
        + _encode_region(header.region)
        + _LENGTH.pack(header.length, header.checksum)
    )


def _check(sequence: int, body: bytes | memoryview) -> int:
    # A flipped bit in a header must not steer good payload to a wrong place.
    return xxhash.xxh32_intdigest(body, seed=sequence)


def _encode_region(region: Region) -> bytes:
    plane = region.plane.encode()
    assert len(plane) <= PLANE_NAME_BYTES, "a plane's name has at most 16 bytes"
    layers, tokens, heads = region.layers, region.tokens, region.heads
    return _REGION.pack(plane, layers.start, layers.stop, tokens.start, tokens.stop, heads.start, heads.stop)


def _region_of(fields: tuple[Any, ...]) -> Region:
    """Of the fields of `_REGION`."""
    plane, *edges = fields
    return Region(plane.rstrip(b"\0").decode(), range(*edges[:2]), range(*edges[2:4]), range(*edges[4:]))
