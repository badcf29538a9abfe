"""The KV wire: one bidirectional gRPC stream of raw bytes for each transfer. Little-endian structs.

Sender → receiver: Hello first, then Frame (payload inline) or SlotFrame (payload in the
shared arena), Commit, Cancel, Alive in any number. Receiver → sender: Welcome for each
Hello, Ack for each frame, CommitAnswer, Cancelled. A message is one byte of kind and a
body; integers are unsigned. Whatever does not parse raises `MalformedMessageError`,
before anything is looked up or written.

    header   transfer_id 16s, incarnation 16s, plane 16s (UTF-8, zero-padded),
             start_layer u32, end_layer u32, start_token u32, end_token u32,
             length u64, checksum u64 (xxh3-64 of the payload)
    heads    start_head u16, end_head u16: behind the header in kinds "of heads", which senders use
             whose frames have some of the heads only; other frames have all
    Frame    sequence u32, check u32 (xxh32 of sequence and header), header, [heads], payload
    Slot     sequence u32, check u32, header, [heads], offset u64 into the arena (under the check too)
    Commit   number u32 of entries: region (as in the header), checksum u64, [heads]
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash

from outrider.errors import OutriderError
from outrider.kv_transfer.base import CommitResult, CommitState, DrainState, FrameHeader, Region
from outrider.kv_transfer.inbox import AttachState, Disposition
from outrider.kv_transfer.manifest import Manifest, ManifestEntry

SERVICE_NAME = "outrider.v1.KvIngest"
METHOD_NAME = "Push"
METHOD = f"/{SERVICE_NAME}/{METHOD_NAME}"
WIRE_VERSION = 1

MAX_FRAME_BYTES = 8 << 20
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
    ALIVE = 6
    FRAME_OF_HEADS = 7
    SLOT_FRAME_OF_HEADS = 8
    COMMIT_OF_HEADS = 9
    WELCOME = 16
    ACK = 17
    COMMIT_ANSWER = 18
    CANCELLED = 19
    COMMIT_ANSWER_OF_HEADS = 20


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
    sequence: int  # counts a sender's frames, for the acknowledgement
    header: FrameHeader
    payload: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFrame:
    sequence: int
    header: FrameHeader
    offset: int  # of the payload in the arena


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Cancel:
    pass


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing to send yet; the sender's process runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The payload is not needed any more."""

    sequence: int
    disposition: Disposition


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    drain: DrainState


SenderMessage = Hello | Frame | SlotFrame | Commit | Cancel | Alive
ReceiverMessage = Welcome | Ack | CommitResult | Cancelled

_HELLO = struct.Struct("<BB16s16s16sQ")
_REGION = struct.Struct("<16sIIII")
_HEADER = struct.Struct("<16s16s16sIIIIQQ")
_HEADS = struct.Struct("<HH")
_PREFIX = struct.Struct("<BII")
_OFFSET = struct.Struct("<Q")
_COUNT = struct.Struct("<BI")
_CHECKSUM = struct.Struct("<Q")
_WELCOME = struct.Struct("<BB16s")
_ACK = struct.Struct("<BIB")
_ANSWER = struct.Struct("<BBI")
_CANCELLED = struct.Struct("<BB")
_DRAINS = (DrainState.DRAINED, DrainState.UNKNOWN)


def encode_frame(sequence: int, header: FrameHeader, payload: memoryview) -> bytes:
    """A Frame with its payload behind it: one copy."""
    kind = Kind.FRAME if header.region.has_all_heads else Kind.FRAME_OF_HEADS
    body = _encode_header(header)
    return b"".join((_PREFIX.pack(kind, sequence, _check(sequence, body)), body, payload))


def encode_slot_frame(sequence: int, header: FrameHeader, offset: int) -> bytes:
    kind = Kind.SLOT_FRAME if header.region.has_all_heads else Kind.SLOT_FRAME_OF_HEADS
    body = _encode_header(header) + _OFFSET.pack(offset)
    return _PREFIX.pack(kind, sequence, _check(sequence, body)) + body


def encode_hello(hello: Hello) -> bytes:
    return _HELLO.pack(
        Kind.HELLO, WIRE_VERSION, hello.transfer_id, hello.incarnation, hello.arena_id, hello.arena_bytes
    )


