"""The values that both ends of a KV transfer share.

A *transfer* fills one reservation on a decode node: every token of
[start_token, end_token), of every layer, of every plane. It is named by a random
`transfer_id` and addressed to one `incarnation` of the receiving process; it ends by a
commit that is checked against what arrived, or it fails as a whole and is retried under
a new id. KV of two transfers is never mixed.

    receiver (decode node)              sender (prefill node)
    open(spec, sink)
                                        connect → put frames → commit
    on_complete | on_failed
    close(transfer_id) → DRAINED
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import xxhash

from outrider.engine.kv_cache.planes import PlaneSpec

if TYPE_CHECKING:
    from outrider.engine.kv_cache.tensor_planes import DeviceBytes

Payload: TypeAlias = "memoryview | DeviceBytes"
"""Of a frame: a view of bytes, or bytes on a GPU."""

ID_BYTES = 16
"""Length of transfer ids and incarnations."""

MAX_FRAME_BYTES = 8 << 20
"""Bound on the payload of one frame, in bytes."""

PLANE_NAME_BYTES = 16
PACKED_REGION = struct.Struct(f"<{PLANE_NAME_BYTES}sIIIIHH")
"""Plane (UTF-8, zero-padded), layers, tokens and heads from start to end (exclusive). Little-endian, unsigned."""


class DrainState(enum.Enum):
    """Whether a write may still be in flight after the end of a transfer."""

    DRAINED = "drained"  # no byte is written any more
    UNKNOWN = "unknown"  # one may be: whatever it could touch must not be reused


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpec:
    """What a receiver expects of one transfer. Positions are absolute, 0 = first prompt token."""

    transfer_id: bytes  # 16 random bytes
    incarnation: bytes  # of the receiving process, 16 random bytes
    start_token: int
    end_token: int  # exclusive; equal to start_token: nothing but the commit is expected
    planes: tuple[PlaneSpec, ...]

    def __post_init__(self) -> None:
        assert len(self.transfer_id) == ID_BYTES, "a transfer_id has 16 bytes"
        assert len(self.incarnation) == ID_BYTES, "an incarnation has 16 bytes"
        assert 0 <= self.start_token <= self.end_token, "tokens [start_token, end_token)"

    def plane(self, name: str) -> PlaneSpec | None:
        """Returns the plane of that name, if the transfer has one."""
        return next((plane for plane in self.planes if plane.name == name), None)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of one plane: layers × tokens × heads."""

    plane: str
    layers: range
    tokens: range
    heads: range

    def is_inside(self, plane: PlaneSpec, *, start_token: int, end_token: int) -> bool:
        """Returns whether it is a non-empty part of that plane, within these tokens."""
        return (
            0 <= self.layers.start < self.layers.stop <= plane.num_layers
            and start_token <= self.tokens.start < self.tokens.stop <= end_token
            and 0 <= self.heads.start < self.heads.stop <= plane.num_heads
        )

    def num_bytes(self, plane: PlaneSpec) -> int:
        """Returns the length of the region's payload in bytes. The region lies within that plane."""
        return len(self.layers) * len(self.tokens) * len(self.heads) * plane.bytes_per_head

    def pack(self) -> bytes:
        """Returns the region as `PACKED_REGION`."""
        plane, layers, tokens, heads = self.plane.encode(), self.layers, self.tokens, self.heads
        assert len(plane) <= PLANE_NAME_BYTES, "a plane's name has at most 16 bytes"
        edges = layers.start, layers.stop, tokens.start, tokens.stop, heads.start, heads.stop
        return PACKED_REGION.pack(plane, *edges)

    def __str__(self) -> str:
        layers, tokens, heads = (f"{part.start}-{part.stop - 1}" for part in (self.layers, self.tokens, self.heads))
        return f"{self.plane} layers {layers} tokens {tokens} heads {heads}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """What precedes a frame's payload.

    The payload is contiguous, layer after layer, token-major within each:
    [num_layers, num_tokens, heads, head_dim] in the plane's dtype, so that block sizes, and the
    numbers of devices that share the heads, may differ on both sides.
    """

    transfer_id: bytes
    incarnation: bytes
    region: Region
    length: int  # bytes of payload
    checksum: int  # `checksum_of` the payload

    @classmethod
    def of(cls, spec: TransferSpec, region: Region, payload: Payload) -> FrameHeader:
        """Makes the header of a frame of that transfer."""
        return cls(
            transfer_id=spec.transfer_id,
            incarnation=spec.incarnation,
            region=region,
            length=len(payload),
            checksum=checksum_of(payload),
        )


def checksum_of(payload: Payload) -> int:
    """Returns xxh3-64, or what a GPU can compute. Both ends of a transfer have payloads of one kind."""
    return xxhash.xxh3_64_intdigest(payload) if isinstance(payload, memoryview) else payload.checksum()


def frames_digest(frames: Mapping[Region, int]) -> int:
    """Returns one checksum of frames in any order, given as the checksums of their payloads by region."""
    return xxhash.xxh3_64_intdigest(
        b"".join(sorted(region.pack() + checksum.to_bytes(8, "little") for region, checksum in frames.items()))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """How a completed transfer went, as the receiver saw it."""

    connector: str  # one of `CONNECTORS`
    payload_bytes: int
    seconds: float  # first frame received to commit; 0 when there was no frame


class CommitState(enum.IntEnum):
    """The receiver's answer to a commit."""

    COMMITTED = 1
    INCOMPLETE = 2
    UNKNOWN = 3  # no such transfer here: closed, failed or never opened


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    state: CommitState
    complete_until: int = 0  # INCOMPLETE: before this token nothing is missing; at the end, other frames were sent
