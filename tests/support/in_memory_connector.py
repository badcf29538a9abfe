"""A connector without processes or sockets, with which protocol tests take milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from outrider.errors import AbortedError, OutriderError, PeerLostError
from outrider.kv_transfer.base import CommitResult, DrainState, FrameHeader, Region, TransferSpec, frames_digest
from outrider.kv_transfer.frames import Frame
from outrider.kv_transfer.inbox import AttachState, TransferInbox
from outrider.kv_transfer.sender import check_fetched
from outrider.kv_transfer.sender_stream import refusal_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


class InMemoryConnector:
    """Reaches inboxes of this process by their addresses."""

    name = "in_memory"

    def __init__(self, inboxes: dict[str, TransferInbox], *, max_frame_bytes: int = 1 << 20) -> None:
        self._inboxes = inboxes
        self._max_frame_bytes = max_frame_bytes

    def connect(self, address: str, spec: TransferSpec) -> InMemorySender:
        inbox = self._inboxes.get(address)
        if inbox is None:
            raise PeerLostError(f"nobody listens at {address}", node=address)
        state = inbox.attach(spec.transfer_id, spec.incarnation)
        if state is AttachState.WRONG_INCARNATION:
            raise PeerLostError(f"the process at {address} is not the one that granted the transfer", node=address)
        if state is not AttachState.ATTACHED:
            raise AbortedError(f"{address} does not expect this transfer")
        return InMemorySender(spec, inbox, max_frame_bytes=self._max_frame_bytes)

    def close(self) -> None:
        """Does nothing."""


class InMemorySender:
    """A `Sender` that writes in the caller's thread."""

    connector = InMemoryConnector.name
    keep_alive_seconds = 0.05

    def __init__(self, spec: TransferSpec, inbox: TransferInbox, *, max_frame_bytes: int) -> None:
        self._spec = spec
        self._inbox = inbox
        self.max_frame_bytes = max_frame_bytes
        self.payload_bytes = 0
        self.num_frames = 0
        self._tell_acknowledged: Callable[[int], None] = lambda _frame: None
        self._sent: dict[Region, int] = {}
        self._lock = threading.Lock()
        self._ended: OutriderError | None = None
        self._tell_end: Callable[[], None] | None = None

    def put(self, region: Region, payload: Buffer) -> None:
        self._raise_if_ended()
        view = memoryview(payload).cast("B")
        header = FrameHeader.of(self._spec, region, view)
        disposition = self._inbox.accept(header, view)
        if disposition.is_refusal:
            self._end(refusal_of(self.connector, disposition))
            self._raise_if_ended()
        self._sent[region] = header.checksum
        self.payload_bytes += len(view)
        self.num_frames += 1
        self._tell_acknowledged(self.num_frames)

    def read(self, regions: Iterable[Region], write: Callable[[Region, memoryview], None]) -> None:
        for region in regions:
            self._raise_if_ended()
            held = self._inbox.read(self._spec.transfer_id, region)
            if held is None:
                raise AbortedError("not held", reason="NOT_HELD")
            check_fetched(Frame(sequence=0, header=held[0], offset=0, payload=held[1]), self._spec, region)
            write(region, held[1])

    def keep_alive(self, *, has_progressed: bool = False) -> None:
        self._raise_if_ended()
        if has_progressed:
            self._inbox.note_progress(self._spec.transfer_id)

    def commit(self) -> CommitResult:
        self._raise_if_ended()
        return self._inbox.commit(self._spec.transfer_id, frames_digest(self._sent), connector=self.connector)

    def cancel(self) -> DrainState:
        self._end(AbortedError("the transfer was cancelled"))
        self._inbox.fail(self._spec.transfer_id, "cancelled by the sender")
        return self._inbox.wait_until_drained(self._spec.transfer_id, timeout_seconds=10.0)

    def when_ended(self, tell: Callable[[], None]) -> None:
        with self._lock:
            if self._ended is None:
                self._tell_end = tell
                return
        tell()

    def when_acknowledged(self, tell: Callable[[int], None]) -> None:
        self._tell_acknowledged = tell

    def interrupt(self) -> None:
        self._end(AbortedError("the transfer was cancelled"))

    def _end(self, error: OutriderError) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = error
            tell, self._tell_end = self._tell_end, None
        if tell is not None:
            tell()

    def _raise_if_ended(self) -> None:
        with self._lock:
            error = self._ended
        if error is not None:
            raise error
