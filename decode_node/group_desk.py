"""Where sequence groups come and go: grants, transfers, cancels, ends. Engine thread only."""

from __future__ import annotations

import time
from collections.abc import Callable

from decode_node.admission import Admission
from decode_node.commands import AddressedEvent, GroupCancelled, GroupOpened, TransferCompleted, TransferFailed
from decode_node.draft_gathering import DraftGatherer
from decode_node.groups import GroupTable, Sample, SequenceGroup
from decode_node.ingest import Ingest
from decode_node.statistics import PrefixLookups
from outrider.engine.engine import Engine
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.scheduler import EngineSequence
from outrider.kv_transfer.base import DrainState
from outrider.session import (
    Granted,
    KvReady,
    Rejected,
    RejectReason,
    SequenceGroupEvent,
    SequenceGroupFailed,
)

UNAVAILABLE = 14  # google.rpc.Code


class GroupDesk:
    """Admits groups, starts their samples when the prompt's KV is there, frees them when they end.

    Every path out of here frees what the group held: blocks, scheduler entry, draft
    state, transfer. A transfer is closed (drained) before its blocks are freed.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        drafts: DraftGatherer,
        ingest: Ingest,
        admission: Admission,
        max_local_prefill_tokens: int,
        transfer_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._drafts = drafts
        self._ingest = ingest
        self._admission = admission
        self._max_local_prefill_tokens = max_local_prefill_tokens
        self._transfer_timeout_seconds = transfer_timeout_seconds
        self._clock = clock
        self._groups = GroupTable()
        self._events: list[AddressedEvent] = []
        self._num_arrived = 0
        self.prefix_lookups = PrefixLookups()  # replaced as a whole: other threads may read it
        self.is_draining = False
        self._undrained: dict[bytes, SequenceKV] = {}  # by transfer: a write into these blocks may be under way

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        """Groups whose KV is on its way, and preempted sequences."""
        return self._groups.num_waiting_for_kv + self._engine.scheduler.num_waiting

    def sample_of(self, sequence: EngineSequence) -> Sample:
        return self._groups.sample_of(sequence)

    def samples_at_decode_row(self) -> list[Sample]:
        """Running samples that have all their KV but the newest token's: the ones that can use drafts."""
        return [
            self._groups.sample_of(sequence)
            for sequence in self._engine.scheduler.running
            if sequence.num_computed == len(sequence.token_ids) - 1
        ]

    def report(self, group: SequenceGroup, event: SequenceGroupEvent) -> None:
        self._events.append(AddressedEvent(group.session_id, event))

    def take_events(self) -> list[AddressedEvent]:
        events, self._events = self._events, []
        return events

    # --- coming ---------------------------------------------------------------------------

    def open(self, command: GroupOpened) -> None:
        """Granted or Rejected, at once."""
        opened = command.group
        if self.is_draining:
            self._reject(command, RejectReason.DRAINING, "the node is draining")
            return
        if (
            self._groups.find(command.session_id, opened.sequence_group_id) is not None
            or self._groups.find_transfer(opened.transfer_id) is not None
            or self._ingest.has_seen(opened.transfer_id)
        ):
            self._reject(command, RejectReason.INVALID, "the sequence group or transfer id is in use")
            return
        invalid = self._admission.why_invalid(opened)
        if invalid is not None:
            self._reject(command, *invalid)
            return
        num_kv_tokens = len(opened.known_token_ids) - 1  # the last one is an ordinary row of the first step
        kv = SequenceKV.create(self._engine.pool, opened.known_token_ids, max_cached_tokens=num_kv_tokens)
        num_new_blocks = kv.num_blocks_needed(num_kv_tokens)
        if self._engine.scheduler.num_waiting or not self._admission.has_room(
            opened, num_new_blocks=num_new_blocks, groups=self._groups
        ):
            kv.free()
            self._reject(command, RejectReason.NO_ROOM, "no room for the sequence group at present")
            return
        self._num_arrived += 1
        self.prefix_lookups = self.prefix_lookups.plus(
            num_query_tokens=len(opened.known_token_ids), num_hit_tokens=kv.num_cached_tokens
        )
        group = SequenceGroup(command.session_id, opened, self._num_arrived, kv)
        num_missing = num_kv_tokens - kv.num_tokens
        if num_missing <= self._max_local_prefill_tokens:
            self._grant(group, kv_address="", held=kv.num_tokens, num_to_compute=num_missing + 1)
            self._groups.add(group)
            self._start_samples(group)
            return
        held = kv.num_tokens
        kv.reserve(num_kv_tokens)
        group.transfer_id = opened.transfer_id
        group.kv_deadline = self._clock() + self._transfer_timeout_seconds
        self._groups.add(group)
        self._ingest.open(opened.transfer_id, kv.block_ids, start_token=held, end_token=num_kv_tokens)
        self._grant(group, kv_address=self._ingest.address(command.kv_host), held=held, num_to_compute=1)

    def transfer_completed(self, command: TransferCompleted) -> None:
        group = self._groups.find_transfer(command.transfer_id)
        if group is None:  # given up meanwhile
            return
        self._ingest.close(command.transfer_id)
        self._groups.end_transfer(group)
        assert group.kv is not None
        group.kv.advance(len(group.opened.known_token_ids) - 1)
        group.kv.publish(group.opened.known_token_ids)
        self.report(
            group,
            KvReady(
                sequence_group_id=group.opened.sequence_group_id,
                transfer_id=command.transfer_id,
                connector=command.stats.connector,
                kv_bytes=command.stats.payload_bytes,
                transfer_seconds=command.stats.seconds,
            ),
        )
        self._start_samples(group)

    def transfer_failed(self, command: TransferFailed) -> None:
        group = self._groups.find_transfer(command.transfer_id)
        if group is not None:
            self._fail(group, f"the KV transfer failed: {command.reason}")

    def tend_transfers(self) -> None:
        """Gives up those that are overdue, and frees the blocks of those that have drained meanwhile."""
        now = self._clock()
        for group in self._groups.waiting_for_kv():
            if now < group.kv_deadline:
                break  # the others were granted later
            self._fail(group, f"the KV transfer took more than {self._transfer_timeout_seconds:g} s")
        for transfer_id, kv in tuple(self._undrained.items()):
            if self._ingest.close(transfer_id) is DrainState.DRAINED:
                del self._undrained[transfer_id]
                kv.free()

    def _start_samples(self, group: SequenceGroup) -> None:
        """The samples share the prompt's blocks; the first write into a shared one copies it."""
        opened, kv = group.opened, group.kv
        assert kv is not None
        indexes = group.wanted_samples
        tables = [kv, *(kv.fork() for _ in indexes[1:])]
        group.kv = None
        for index, table in zip(indexes, tables, strict=True):
            sequence = EngineSequence(
                key=self._groups.next_sequence_id(),
                token_ids=list(opened.known_token_ids),
                kv=table,
                priority=opened.priority,
                arrival=group.arrival,
            )
            sampling = self._engine.sampler.start(
                opened.sampling,
                sample=index,
                prompt_token_ids=opened.prompt_token_ids,
                generated_token_ids=opened.generated_token_ids,
                stop_token_ids=opened.stop_token_ids,
                logprobs=opened.logprobs,
            )
            sample = Sample(group, index, sequence, sampling, frozenset(opened.stop_token_ids))
            self._groups.add_sample(sample)
            self._engine.scheduler.add_running(sequence)
            self._drafts.open(sample)

    def _grant(self, group: SequenceGroup, *, kv_address: str, held: int, num_to_compute: int) -> None:
        self.report(
            group,
            Granted(
                sequence_group_id=group.opened.sequence_group_id,
                transfer_id=group.opened.transfer_id,
                kv_address=kv_address,
                held_prefix_length=held,
                num_tokens_to_compute=num_to_compute,
            ),
        )

    def _reject(self, command: GroupOpened, reason: RejectReason, message: str) -> None:
        event = Rejected(sequence_group_id=command.group.sequence_group_id, reason=reason, message=message)
        self._events.append(AddressedEvent(command.session_id, event))

    # --- going ----------------------------------------------------------------------------

    def finish(self, sample: Sample) -> None:
        """Its tokens are all reported."""
        self._admission.observe_finished(sample.num_generated)
        self._drop(sample)

    def cancel(self, command: GroupCancelled) -> None:
        group = self._groups.find(command.session_id, command.cancel.sequence_group_id)
        if group is None:  # it ended by itself meanwhile
            return
        if not command.cancel.samples:
            self._free(group)
            return
        if group.is_waiting_for_kv:
            group.cancelled_samples.update(command.cancel.samples)
            if not group.wanted_samples:
                self._free(group)
            return
        for index in command.cancel.samples:
            sample = group.samples.get(index)
            if sample is not None:
                self._drop(sample)

    def end_session(self, session_id: int) -> None:
        """The lease is over. Nobody is left to report to."""
        for group in self._groups.of_session(session_id):
            self._free(group)
        self._events = [event for event in self._events if event.session_id != session_id]

    def refuse_new_groups(self) -> None:
        self.is_draining = True

    def give_up_all(self, why: str) -> None:
        for group in self._groups:
            self._fail(group, why)

    def free_all(self) -> None:
        for group in self._groups:
            self._free(group)

    def _fail(self, group: SequenceGroup, message: str) -> None:
        self.report(
            group,
            SequenceGroupFailed(sequence_group_id=group.opened.sequence_group_id, code=UNAVAILABLE, message=message),
        )
        self._free(group)

    def _free(self, group: SequenceGroup) -> None:
        if group.is_waiting_for_kv and self._ingest.close(group.transfer_id) is DrainState.UNKNOWN:
            assert group.kv is not None
            self._undrained[group.transfer_id] = group.kv  # freed by `tend_transfers`
            group.kv = None
        for sample in tuple(group.samples.values()):
            self._drop(sample)
        if group.kv is not None:
            group.kv.free()
            group.kv = None
        self._groups.remove(group)

    def _drop(self, sample: Sample) -> None:
        self._engine.scheduler.remove(sample.sequence)
        self._drafts.close(sample)
        self._groups.remove_sample(sample)
