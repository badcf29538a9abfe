"""The wire protocol of KV: one bidirectional gRPC stream of raw bytes for each transfer.

The sender sends a KvHello, then any number of reads, then any number of frames, KvCommit, KvCancel and KvAlive. The
receiver answers each KvHello with a KvWelcome, each read with a frame or KvNotHeld, each frame with a KvAck, KvCommit
with KvCommitAnswer, and KvCancel with KvCancelled. All messages except frames are defined in kv.proto, and none of
these begins with a zero byte. A message that does not parse raises `MalformedMessageError` before anything is looked
up or written.

    frame    0 u8, sequence u32, check u32 (xxh32 of sequence and header), header, payload
    header   transfer_id 16s, incarnation 16s, region (`PACKED_REGION`), length u64, checksum u64 (xxh3-64 of
             the payload), offset u64 of the payload in the sender's arena, or 0 if the payload follows
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeVar

import xxhash
from google.protobuf.message import DecodeError

from outrider.errors import OutriderError
from outrider.kv_transfer.base import MAX_FRAME_BYTES, PACKED_REGION, FrameHeader, Region
from outrider.v1.kv_pb2 import KvAlive, KvCancel, KvNotHeld, KvReceiverMessage, KvSenderMessage

SERVICE_NAME = "outrider.v1.KvIngest"
METHOD_NAME = "Push"
METHOD = f"/{SERVICE_NAME}/{METHOD_NAME}"
WIRE_VERSION = 3

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + 65_536
"""Maximum size of a frame with its payload, in bytes."""

MAX_OTHER_BYTES = 4096
"""Maximum size of any other message, in bytes. It is low, as many small fields take much more memory when parsed."""

CANCEL = KvSenderMessage(cancel=KvCancel()).SerializeToString()
ALIVE, PROGRESS = (KvSenderMessage(alive=KvAlive(has_progressed=has)).SerializeToString() for has in (False, True))
NOT_HELD = KvReceiverMessage(not_held=KvNotHeld()).SerializeToString()

_PREFIX = struct.Struct("<BII")
_IDS = struct.Struct("<16s16s")
_PAYLOAD = struct.Struct("<QQQ")
_REGION_AT = _PREFIX.size + _IDS.size
_PAYLOAD_AT = _REGION_AT + PACKED_REGION.size
_HEADER_END = _PAYLOAD_AT + _PAYLOAD.size

Others = TypeVar("Others", KvSenderMessage, KvReceiverMessage)


class MalformedMessageError(OutriderError):
    """A message that does not parse, or a frame whose header was altered in transit."""

    reason = "MALFORMED_KV_MESSAGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    sequence: int  # the frame's number, from 1, which its acknowledgement repeats; 0 in an answer to a read
    header: FrameHeader
    offset: int  # of the payload in the arena; 0 if the message carries it in `payload`
    payload: memoryview


def encode_frame(sequence: int, header: FrameHeader, payload: memoryview | None, *, offset: int = 0) -> bytes:
    """Encodes a frame, followed by its payload. `payload`: None if it is in the arena, at `offset`."""
    body = b"".join(
        (
            _IDS.pack(header.transfer_id, header.incarnation),
            header.region.pack(),
            _PAYLOAD.pack(header.length, header.checksum, offset),
        )
    )
    return b"".join((_PREFIX.pack(0, sequence, _check(sequence, body)), body, payload or b""))


def decode_message(message: bytes, others: type[Others]) -> Frame | Others:
    """Decodes a frame, whose payload is a view of the message, or one of `others`. Raises: MalformedMessageError."""
    try:
        if message[0] == 0:
            return _decode_frame(message)
        if len(message) > MAX_OTHER_BYTES:
            raise DecodeError("too long")
        parsed = others.FromString(message)
    except (DecodeError, struct.error, IndexError) as error:
        raise MalformedMessageError(f"not a KV message ({len(message)} bytes): {error}") from error
    if parsed.WhichOneof("message") is None:
        raise MalformedMessageError(f"a KV message of no known kind ({len(message)} bytes)")
    return parsed


def decode_region(packed: bytes | memoryview) -> Region:
    """Decodes a region. Raises: MalformedMessageError."""
    try:
        plane, *edges = PACKED_REGION.unpack(packed)
        return Region(plane.rstrip(b"\0").decode(), range(*edges[:2]), range(*edges[2:4]), range(*edges[4:]))
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"not a region ({len(packed)} bytes): {error}") from error


def _decode_frame(message: bytes) -> Frame:
    _, sequence, check = _PREFIX.unpack_from(message)
    view = memoryview(message)
    if len(message) < _HEADER_END or check != _check(sequence, view[_PREFIX.size : _HEADER_END]):
        raise MalformedMessageError("a frame's header was cut or altered")
    transfer_id, incarnation = _IDS.unpack_from(message, _PREFIX.size)
    length, checksum, offset = _PAYLOAD.unpack_from(message, _PAYLOAD_AT)
    if offset and len(message) > _HEADER_END:
        raise MalformedMessageError("a frame whose payload is in two places")
    header = FrameHeader(
        transfer_id=transfer_id,
        incarnation=incarnation,
        region=decode_region(view[_REGION_AT:_PAYLOAD_AT]),
        length=length,
        checksum=checksum,
    )
    return Frame(sequence=sequence, header=header, offset=offset, payload=view[_HEADER_END:])


def _check(sequence: int, body: bytes | memoryview) -> int:
    # Without this check, a flipped bit in a header could direct an intact payload to the wrong place.
    return xxhash.xxh32_intdigest(body, seed=sequence)
