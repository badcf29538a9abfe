"""The sender of every connector. Connectors differ only in how a payload travels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
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
"""Number of regions that are asked for before the first of them has come. It bounds the memory, in frames."""


class Sender:
    """Pushes one transfer's frames to the receiver that opened it. One owner, one thread.

    `put` returns when the payload has been copied or sent: the buffer belongs to the caller
    again. It blocks while the bytes that the receiver has not acknowledged exceed the
    connector's bound, so a slow receiver never makes the sender's memory grow. Silence
    beyond the progress deadline is a failure, whatever TCP says.
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
        """`arena`: payload goes into its slots; None: along the stream, a message for each frame, as works everywhere.

        `reopen`: another stream to the same receiver, to ask for a commit's lost answer.
        """
        self.connector = connector
        self.max_frame_bytes = max_frame_bytes  # the largest payload of one `put`
        self.payload_bytes = 0  # put so far
        self._spec = spec
        self._stream = stream
        self._arena = arena
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
        if self._arena is None:
            assert isinstance(view, memoryview), "bytes on a GPU go into an arena"
            self._put_inline(header, view)
        else:
            self._put_in_slot(self._arena, header, view)
        self._sent[region] = header.checksum
        self.payload_bytes += len(view)

    def _put_inline(self, header: FrameHeader, payload: memoryview) -> None:
        """Sends the payload in the frame's message. The window of all streams to the receiver bounds what it owes."""
        window = self._stream.window
        self._stream.wait_for_room(len(payload), window)
        self._stream.send(header, payload, release=partial(window.give_back, len(payload)))

    def _put_in_slot(self, arena: Arena, header: FrameHeader, payload: Payload) -> None:
        """Sends the place of the payload; an acknowledged slot is free for any transfer to the same receiver."""
        offset = None
        while offset is None:
            self._stream.wait_for_room(1, arena.free_slots)
            offset = arena.take(self)
        arena.write(offset, payload)
        self._stream.send(header, None, offset=offset, release=partial(arena.release, offset))

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
        """The number of frames that were put."""
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
        """Gives the transfer up, also after a failure. After a commit it only frees. Idempotent.

        DRAINED: the receiver has confirmed that it reads and writes nothing of this transfer any more.
        """
        if self._drain is None:
            self._drain = self._stream.cancel()
            if self._drain is DrainState.UNKNOWN:
                self._abandon()
        return self._drain

    def _abandon(self) -> None:
        """The receiver was not drained. Slots that it may still read are never written again; messages are copies."""
        if self._arena is None:
            self._stream.release_all()
        else:
            self._arena.quarantine(self)


def check_held(held: Frame, spec: TransferSpec, region: Region) -> None:
    """Checks that this is the frame that was asked for, unaltered. Raises: AbortedError."""
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
