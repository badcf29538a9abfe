"""The sending end of a transfer, for every connector. Connectors differ only in how the payload is carried."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import xxhash

from outrider.errors import AbortedError, NotSupportedError, PeerLostError
from outrider.kv_transfer.arena import Arena
from outrider.kv_transfer.base import (
    CommitResult,
    CommitState,
    DrainState,
    FrameHeader,
    Region,
    TransferSpec,
    frames_digest,
)
from outrider.kv_transfer.config import CUDA_IPC
from outrider.kv_transfer.frames import Frame
from outrider.kv_transfer.sender_stream import SenderStream

READ_AHEAD = 4
"""Maximum number of requested regions that have not been taken yet. It limits memory, as each may be a whole frame."""


class Sender:
    """Pushes one transfer's frames to the receiver that opened it. It belongs to one thread.

    `put` returns when the payload has been copied or sent, so that the caller may reuse the
    buffer. It blocks while the window of unacknowledged payload is full, so that a slow
    receiver never makes the sender's memory grow. A receiver that is silent beyond the
    progress deadline has failed, even if its TCP connection still exists.
    """

    def __init__(
        self,
        spec: TransferSpec,
        stream: SenderStream,
        *,
        connector: str,
        max_frame_bytes: int,
        arena: Arena | None,
        reopen: Callable[[], SenderStream],
    ) -> None:
        """`arena`: the arena whose slots carry the payload; None: messages carry it, which works between any two hosts.

        `reopen`: opens another stream to the same receiver, to ask for a lost answer to the commit.
        """
        self.connector = connector
        self.max_frame_bytes = max_frame_bytes  # the largest payload of one `put`
        self.payload_bytes = 0  # of all frames so far
        self._spec = spec
        self._stream = stream
        self._arena = arena
        self._reopen = reopen
        self._sent: dict[Region, int] = {}  # checksums of the frames, by region
        self._drain: DrainState | None = None
        self.keep_alive_seconds = stream.keep_alive_seconds  # between calls of `keep_alive` without a `put`
        self.keep_alive = stream.keep_alive
        self.interrupt = stream.interrupt
        self.when_ended = stream.when_ended
        self.when_acknowledged = stream.when_acknowledged

    def put(self, region: Region, payload: Any) -> None:
        """Sends one frame. `payload`: at most `max_frame_bytes`, as DeviceRows for CUDA IPC, otherwise in any buffer.

        Raises: PeerLostError if the stream ended or made no progress; AbortedError if the receiver has refused a
        frame, so that the transfer can never complete, or the whole transfer, for example because it is closed.
        """
        view = payload if self.connector == CUDA_IPC else memoryview(payload).cast("B")
        assert len(view) <= self.max_frame_bytes, "frames are cut to max_frame_bytes"
        self._stream.raise_if_ended()
        header = self._put_inline(region, view) if self._arena is None else self._put_in_slot(self._arena, region, view)
        self._sent[region] = header.checksum
        self.payload_bytes += header.length

    def _put_inline(self, region: Region, payload: memoryview) -> FrameHeader:
        """Sends the payload in the frame's message, within the window that all streams to the receiver share."""
        header = FrameHeader.of(self._spec, region, payload)
        window = self._stream.window
        self._stream.wait_for_room(len(payload), window)
        self._stream.send(header, payload, release=partial(window.give_back, len(payload)))
        return header

    def _put_in_slot(self, arena: Arena, region: Region, payload: Any) -> FrameHeader:
        """Writes the payload to the arena and sends its place. The acknowledgement frees the slot for any transfer."""
        offset = None
        while offset is None:
            self._stream.wait_for_room(1, arena.free_slots)
            offset = arena.take(self)
        header = FrameHeader.of(self._spec, region, arena.write(offset, payload))  # waits until a GPU has written it
        self._stream.send(header, None, offset=offset, release=partial(arena.release, offset))
        return header

    def read(self, regions: Iterable[Region], write: Callable[[Region, memoryview], None]) -> None:
        """Fetches the receiver's KV of tokens before `spec.start_token`. Call it before the first `put`.

        Each region is checked like a frame, then passed to `write`. Raises: PeerLostError; AbortedError if the
        receiver does not hold a region or a region was altered in transit, after which the transfer can continue.
        """
        asked: deque[Region] = deque()
        for region in regions:
            self._stream.ask(region)
            asked.append(region)
            if len(asked) == READ_AHEAD:
                self._take_held(asked.popleft(), write)
        for region in asked:
            self._take_held(region, write)

    def _take_held(self, region: Region, write: Callable[[Region, memoryview], None]) -> None:
        held = self._stream.next_fetched()
        check_fetched(held, self._spec, region)
        write(region, held.payload)

    @property
    def num_frames(self) -> int:
        """Number of frames that `put` has sent so far."""
        return self._stream.num_frames

    def settle(self) -> dict[Region, int]:
        """Ends the sending of a part, once the receiver has all its frames. Returns their checksums, by region.

        Raises: PeerLostError, AbortedError.
        """
        self._stream.wait_until_acknowledged()
        self._drain = DrainState.DRAINED
        self._stream.close()
        return self._sent

    def include(self, sent: Mapping[Region, int], *, num_bytes: int) -> None:
        """Includes what another process has settled in the commit."""
        self._sent.update(sent)
        self.payload_bytes += num_bytes

    def commit(self) -> CommitResult:
        """Commits the transfer and returns the receiver's answer. Idempotent. Raises: PeerLostError, AbortedError."""
        self._stream.raise_if_ended()
        try:
            result = self._stream.commit(frames_digest(self._sent))
        except PeerLostError:
            # Perhaps only the answer was lost. A receiver answers any number of commits.
            self._drain = DrainState.UNKNOWN
            self._abandon()
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
        """Cancels the transfer, also after a failure. Does nothing after a successful commit. Idempotent.

        Returns DRAINED if the receiver has confirmed that it no longer reads or writes anything of this transfer.
        """
        if self._drain is None:
            self._drain = self._stream.cancel()
            if self._drain is DrainState.UNKNOWN:
                self._abandon()
        return self._drain

    def _abandon(self) -> None:
        """Frees the room of messages. Quarantines slots, because an undrained receiver may still read them."""
        if self._arena is None:
            self._stream.release_all()
        else:
            self._arena.quarantine(self)


def check_fetched(held: Frame, spec: TransferSpec, region: Region) -> None:
    """Checks that a fetched frame has the requested region and is unaltered. Raises: AbortedError."""
    header, plane = held.header, spec.plane(region.plane)
    assert plane is not None, "a region of the transfer's planes"
    is_asked_for = (header.transfer_id, header.incarnation, header.region) == (
        spec.transfer_id,
        spec.incarnation,
        region,
    )
    is_whole = len(held.payload) == region.num_bytes(plane)
    if not is_asked_for or not is_whole or xxhash.xxh3_64_intdigest(held.payload) != header.checksum:
        raise AbortedError(f"KV of {region} was altered in transit", reason="HELD_KV_CORRUPT")