def encode_commit(manifest: Manifest) -> bytes:
    of_heads = not all(entry.region.has_all_heads for entry in manifest)
    parts = [_COUNT.pack(Kind.COMMIT_OF_HEADS if of_heads else Kind.COMMIT, len(manifest))]
    for entry in manifest:
        parts += (_encode_region(entry.region), _CHECKSUM.pack(entry.checksum))
        if of_heads:
            parts.append(_encode_heads(entry.region))
    return b"".join(parts)


def encode_cancel() -> bytes:
    return bytes((Kind.CANCEL,))


def encode_alive() -> bytes:
    return bytes((Kind.ALIVE,))


def encode_welcome(welcome: Welcome) -> bytes:
    return _WELCOME.pack(Kind.WELCOME, welcome.state, welcome.nonce)


def encode_ack(ack: Ack) -> bytes:
    return _ACK.pack(Kind.ACK, ack.sequence, ack.disposition)


def encode_commit_answer(result: CommitResult) -> bytes:
    of_heads = not all(region.has_all_heads for region in result.missing)
    kind = Kind.COMMIT_ANSWER_OF_HEADS if of_heads else Kind.COMMIT_ANSWER
    regions = b"".join(
        _encode_region(region) + (_encode_heads(region) if of_heads else b"") for region in result.missing
    )
    return _ANSWER.pack(kind, result.state.value, len(result.missing)) + regions


def encode_cancelled(drain: DrainState) -> bytes:
    return _CANCELLED.pack(Kind.CANCELLED, _DRAINS.index(drain))


def decode_sender_message(message: bytes) -> SenderMessage:
    """What a receiver gets. `Frame.payload` is a view of the message. Raises: MalformedMessageError."""
    try:
        return _decode_sender_message(message)
    except (struct.error, ValueError, IndexError) as error:
        raise MalformedMessageError(f"not a KV message ({len(message)} bytes): {error}") from error


def _decode_sender_message(message: bytes) -> SenderMessage:
    kind = message[0]
    if kind in (Kind.FRAME, Kind.SLOT_FRAME, Kind.FRAME_OF_HEADS, Kind.SLOT_FRAME_OF_HEADS):
        return _decode_frame(kind, message)
    if kind == Kind.ALIVE:
        return Alive()
    if kind in (Kind.COMMIT, Kind.COMMIT_OF_HEADS):
        return Commit(manifest=_decode_manifest(message, of_heads=kind == Kind.COMMIT_OF_HEADS))
    if kind == Kind.CANCEL:
        return Cancel()
    if kind == Kind.HELLO:
        _, version, transfer_id, incarnation, arena_id, arena_bytes = _HELLO.unpack(message)
        if version != WIRE_VERSION:
            raise MalformedMessageError(f"KV wire version {version}, this side speaks {WIRE_VERSION}")
        return Hello(transfer_id=transfer_id, incarnation=incarnation, arena_id=arena_id, arena_bytes=arena_bytes)
    raise MalformedMessageError(f"unknown kind {kind}")


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
        if kind in (Kind.COMMIT_ANSWER, Kind.COMMIT_ANSWER_OF_HEADS):
            return _decode_answer(message, of_heads=kind == Kind.COMMIT_ANSWER_OF_HEADS)
        if kind == Kind.CANCELLED:
            return Cancelled(drain=_DRAINS[_CANCELLED.unpack(message)[1]])
    except (struct.error, ValueError, IndexError) as error:
        raise MalformedMessageError(f"not a KV answer ({len(message)} bytes): {error}") from error
    raise MalformedMessageError(f"unknown kind {message[0]}")


