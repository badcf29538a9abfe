"""The values that both ends of a KV transfer share.

A *transfer* fills one reservation on a decode node: the KV of all tokens in
[start_token, end_token), for every layer of every plane. It has a random `transfer_id`
and is addressed to one `incarnation` of the receiving process. It ends with a commit,
which the receiver checks against the frames that arrived, or it fails as a whole and is
retried under a new id. The KV of two transfers is never mixed.

    receiver (decode node)              sender (prefill node)
    open(spec, blocks)
                                        connect → put frames → commit
    on_complete | on_failed
    close(transfer_id) → DRAINED
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import xxhash

from outrider.engine.kv_cache.planes import PlaneSpec, first_sent_token

if TYPE_CHECKING:
    from outrider.engine.kv_cache.tensor_planes import DeviceBytes

Payload: TypeAlias = "memoryview | DeviceBytes"
"""The payload of a frame: a view of bytes in main memory, or bytes on a GPU."""

ID_BYTES = 16
"""Length of transfer ids and incarnations, in bytes."""

MAX_FRAME_BYTES = 8 << 20
"""Maximum payload of a frame in one message, in bytes."""

PLANE_NAME_BYTES = 16
PACKED_REGION = struct.Struct(f"<{PLANE_NAME_BYTES}sIIIIHH")
"""Wire format of a region: the plane's name (UTF-8, zero-padded), then start and end of its layers, tokens and heads
(unsigned little-endian)."""


class DrainState(enum.Enum):
    """Whether a write may still be in flight after the end of a transfer."""

    DRAINED = "drained"  # no write is in flight
    UNKNOWN = "unknown"  # a write may be in flight, so the memory that it could touch must not be reused


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpec:
    """The content that a receiver expects in one transfer. Positions are absolute; 0 is the first prompt token.

    Planes of layers with a sliding window carry the tokens that a sequence of `end_token` tokens keeps, whatever the
    receiver has of them, because it may have the start without its window.
    """

    transfer_id: bytes  # 16 random bytes
    incarnation: bytes  # id of the receiving process, 16 random bytes
    start_token: int
    end_token: int  # exclusive; if equal to start_token, the transfer consists of its commit only
    planes: tuple[PlaneSpec, ...]

    def __post_init__(self) -> None:
        assert len(self.transfer_id) == ID_BYTES, "a transfer_id has 16 bytes"
        assert len(self.incarnation) == ID_BYTES, "an incarnation has 16 bytes"
        assert 0 <= self.start_token <= self.end_token, "tokens [start_token, end_token)"

    def first_token(self, plane: PlaneSpec) -> int:
        """Returns the first token that the transfer carries in this plane."""
        return first_sent_token(plane, self.start_token, self.end_token)

    def plane(self, name: str) -> PlaneSpec | None:
        """Returns the plane with this name; None if the transfer has no such plane."""
        return next((plane for plane in self.planes if plane.name == name), None)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of one plane: layers × tokens × heads."""

    plane: str
    layers: range
    tokens: range
    heads: range

    def is_inside(self, plane: PlaneSpec, *, start_token: int, end_token: int) -> bool:
        """Returns whether the region is a non-empty part of this plane, within these tokens."""
        return (
            0 <= self.layers.start < self.layers.stop <= plane.num_layers
            and start_token <= self.tokens.start < self.tokens.stop <= end_token
            and 0 <= self.heads.start < self.heads.stop <= plane.num_heads
        )

    def num_bytes(self, plane: PlaneSpec) -> int:
        """Returns the length of the region's payload in bytes. The region must be within this plane."""
        return len(self.layers) * len(self.tokens) * len(self.heads) * plane.bytes_per_head

    def pack(self) -> bytes:
        """Encodes the region as `PACKED_REGION`."""
        plane, layers, tokens, heads = self.plane.encode(), self.layers, self.tokens, self.heads
        assert len(plane) <= PLANE_NAME_BYTES, "a plane's name has at most 16 bytes"
        edges = layers.start, layers.stop, tokens.start, tokens.stop, heads.start, heads.stop
        return PACKED_REGION.pack(plane, *edges)

    def __str__(self) -> str:
        layers, tokens, heads = (f"{part.start}-{part.stop - 1}" for part in (self.layers, self.tokens, self.heads))
        return f"{self.plane} layers {layers} tokens {tokens} heads {heads}"


def cut_frames(
    plane: PlaneSpec, heads: range, layers: range, start_token: int, end_token: int, *, max_frame_bytes: int
) -> Iterator[Region]:
    """Cuts the region of these heads, layers and tokens into frames.

    A frame has all layers of its tokens, unless one token's data for all layers does not fit into a frame. Then the
    layers are divided, too.
    """
    per_layer = len(heads) * plane.bytes_per_head
    assert per_layer <= max_frame_bytes, "one token of one layer fits into a frame"
    num_layers = min(len(layers), max_frame_bytes // per_layer)
    num_tokens = max_frame_bytes // (num_layers * per_layer)
    for first_layer in range(layers.start, layers.stop, num_layers):
        for first_token in range(start_token, end_token, num_tokens):
            yield Region(
                plane.name,
                range(first_layer, min(first_layer + num_layers, layers.stop)),
                range(first_token, min(first_token + num_tokens, end_token)),
                heads,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """The header of a frame, which precedes its payload.

    The payload is contiguous: [num_layers, num_tokens, num_heads, head_dim] in the plane's
    dtype. Its layout does not depend on block sizes, nor on the number of devices among which
    heads are divided, so these may differ between sender and receiver.
    """

    transfer_id: bytes
    incarnation: bytes
    region: Region
    length: int  # of the payload, in bytes
    checksum: int  # `checksum_of` the payload

    @classmethod
    def of(cls, spec: TransferSpec, region: Region, payload: Payload) -> FrameHeader:
        """Makes the header of a frame of this transfer."""
        return cls(
            transfer_id=spec.transfer_id,
            incarnation=spec.incarnation,
            region=region,
            length=len(payload),
            checksum=checksum_of(payload),
        )


def checksum_of(payload: Payload) -> int:
    """Returns the payload's xxh3-64 or, on a GPU, another checksum. Both ends have the same kind of payload."""
    return xxhash.xxh3_64_intdigest(payload) if isinstance(payload, memoryview) else payload.checksum()


def frames_digest(frames: Mapping[Region, int]) -> int:
    """Returns one checksum of all frames, in any order. `frames`: the checksums of their payloads, by region."""
    return xxhash.xxh3_64_intdigest(
        b"".join(sorted(region.pack() + checksum.to_bytes(8, "little") for region, checksum in frames.items()))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """The figures of a completed transfer, measured by the receiver."""

    connector: str  # one of `CONNECTORS`
    payload_bytes: int
    seconds: float  # from the arrival of the first frame to the commit; 0 if there was no frame


class CommitState(enum.IntEnum):
    """The receiver's answer to a commit."""

    COMMITTED = 1
    INCOMPLETE = 2
    UNKNOWN = 3  # the receiver has no such transfer: it was closed, has failed or was never opened


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    state: CommitState
    complete_until: int = 0  # if INCOMPLETE: all KV before this token has arrived; end_token if only digests differ
