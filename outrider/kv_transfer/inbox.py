"""The receiver's side of the protocol, without any transport: the states of transfers, and the checks of frames.

All connectors deliver here, so these rules hold for all of them:

- a frame belongs to the transfer that its own header names; a frame for another
  incarnation, for an unknown transfer or for one that has ended is dropped and counted;
- bounds, length and checksum are checked before a byte is written;
- a (layer, token, head) cell is written only once: an equal frame is a duplicate, and a different one for the
  same cells is refused;
- after `close` has returned DRAINED, nothing is written or read any more.
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
"""Number of the most recent commits that can be answered again after their transfers have been closed."""

log = get_logger("kv_transfer")


class Disposition(enum.IntEnum):
    """The receiver's decision about a frame."""

    WRITTEN = 1
    DUPLICATE = 2  # equal to a frame that was written
    STALE = 3  # for another transfer or incarnation, or for a transfer that has ended
    CORRUPT = 4  # truncated or altered
    OUT_OF_BOUNDS = 5
    CONFLICTING = 6  # overlaps written cells, with other bytes or another cut
    FAILED = 7  # writing the frame failed, and with it the transfer

    @property
    def is_refusal(self) -> bool:
        """Whether the receiver does not have the frame's KV. A transfer with a refused frame never completes."""
        return self not in (Disposition.WRITTEN, Disposition.DUPLICATE)


class AttachState(enum.IntEnum):
    """The answer to a sender's hello."""

    ATTACHED = 1
    UNKNOWN = 2  # there is no such transfer, or it has failed
    WRONG_INCARNATION = 3  # the transfer is for an earlier process at this address
    BUSY = 4  # another sender is attached
    NOT_OFFERED = 5  # the receiver does not accept this connector


class TransferState(enum.Enum):
    OPEN = "open"
    COMMITTED = "committed"
    ENDED = "ended"  # failed, or closed by the owner before its commit


@dataclass(slots=True)
class _Transfer:
    """The state of one transfer. `changed` guards the fields that follow it."""

    spec: TransferSpec
    blocks: ReservedBlocks
    changed: threading.Condition = field(default_factory=threading.Condition)
    state: TransferState = TransferState.OPEN
    is_attached: bool = False
    coverage: Coverage = field(init=False)
    arrived: dict[Region, int] = field(default_factory=dict)  # checksums of the frames, by region
    num_copying: int = 0  # number of running writes and reads of blocks
    has_failed_write: bool = False  # whether a write failed, so that `coverage` has cells that were not written
    readable_bytes: int = field(init=False)  # bytes of KV before `spec.start_token` that the sender may still read
    payload_bytes: int = 0
    first_frame_at: float | None = None
    last_frame_at: float | None = None  # or last sign of progress

    def __post_init__(self) -> None:
        self.coverage = Coverage(self.spec)
        self.readable_bytes = self.spec.start_token * sum(
            plane.bytes_per_token for plane in self.spec.planes if not plane.window
        )

    def wait_until_drained(self, timeout_seconds: float | None) -> bool:
        """Waits until no copy is running; returns False after a timeout. Needs `changed`."""
        return self.changed.wait_for(lambda: self.num_copying == 0, timeout_seconds)

    def end_copy(self) -> None:
        with self.changed:
            self.num_copying -= 1
            self.changed.notify_all()


