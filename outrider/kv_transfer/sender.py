"""The sender of every connector: they differ only in how a payload travels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import xxhash

from outrider.errors import AbortedError, NotSupportedError, PeerLostError
from outrider.kv_transfer.base import (
    CommitResult,
    CommitState,
    DrainState,
    FrameHeader,
    Payload,
    Region,
    TransferSpec,
    frames_digest,
)
from outrider.kv_transfer.config import CUDA_IPC
from outrider.kv_transfer.frames import Frame
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.kv_transfer.sender_stream import SenderStream

READ_AHEAD = 4
"""Regions that are asked for before the first of them has come: memory is bounded by as many frames."""


class Carrier(Protocol):
    """How payload travels along a stream."""

    name: str
    max_frame_bytes: int

    def send(self, stream: SenderStream, header: FrameHeader, payload: Payload) -> None:
        """Blocks for room. The payload is the caller's again at the return. Raises: PeerLostError, AbortedError."""

    def abandon(self, stream: SenderStream) -> None:
        """The receiver was not drained: what it may still read is never written again."""


class Sender:
    """Pushes one transfer's frames to the receiver that opened it. One owner, one thread.

    `put` returns when the payload has been copied or sent: the buffer belongs to the caller
    again. It blocks while the bytes that the receiver has not acknowledged exceed the
    connector's bound, so a slow receiver never makes the sender's memory grow. Silence
    beyond the progress deadline is a failure, whatever TCP says.
    """

    def __init__(
        self, spec: TransferSpec, stream: SenderStream, carrier: Carrier, *, reopen: Callable[[], SenderStream]
    ) -> None:
        """`reopen`: another stream to the same receiver, to ask for a commit's lost answer."""
        self.connector = carrier.name
        self.max_frame_bytes = carrier.max_frame_bytes  # the largest payload of one `put`
        self.payload_bytes = 0  # put so far
        self._spec = spec
        self._stream = stream
        self._carrier = carrier
        self._reopen = reopen
        self._sent: dict[Region, int] = {}  # checksums of the payloads
        self._drain: DrainState | None = None
        self.keep_alive_seconds = stream.keep_alive_seconds  # how often to call `keep_alive` while nothing is put
        self.keep_alive = stream.keep_alive
        self.interrupt = stream.interrupt
        self.when_ended = stream.when_ended
        self.when_acknowledged = stream.when_acknowledged

    def put(self, region: Region, payload: Any) -> None:
        """Sends one frame of at most `max_frame_bytes`: DeviceBytes by CUDA IPC, else any buffer.

        Raises: PeerLostError (stream broken or no progress), AbortedError (the receiver
        refuses the transfer: closed, failed or another's; or it refused a frame, by whatever
        reason: a transfer that lacks one never completes).
        """
        view: Payload = payload if self.connector == CUDA_IPC else memoryview(payload).cast("B")
        assert len(view) <= self.max_frame_bytes, "frames are cut to max_frame_bytes"
        header = FrameHeader.of(self._spec, region, view)
        self._stream.raise_if_ended()
        self._carrier.send(self._stream, header, view)
        self._sent[region] = header.checksum
        self.payload_bytes += len(view)

    def read(self, regions: Iterable[Region], blocks: ReservedBlocks) -> None:
        """Fetches KV that the receiver holds of tokens before `spec.start_token`; before the first `put`.

        Each region is checked as a frame would be, then written. Raises: AbortedError (not held there, or
        altered on the way: the transfer goes on without), PeerLostError.
        """
        asked: deque[Region] = deque()
        for region in regions:
            self._stream.ask(region)
            asked.append(region)
            if len(asked) == READ_AHEAD:
                self._take_held(asked.popleft(), blocks)
        for region in asked:
            self._take_held(region, blocks)

    def _take_held(self, region: Region, blocks: ReservedBlocks) -> None:
        held = self._stream.next_held()
        check_held(held, self._spec, region)
        blocks.write(region, held.payload)

    @property
    def num_frames(self) -> int:
        """That were put."""
        return self._stream.num_frames

    def commit(self) -> CommitResult:
        """Waits for every acknowledgement, then asks whether the transfer is complete. Idempotent.

        Raises: PeerLostError.
        """
        self._stream.raise_if_ended()
        try:
            result = self._stream.commit(frames_digest(self._sent))
        except PeerLostError:
            # The answer may be what was lost: a commit may be asked for any number of times.
            self._drain = DrainState.UNKNOWN
            self._carrier.abandon(self._stream)
            self._stream.close()
            result = self._commit_again()
        if result.state is CommitState.COMMITTED:
            self._drain = DrainState.DRAINED
            self._stream.close()
        return result

    def _commit_again(self) -> CommitResult:
        stream = self._reopen()
        try:
            if stream.hello(self._spec) is None:
                raise NotSupportedError(f"KV receiver {stream.address} does not take this connector")
            return stream.commit(frames_digest(self._sent))
        finally:
            stream.close()

    def cancel(self) -> DrainState:
        """Gives the transfer up; also after a failure, and after a commit (then only frees). Idempotent.

        DRAINED: the receiver has confirmed that it reads and writes nothing of this transfer any more.
        """
        if self._drain is None:
            self._drain = self._stream.cancel()
            if self._drain is DrainState.UNKNOWN:
                self._carrier.abandon(self._stream)
        return self._drain


def check_held(held: Frame, spec: TransferSpec, region: Region) -> None:
    """Raises: AbortedError unless this is what was asked for, unaltered."""
    header, plane = held.header, spec.plane(region.plane)
    assert plane is not None, "a region of the transfer's planes"
    is_asked_for = (header.transfer_id, header.incarnation, header.region) == (
        spec.transfer_id,
        spec.incarnation,
        region,
    )
    is_whole = len(held.payload) == region.num_bytes(plane)
    if not is_asked_for or not is_whole or xxhash.xxh3_64_intdigest(held.payload) != header.checksum:
        raise AbortedError(f"KV of {region} was altered on the way", reason="HELD_KV_CORRUPT")
