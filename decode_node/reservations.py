"""Reserved blocks that wait for their KV, and the transfers into them, with retries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decode_node.groups import SequenceGroup
from decode_node.ingest import Ingest
from decode_node.opening import cached_table
from outrider.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.faults import fault_point
from outrider.kv_transfer.base import DrainState, TransferStats
from outrider.session import Granted, KvFailed, KvReady, SequenceGroupEvent

WRITE_SECONDS = 0.5
"""Maximum seconds to wait for a write in progress, which usually takes milliseconds. After that, received KV is
discarded.
"""


@dataclass(slots=True)
class _Filling:
    """The state of filling one reservation with KV."""

    deadline: float  # deadline of the transfer, or of the reservation if it has no transfer; on the owner's clock
    transfer_id: bytes = b""  # transfer that the receiver expects; empty if the last one has failed
    undrained_id: bytes = b""  # a closed transfer that may still have a write in progress
    next_id: bytes | None = None  # transfer to open after a drain; empty: this node computes the KV; None: no change
    received_until: int = 0  # token up to which the last transfer has delivered KV; 0: not known
    keeps_received: bool = False  # whether the next transfer continues at `received_until`
    drain_deadline: float = 0.0  # deadline for a write in progress; after it, other blocks are used and nothing is kept


class Reservations:
    """All reservations. Each may go through several transfers. Engine thread only.

    The next transfer into the same blocks is opened only after the previous one is closed and drained. The next one
    continues after the tokens that arrived completely if the router allows that (for nodes with equal numerics);
    otherwise it brings every token. While a write into the blocks is still in progress, the reservation gets other
    blocks, or waits if none are free.
    """

    def __init__(
        self,
        ingest: Ingest,
        pool: BlockPool,
        *,
        timeout_seconds: float,
        clock: Callable[[], float],
        report: Callable[[SequenceGroup, SequenceGroupEvent], None],
    ) -> None:
        """`timeout_seconds`: maximum time of a transfer without progress, or of a reservation without a transfer."""
        self._ingest = ingest
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._report = report
        self._fillings: dict[SequenceGroup, _Filling] = {}
        self._by_transfer: dict[bytes, SequenceGroup] = {}
        self._undrained: dict[bytes, SequenceKV] = {}  # by transfer id: given-up blocks that may still be written to

    def __len__(self) -> int:
        """Returns the number of groups that wait for KV."""
        return len(self._fillings)

    def is_known(self, transfer_id: bytes) -> bool:
        """Returns whether the id is in use, or was recently."""
        is_next = any(filling.next_id == transfer_id for filling in self._fillings.values())
        return is_next or transfer_id in self._by_transfer or self._ingest.inbox.is_used_id(transfer_id)

    def add(self, group: SequenceGroup, transfer_id: bytes) -> None:
        """Makes a group with reserved blocks wait for this transfer."""
        group.is_waiting_for_kv = True
        filling = self._fillings[group] = _Filling(deadline=0.0)
        self._open(group, filling, transfer_id)

    def retarget(self, group: SequenceGroup, transfer_id: bytes, *, keeps_received: bool = False) -> bool:
        """Replaces the transfer by another one, or by none if `transfer_id` is empty. Returns True if the group's
        samples can start and compute what is missing.

        `keeps_received`: whether tokens whose KV has arrived completely are kept.
        """
        filling = self._fillings[group]
        self._close(filling)
        filling.next_id = transfer_id
        filling.keeps_received = keeps_received
        filling.drain_deadline = self._clock() + WRITE_SECONDS
        return self._advance(group, filling)

    def complete(self, transfer_id: bytes, stats: TransferStats) -> SequenceGroup | None:
        """Returns the group whose KV is now complete, or None if no group waits for this transfer (any more)."""
        group = self._by_transfer.get(transfer_id)
        if group is None:
            return None
        self._close(self._fillings[group])
        self._remove(group)
        assert group.kv is not None
        group.kv.advance(len(group.shared_token_ids))
        group.kv.publish(group.shared_token_ids)
        fault_point("decode.kv_ready")
        self._report(
            group,
            KvReady(
                sequence_group_id=group.opened.sequence_group_id,
                transfer_id=transfer_id,
                connector=stats.connector,
                kv_bytes=stats.payload_bytes,
                transfer_seconds=stats.seconds,
            ),
        )
        return group

    def fail(self, transfer_id: bytes, message: str) -> None:
        """Records and reports that the transfer has failed. The blocks then wait for another transfer."""
        group = self._by_transfer.get(transfer_id)
        if group is None:
            return
        filling = self._fillings[group]
        self._close(filling)
        filling.deadline = self._clock() + self._timeout_seconds
        self._report(
            group,
            KvFailed(
                sequence_group_id=group.opened.sequence_group_id,
                transfer_id=transfer_id,
                message=f"the KV transfer failed: {message}",
            ),
        )

    def last_idle_behind(self, rank: tuple[int, int], kv: SequenceKV) -> SequenceGroup | None:
        """Returns the last-ranked group of those that rank behind `rank` and have received nothing, or None. Only
        groups count whose blocks `kv` could use.
        """
        idle = [
            group
            for group, filling in self._fillings.items()
            if group.rank > rank
            and kv.shares_pool(group.kv)
            and not filling.undrained_id  # otherwise its blocks could not be freed yet
            and self._ingest.inbox.last_frame_at(filling.transfer_id) is None
        ]
        return max(idle, key=lambda group: group.rank, default=None)

    def advance(self) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """Fails transfers without progress, opens the next transfers after drained ones, and frees drained blocks.

        Returns (groups whose samples can start and compute the rest, groups that waited too long for a new transfer).
        The caller must fail the latter groups.
        """
        if not (self._fillings or self._undrained):
            return [], []
        for transfer_id, kv in tuple(self._undrained.items()):
            if self._ingest.close(transfer_id) is DrainState.DRAINED:
                del self._undrained[transfer_id]
                kv.free()
        now = self._clock()
        starting, overdue = [], []
        for group, filling in tuple(self._fillings.items()):
            if filling.next_id is not None:
                if self._advance(group, filling):
                    starting.append(group)
            elif now >= filling.deadline:
                if not filling.transfer_id:
                    overdue.append(group)
                elif not self._has_progressed(filling, now):
                    self.fail(filling.transfer_id, f"no KV arrived for {self._timeout_seconds:g} s")
        return starting, overdue

    def drop(self, group: SequenceGroup) -> None:
        """Removes the group's reservation. Its blocks are freed as soon as no write into them is in progress."""
        filling = self._fillings[group]
        self._close(filling)
        self._remove(group)
        kv, group.kv = group.kv, None
        assert kv is not None
        if filling.undrained_id:
            self._undrained[filling.undrained_id] = kv
        else:
            kv.free()

    def grant(self, group: SequenceGroup, transfer_id: bytes, *, kv_address: str = "") -> None:
        """Reports the grant. Without `kv_address`, the samples compute the missing KV."""
        assert group.kv is not None
        opened, held = group.opened, group.kv.num_tokens
        num_known = len(opened.known_token_ids(opened.samples[0]))
        self._report(
            group,
            Granted(
                sequence_group_id=opened.sequence_group_id,
                transfer_id=transfer_id,
                kv_address=kv_address,
                held_prefix_length=held,
                num_tokens_to_compute=num_known - (len(group.shared_token_ids) if kv_address else held),
            ),
        )

    def _open(self, group: SequenceGroup, filling: _Filling, transfer_id: bytes) -> None:
        kv = group.kv
        assert kv is not None
        filling.transfer_id = transfer_id
        filling.deadline = self._clock() + self._timeout_seconds
        self._by_transfer[transfer_id] = group
        end_token = len(group.shared_token_ids)
        self._ingest.open(transfer_id, kv.block_ids, windows=kv.windows, start_token=kv.num_tokens, end_token=end_token)
        self.grant(group, transfer_id, kv_address=self._ingest.address(group.kv_host))

    def _advance(self, group: SequenceGroup, filling: _Filling) -> bool:
        """Opens the next transfer once the blocks are safe to write. Returns True if the samples can start."""
        is_undrained = filling.undrained_id and not self._close_if_drained(filling, filling.undrained_id)
        waits = filling.keeps_received and self._clock() < filling.drain_deadline
        if is_undrained and (waits or not self._change_blocks(group, filling.undrained_id)):
            return False
        self._keep_received(group, filling)
        next_id, filling.next_id, filling.undrained_id = filling.next_id, None, b""
        assert group.kv is not None
        if next_id and group.kv.num_tokens < len(group.shared_token_ids):
            self._open(group, filling, next_id)
            return False
        self._remove(group)  # all KV has arrived, or this node computes the rest
        self.grant(group, next_id or b"")
        return True

    def _keep_received(self, group: SequenceGroup, filling: _Filling) -> None:
        """Makes completely received tokens valid if `keeps_received`; otherwise discards everything received."""
        kv, received_until = group.kv, filling.received_until
        filling.received_until = 0
        assert kv is not None
        if filling.keeps_received and received_until > kv.num_tokens:
            kv.advance(received_until)
        elif kv.windows:  # nothing more is valid, and what rows see through windows has not arrived
            if not filling.next_id:
                kv.free()
                group.kv = cached_table(self._pool, group.opened, group.shared_token_ids)
        elif not filling.keeps_received:
            kv.truncate(kv.num_cached_tokens)
            kv.reserve(len(group.shared_token_ids))  # reserves again the blocks that `truncate` has freed

    def _close_if_drained(self, filling: _Filling, transfer_id: bytes) -> bool:
        """Closes a transfer. If no write is in progress, sets `received_until` and returns True."""
        received_until = self._ingest.inbox.received_until(transfer_id)
        if received_until is None or self._ingest.close(transfer_id) is DrainState.UNKNOWN:
            return False
        filling.received_until = received_until
        return True

    def _change_blocks(self, group: SequenceGroup, undrained_id: bytes) -> bool:
        """Reserves other blocks; the old ones are freed once drained. Returns False if there is no room."""
        num_tokens, has_windows = len(group.shared_token_ids), bool(self._pool.windows)
        kv = cached_table(self._pool, group.opened, group.shared_token_ids, windows_arrive=has_windows)
        try:
            kv.reserve(num_tokens, arriving=num_tokens)
        except NoFreeBlocksError:
            kv.free()
            return False
        assert group.kv is not None
        self._undrained[undrained_id], group.kv = group.kv, kv
        return True

    def _close(self, filling: _Filling) -> None:
        """Closes the current transfer, if there is one."""
        transfer_id, filling.transfer_id = filling.transfer_id, b""
        if not transfer_id:
            return
        del self._by_transfer[transfer_id]
        if not self._close_if_drained(filling, transfer_id):
            filling.undrained_id = transfer_id

    def _has_progressed(self, filling: _Filling, now: float) -> bool:
        """Returns whether a frame or sign of progress came within the timeout; if so, extends the deadline."""
        last = self._ingest.inbox.last_frame_at(filling.transfer_id)
        if last is None or now >= last + self._timeout_seconds:
            return False
        filling.deadline = last + self._timeout_seconds
        return True

    def _remove(self, group: SequenceGroup) -> None:
        del self._fillings[group]
        group.is_waiting_for_kv = False