def _decode_frame(kind: int, message: bytes) -> Frame | SlotFrame:
    _, sequence, check = _PREFIX.unpack_from(message)
    is_slot = kind in (Kind.SLOT_FRAME, Kind.SLOT_FRAME_OF_HEADS)
    of_heads = kind in (Kind.FRAME_OF_HEADS, Kind.SLOT_FRAME_OF_HEADS)
    header_end = _PREFIX.size + _HEADER.size
    head_end = header_end + of_heads * _HEADS.size + is_slot * _OFFSET.size
    view = memoryview(message)
    if len(message) < head_end or check != _check(sequence, view[_PREFIX.size : head_end]):
        raise MalformedMessageError("a frame's header was cut or altered")
    transfer_id, incarnation, plane, start_layer, end_layer, start_token, end_token, length, checksum = (
        _HEADER.unpack_from(message, _PREFIX.size)
    )
    start_head, end_head = _decode_heads(message, header_end) if of_heads else (0, 0)
    header = FrameHeader(
        transfer_id=transfer_id,
        incarnation=incarnation,
        region=Region(
            plane=_decode_name(plane),
            start_layer=start_layer,
            end_layer=end_layer,
            start_token=start_token,
            end_token=end_token,
            start_head=start_head,
            end_head=end_head,
        ),
        length=length,
        checksum=checksum,
    )
    if not is_slot:
        return Frame(sequence=sequence, header=header, payload=view[head_end:])
    if len(message) != head_end:
        raise MalformedMessageError("bytes behind a slot frame")
    (offset,) = _OFFSET.unpack_from(message, head_end - _OFFSET.size)
    return SlotFrame(sequence=sequence, header=header, offset=offset)


def _decode_manifest(message: bytes, *, of_heads: bool) -> Manifest:
    _, count = _COUNT.unpack_from(message)
    heads_at = _REGION.size + _CHECKSUM.size
    size = heads_at + of_heads * _HEADS.size
    if len(message) != _COUNT.size + count * size:
        raise MalformedMessageError("a manifest of the wrong length")
    return tuple(
        ManifestEntry(
            _decode_region(message, offset, heads_at=offset + heads_at if of_heads else None),
            _CHECKSUM.unpack_from(message, offset + _REGION.size)[0],
        )
        for offset in range(_COUNT.size, len(message), size)
    )


def _decode_answer(message: bytes, *, of_heads: bool) -> CommitResult:
    _, state, count = _ANSWER.unpack_from(message)
    size = _REGION.size + of_heads * _HEADS.size
    if len(message) != _ANSWER.size + count * size:
        raise MalformedMessageError("a commit's answer of the wrong length")
    missing = tuple(
        _decode_region(message, offset, heads_at=offset + _REGION.size if of_heads else None)
        for offset in range(_ANSWER.size, len(message), size)
    )
    return CommitResult(state=CommitState(state), missing=missing)


def _encode_header(header: FrameHeader) -> bytes:
    region = header.region
    encoded = _HEADER.pack(
        header.transfer_id,
        header.incarnation,
        _encode_name(region.plane),
        region.start_layer,
        region.end_layer,
        region.start_token,
        region.end_token,
        header.length,
        header.checksum,
    )
    return encoded if region.has_all_heads else encoded + _encode_heads(region)


def _check(sequence: int, body: bytes | memoryview) -> int:
    # A flipped bit in a header must not steer good payload to a wrong place.
    return xxhash.xxh32_intdigest(body, seed=sequence)


def _encode_region(region: Region) -> bytes:
    return _REGION.pack(
        _encode_name(region.plane), region.start_layer, region.end_layer, region.start_token, region.end_token
    )


def _encode_heads(region: Region) -> bytes:
    return _HEADS.pack(region.start_head, region.end_head)


def _decode_heads(message: bytes, offset: int) -> tuple[int, int]:
    start_head, end_head = _HEADS.unpack_from(message, offset)
    return start_head, end_head


def _decode_region(message: bytes, offset: int, *, heads_at: int | None) -> Region:
    plane, start_layer, end_layer, start_token, end_token = _REGION.unpack_from(message, offset)
    start_head, end_head = (0, 0) if heads_at is None else _decode_heads(message, heads_at)
    return Region(
        plane=_decode_name(plane),
        start_layer=start_layer,
        end_layer=end_layer,
        start_token=start_token,
        end_token=end_token,
        start_head=start_head,
        end_head=end_head,
    )


def _encode_name(name: str) -> bytes:
    encoded = name.encode()
    assert len(encoded) <= PLANE_NAME_BYTES, "a plane's name has at most 16 bytes"
    return encoded


def _decode_name(name: bytes) -> str:
    return name.rstrip(b"\0").decode()
