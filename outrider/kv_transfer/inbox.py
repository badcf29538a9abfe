"""The receiver's side of the protocol, without any transport: transfers, their frames and how they end.

Every connector ends here, so its rules hold for all of them:

- a frame is looked up by its own header; another transfer's, another incarnation's, or
  one of a transfer that has ended, is dropped and counted;
- bounds, length and checksum are checked before a byte is written;
- what has been written is never written again: an equal frame is a duplicate, another
  one for the same cells is refused;
- after `close` has returned DRAINED nothing is written or read any more.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.faults import fault_point
from outrider.kv_transfer.base import (
    MAX_FRAME_BYTES,
    CommitResult,
    CommitState,
    DrainState,
    FrameHeader,
    Payload,
    Region,
    TransferSpec,
    TransferStats,
    checksum_of,
    frames_digest,
)
from outrider.kv_transfer.coverage import Coverage
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.service.telemetry.logging import get_logger

NUM_REMEMBERED_COMMITS = 4096
"""Number of commits that are answered again after their transfer was closed."""

log = get_logger("kv_transfer")


class Disposition(enum.IntEnum):
    """What became of a frame."""

    WRITTEN = 1
    DUPLICATE = 2  # equal to one that was written
    STALE = 3  # another transfer's or incarnation's, or the transfer has ended
    CORRUPT = 4  # truncated or altered
    OUT_OF_BOUNDS = 5
    CONFLICTING = 6  # other bytes, or another cut, for cells that were written
    FAILED = 7  # it could not be written; the transfer has failed

    @property
    def is_refusal(self) -> bool:
        """Whether the receiver lacks the frame: a transfer with a refused one never completes."""
        return self not in (Disposition.WRITTEN, Disposition.DUPLICATE)


class AttachState(enum.IntEnum):
    """The answer to a sender's hello."""

    ATTACHED = 1
    UNKNOWN = 2  # no such transfer, or it has failed
    WRONG_INCARNATION = 3  # meant for an earlier process at this address
    BUSY = 4  # another sender is attached
    NOT_OFFERED = 5  # the receiver does not take payload by this connector


class TransferState(enum.Enum):
    OPEN = "open"
    COMMITTED = "committed"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(slots=True)
class _Transfer:
    """One transfer's state; `changed` guards everything below it."""

    spec: TransferSpec
    sink: ReservedBlocks
    changed: threading.Condition = field(default_factory=threading.Condition)
    state: TransferState = TransferState.OPEN
    is_attached: bool = False
    coverage: Coverage = field(init=False)
    arrived: dict[Region, int] = field(default_factory=dict)  # region -> checksum
    num_copying: int = 0  # writes and reads of blocks that are under way
    has_lost_a_write: bool = False  # a cell counts as arrived that was not written
    held_bytes: int = field(init=False)  # of the tokens before the transfer's own that may still be read
    payload_bytes: int = 0
    first_frame_at: float | None = None
    last_frame_at: float | None = None

    def __post_init__(self) -> None:
        self.coverage = Coverage(self.spec)
        self.held_bytes = self.spec.start_token * sum(plane.bytes_per_token for plane in self.spec.planes)

    def wait_until_drained(self, timeout_seconds: float | None) -> bool:
        """Waits until no copy is under way; returns whether that is so. Needs `changed`."""
        return self.changed.wait_for(lambda: self.num_copying == 0, timeout_seconds)

    def end_copy(self) -> None:
        with self.changed:
            self.num_copying -= 1
            self.changed.notify_all()