class TransferInbox:
    """The transfers that one process expects. Thread-safe. Callbacks run in the caller's thread, with no lock held."""

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
        self._lock = threading.Lock()  # guards the next three fields; never held while a transfer's lock is acquired
        self._transfers: dict[bytes, _Transfer] = {}
        self._commits: OrderedDict[bytes, None] = OrderedDict()
        self._counts: Counter[str] = Counter()

    # ---- the owner's side

    def open(self, spec: TransferSpec, blocks: ReservedBlocks) -> None:
        """Adds a transfer, whose id must be new. Call this before a `Granted` announces it."""
        assert spec.incarnation == self.incarnation, "a transfer is addressed to this process"
        with self._lock:
            assert spec.transfer_id not in self._transfers, "a transfer_id is used once"
            self._transfers[spec.transfer_id] = _Transfer(spec, blocks)

    def close(self, transfer_id: bytes, *, timeout_seconds: float = 10.0) -> DrainState:
        """Removes a transfer, whatever its state, and waits for the writes in flight. Idempotent.

        Returns UNKNOWN after a timeout: the transfer is kept, and its blocks must not be reused. After `close` has
        returned, no callback for the transfer begins, except `on_complete` for a commit that was being answered.
        """
        transfer = self._find(transfer_id)
        if transfer is None:
            return DrainState.DRAINED
        with transfer.changed:
            if transfer.state is not TransferState.COMMITTED:
                transfer.state = TransferState.ENDED
            if not transfer.wait_until_drained(timeout_seconds):
                return DrainState.UNKNOWN
        with self._lock:
            self._transfers.pop(transfer_id, None)
        return DrainState.DRAINED

    def received_until(self, transfer_id: bytes) -> int | None:
        """Refuses further frames. Returns the token before which all of the transfer's KV is checked and written.

        Returns 0 if that is unknown because the transfer is closed or a write failed, and None while a copy is running.
        """
        transfer = self._find(transfer_id)
        if transfer is None:
            return 0
        with transfer.changed:
            if transfer.state is TransferState.OPEN:
                transfer.state = TransferState.ENDED
            if transfer.num_copying:
                return None
            return 0 if transfer.has_failed_write else transfer.coverage.complete_until()

    def is_used_id(self, transfer_id: bytes) -> bool:
        """Returns whether this id cannot be opened: its transfer is not drained yet, or was committed recently."""
        return self._find(transfer_id) is not None or self.was_committed(transfer_id)

    def last_frame_at(self, transfer_id: bytes) -> float | None:
        """Returns the time of the last new frame or sign of progress, by this inbox's clock; None if there was none, or
        after `close`.
        """
        transfer = self._find(transfer_id)
        return None if transfer is None else transfer.last_frame_at

    def counters(self) -> Counter[str]:
        """Returns totals since the start: messages_malformed, and frames_<disposition> in lower case."""
        with self._lock:
            return self._counts.copy()

    # ---- the connectors' side

    def attach(self, transfer_id: bytes, incarnation: bytes, *, is_part: bool = False) -> AttachState:
        """Attaches a sender to its transfer, which can have one sender at a time.

        `is_part`: whether the sender only adds frames to those of that sender, which must have attached before.
        """
        if incarnation != self.incarnation:
            return AttachState.WRONG_INCARNATION
        transfer = self._find(transfer_id)
        if transfer is None:  # looked up before commits: between the two, it may be committed and closed
            return AttachState.ATTACHED if self.was_committed(transfer_id) else AttachState.UNKNOWN
        with transfer.changed:
            if transfer.state is TransferState.COMMITTED:
                return AttachState.ATTACHED  # the sender asks again for the commit's answer
            if transfer.state is not TransferState.OPEN:
                return AttachState.UNKNOWN
            if is_part:
                return AttachState.ATTACHED if transfer.is_attached else AttachState.UNKNOWN
            if transfer.is_attached:
                return AttachState.BUSY
            transfer.is_attached = True
            return AttachState.ATTACHED

    def note_progress(self, transfer_id: bytes) -> None:
        """Notes that the sender's engine works on the prompt, although it has no frame yet."""
        if (transfer := self._find(transfer_id)) is not None:
            with transfer.changed:
                transfer.last_frame_at = self._clock()

    def accept(self, header: FrameHeader, payload: Payload) -> Disposition:
        """Checks a frame and writes it. The payload must not change during the call."""
        return self.note(self._accept(header, payload))

    def note(self, disposition: Disposition) -> Disposition:
        """Counts a frame's disposition and returns it."""
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
            is_first = transfer.first_frame_at is None
            if is_first:
                transfer.first_frame_at = transfer.last_frame_at
        fault_point("decode.first_frame" if is_first else "decode.between_frames")
        return self._write(transfer, region, payload)

    def _write(self, transfer: _Transfer, region: Region, payload: Payload) -> Disposition:
        try:
            transfer.blocks.write(region, payload)
        except Exception as error:
            log.exception("writing KV failed", transfer_id=transfer.spec.transfer_id.hex(), region=str(region))
            transfer.has_failed_write = True
            self.fail(transfer.spec.transfer_id, f"writing {region} failed: {error}")
            return Disposition.FAILED
        finally:
            transfer.end_copy()
        return Disposition.WRITTEN

    def read(self, transfer_id: bytes, region: Region) -> tuple[FrameHeader, memoryview] | None:
        """Reads KV of tokens that precede the transfer's own.

        Returns None if that KV is not held here any more, as behind a sliding window, or if the transfer's reads
        together would exceed its size.
        """
        transfer = self._find(transfer_id)
        if transfer is None:
            return None
        spec, plane = transfer.spec, transfer.spec.plane(region.plane)
        if plane is None or plane.window or not region.is_inside(plane, start_token=0, end_token=spec.start_token):
            return None
        num_bytes = region.num_bytes(plane)
        with transfer.changed:
            is_open = transfer.state is TransferState.OPEN  # otherwise its blocks may belong to another sequence
            if not is_open or num_bytes > min(transfer.readable_bytes, MAX_FRAME_BYTES):
                return None
            transfer.readable_bytes -= num_bytes
            transfer.num_copying += 1
        try:
            payload = transfer.blocks.read(region)
        finally:
            transfer.end_copy()
        return (FrameHeader.of(spec, region, payload), payload) if transfer.blocks.are_held() else None

    def commit(self, transfer_id: bytes, digest: int, *, connector: str) -> CommitResult:
        """Commits the transfer and answers COMMITTED, also when asked again. INCOMPLETE leaves the transfer open.

        A transfer is complete if every token of every layer of every plane has arrived, and if the `frames_digest` of
        the arrived frames equals `digest`, the digest of the sent frames.
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
        """Fails a transfer that cannot complete, and reports that once. Does nothing if the transfer has ended."""
        transfer = self._find(transfer_id)
        if transfer is None:
            return
        with transfer.changed:
            if transfer.state is not TransferState.OPEN:
                return
            transfer.state = TransferState.ENDED
        self._on_failed(transfer_id, reason)

    def wait_until_drained(self, transfer_id: bytes, *, timeout_seconds: float) -> DrainState:
        """Waits until a transfer that has ended has no writes in flight."""
        transfer = self._find(transfer_id)
        if transfer is None:
            return DrainState.DRAINED
        with transfer.changed:
            return DrainState.DRAINED if transfer.wait_until_drained(timeout_seconds) else DrainState.UNKNOWN

    def count(self, name: str) -> None:
        """Increments one of the `counters`."""
        with self._lock:
            self._counts[name] += 1

    def _find(self, transfer_id: bytes) -> _Transfer | None:
        with self._lock:
            return self._transfers.get(transfer_id)

    def was_committed(self, transfer_id: bytes) -> bool:
        """Returns whether the transfer was committed recently; also true after `close`."""
        with self._lock:
            return transfer_id in self._commits


def _fits(header: FrameHeader, transfer: _Transfer) -> bool:
    """Returns whether the frame's region is part of the transfer and its length is the region's."""
    spec, region = transfer.spec, header.region
    plane = spec.plane(region.plane)
    return (
        plane is not None
        and region.is_inside(plane, start_token=spec.first_token(plane), end_token=spec.end_token)
        and header.length == region.num_bytes(plane)
    )