class TransferInbox:
    """The transfers that one process expects. Thread-safe; callbacks run in the caller's thread, without locks."""

    def __init__(
        self,
        *,
        incarnation: bytes,
        on_complete: Callable[[bytes, TransferStats], None],
        on_failed: Callable[[bytes, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.incarnation = incarnation
        self._on_complete = on_complete
        self._on_failed = on_failed
        self._clock = clock
        self._lock = threading.Lock()  # guards the three below; never held while a transfer's lock is taken
        self._transfers: dict[bytes, _Transfer] = {}
        self._commits: OrderedDict[bytes, None] = OrderedDict()
        self._counts: Counter[str] = Counter()

    # ---- the owner's side

    def open(self, spec: TransferSpec, sink: ReservedBlocks) -> None:
        """Expects a transfer. Call this before its grant is announced; its id must be new."""
        assert spec.incarnation == self.incarnation, "a transfer is addressed to this process"
        with self._lock:
            assert spec.transfer_id not in self._transfers, "a transfer_id is used once"
            self._transfers[spec.transfer_id] = _Transfer(spec, sink)

    def close(self, transfer_id: bytes, *, timeout_seconds: float = 10.0) -> DrainState:
        """Forgets a transfer, whatever its state, and waits for the write in flight. Idempotent.

        UNKNOWN: the write has not returned in time; the blocks must not be reused. No callback for the transfer starts
        after the return, except that a commit which was just being answered may still report itself complete.
        """
        with self._lock:
            transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return DrainState.DRAINED
        with transfer.changed:
            if transfer.state is not TransferState.COMMITTED:
                transfer.state = TransferState.CLOSED
            if not transfer.wait_until_drained(timeout_seconds):
                return DrainState.UNKNOWN
        with self._lock:
            self._transfers.pop(transfer_id, None)
        return DrainState.DRAINED

    def received_until(self, transfer_id: bytes) -> int | None:
        """Ends the transfer to further frames. Returns the token up to which its KV is checked and written.

        Returns 0 where that is not known because the transfer is closed or a write was lost, and None while a copy is
        under way.
        """
        transfer = self._find(transfer_id)
        if transfer is None:
            return 0
        with transfer.changed:
            if transfer.state is TransferState.OPEN:
                transfer.state = TransferState.CLOSED
            if transfer.num_copying:
                return None
            return 0 if transfer.has_lost_a_write else transfer.coverage.complete_until()

    def has_seen(self, transfer_id: bytes) -> bool:
        """Returns whether `open` needs another id: this transfer is not drained yet, or was committed recently."""
        return self._find(transfer_id) is not None or self.was_committed(transfer_id)

    def last_frame_at(self, transfer_id: bytes) -> float | None:
        """Returns when the last new frame was accepted, by this inbox's clock. None: none was, or it is closed."""
        transfer = self._find(transfer_id)
        return None if transfer is None else transfer.last_frame_at

    def counters(self) -> Counter[str]:
        """Returns totals since the start: messages_malformed, and frames_ with a `Disposition` in lower case."""
        with self._lock:
            return self._counts.copy()

    # ---- the connectors' side

    def attach(self, transfer_id: bytes, incarnation: bytes) -> AttachState:
        """Attaches a sender to its transfer, one at a time."""
        if incarnation != self.incarnation:
            return AttachState.WRONG_INCARNATION
        transfer = self._find(transfer_id)
        if transfer is None:  # looked up first: it may be committed and closed meanwhile
            return AttachState.ATTACHED if self.was_committed(transfer_id) else AttachState.UNKNOWN
        with transfer.changed:
            if transfer.state is TransferState.COMMITTED:
                return AttachState.ATTACHED  # to ask again for the commit's answer
            if transfer.state is not TransferState.OPEN:
                return AttachState.UNKNOWN
            if transfer.is_attached:
                return AttachState.BUSY
            transfer.is_attached = True
            return AttachState.ATTACHED

    def accept(self, header: FrameHeader, payload: Payload) -> Disposition:
        """Checks a frame and writes it. Nobody may change `payload` during the call."""
        return self.note(self._accept(header, payload))

    def note(self, disposition: Disposition) -> Disposition:
        """Counts what became of a frame."""
        self.count(f"frames_{disposition.name.lower()}")
        return disposition

    def _accept(self, header: FrameHeader, payload: Payload) -> Disposition:
        transfer = self._find(header.transfer_id) if header.incarnation == self.incarnation else None
        if transfer is None:
            return Disposition.STALE
        if not _fits(header, transfer):
            return Disposition.OUT_OF_BOUNDS
        if len(payload) != header.length or checksum_of(payload) != header.checksum:
            return Disposition.CORRUPT
        region = header.region
        with transfer.changed:
            if transfer.state is not TransferState.OPEN:
                return Disposition.STALE
            if transfer.coverage.overlaps(region):
                is_equal = transfer.arrived.get(region) == header.checksum
                return Disposition.DUPLICATE if is_equal else Disposition.CONFLICTING
            transfer.coverage.add(region)
            transfer.arrived[region] = header.checksum
            transfer.num_copying += 1
            transfer.payload_bytes += header.length
            transfer.last_frame_at = self._clock()
            if transfer.first_frame_at is None:
                transfer.first_frame_at = transfer.last_frame_at
        fault_point("decode.first_frame" if len(transfer.arrived) == 1 else "decode.between_frames")
        return self._write(transfer, region, payload)

    def _write(self, transfer: _Transfer, region: Region, payload: Payload) -> Disposition:
        try:
            transfer.sink.write(region, payload)
        except Exception as error:
            log.exception("kv sink failed", transfer_id=transfer.spec.transfer_id.hex(), region=str(region))
            transfer.has_lost_a_write = True
            self.fail(transfer.spec.transfer_id, f"the sink refused {region}: {error}")
            return Disposition.FAILED
        finally:
            transfer.end_copy()
        return Disposition.WRITTEN

    def read(self, transfer_id: bytes, region: Region) -> tuple[FrameHeader, memoryview] | None:
        """Reads KV of tokens before the transfer's own. None: it is not held here, or more than all was asked for."""
        transfer = self._find(transfer_id)
        if transfer is None:
            return None
        spec, plane = transfer.spec, transfer.spec.plane(region.plane)
        if plane is None or not region.is_inside(plane, start_token=0, end_token=spec.start_token):
            return None
        num_bytes = region.num_bytes(plane)
        with transfer.changed:
            is_open = transfer.state is TransferState.OPEN  # its blocks are another's afterwards
            if not is_open or num_bytes > min(transfer.held_bytes, MAX_FRAME_BYTES):
                return None
            transfer.held_bytes -= num_bytes
            transfer.num_copying += 1
        try:
            payload = transfer.sink.read(region)
        finally:
            transfer.end_copy()
        return FrameHeader.of(spec, region, payload), payload

    def commit(self, transfer_id: bytes, digest: int, *, connector: str) -> CommitResult:
        """Commits the transfer: COMMITTED once and for ever after, INCOMPLETE (it stays open), or UNKNOWN.

        A transfer is complete if every token of every layer of every plane has arrived, and if `digest`, which is
        `frames_digest` of the frames that were sent, is also that of the frames that arrived.
        """
        transfer = self._find(transfer_id)
        if transfer is None:
            state = CommitState.COMMITTED if self.was_committed(transfer_id) else CommitState.UNKNOWN
            return CommitResult(state=state)
        with transfer.changed:
            transfer.wait_until_drained(None)
            if transfer.state is TransferState.COMMITTED:
                return CommitResult(state=CommitState.COMMITTED)
            if transfer.state is not TransferState.OPEN:
                return CommitResult(state=CommitState.UNKNOWN)
            complete_until = transfer.coverage.complete_until()
            if complete_until < transfer.spec.end_token or frames_digest(transfer.arrived) != digest:
                return CommitResult(state=CommitState.INCOMPLETE, complete_until=complete_until)
            transfer.state = TransferState.COMMITTED
            stats = TransferStats(
                connector=connector,
                payload_bytes=transfer.payload_bytes,
                seconds=0.0 if transfer.first_frame_at is None else self._clock() - transfer.first_frame_at,
            )
        with self._lock:
            self._commits[transfer_id] = None
            if len(self._commits) > NUM_REMEMBERED_COMMITS:
                self._commits.popitem(last=False)
        self._on_complete(transfer_id, stats)
        fault_point("decode.before_commit_answer")
        return CommitResult(state=CommitState.COMMITTED)

    def fail(self, transfer_id: bytes, reason: str) -> None:
        """Fails a transfer that cannot complete any more, and reports it once. Does nothing after its end."""
        transfer = self._find(transfer_id)
        if transfer is None:
            return
        with transfer.changed:
            if transfer.state is not TransferState.OPEN:
                return
            transfer.state = TransferState.FAILED
        self._on_failed(transfer_id, reason)

    def wait_until_drained(self, transfer_id: bytes, *, timeout_seconds: float) -> DrainState:
        """Waits until a transfer that has ended writes nothing any more."""
        transfer = self._find(transfer_id)
        if transfer is None:
            return DrainState.DRAINED
        with transfer.changed:
            return DrainState.DRAINED if transfer.wait_until_drained(timeout_seconds) else DrainState.UNKNOWN

    def count(self, name: str) -> None:
        """Adds one to one of the `counters`."""
        with self._lock:
            self._counts[name] += 1

    def _find(self, transfer_id: bytes) -> _Transfer | None:
        with self._lock:
            return self._transfers.get(transfer_id)

    def was_committed(self, transfer_id: bytes) -> bool:
        """Returns whether it was committed recently, also after `close`."""
        with self._lock:
            return transfer_id in self._commits


def _fits(header: FrameHeader, transfer: _Transfer) -> bool:
    """Returns whether the region is a part of the transfer and has the length of its header."""
    spec, region = transfer.spec, header.region
    plane = spec.plane(region.plane)
    return (
        plane is not None
        and region.is_inside(plane, start_token=spec.start_token, end_token=spec.end_token)
        and header.length == region.num_bytes(plane)
    )
