"""The life cycle of sequence groups on this node: grants, transfers, cancels, ends. Engine thread only."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from google.rpc import code_pb2

from decode_node.admission import Admission, FairShares
from decode_node.commands import EventsBySession, RouterCommand, TransferCompleted, TransferFailed
from decode_node.drafting.gather import DraftGatherer
from decode_node.groups import GroupTable, PrefixLookups, Sample, SequenceGroup, scoring_of
from decode_node.ingest import Ingest
from decode_node.kept_answers import KeptAnswers
from decode_node.opening import cached_table, forked_table, opening_table
from decode_node.reservations import Reservations
from outrider.engine.engine import Engine
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.sampler.logprobs import ScoredSequence
from outrider.engine.scheduler import EngineSequence
from outrider.faults import fault_point
from outrider.session import (
    CancelSequenceGroup,
    OpenSequenceGroup,
    PromptLogprobs,
    Rejected,
    RejectReason,
    RetargetSequenceGroup,
    SampleStart,
    SequenceGroupEvent,
    SequenceGroupFailed,
)
from outrider.wire.answer import pack_logprobs


class SequenceGroupManager:
    """Admits the node's sequence groups, starts them when the prompt's KV is available, and frees them at their end.

    Every path to the end of a group frees its blocks, scheduler entry, draft state and transfer. A transfer is closed
    (drained) before its blocks are freed.
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
        kept_answers: KeptAnswers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._drafts = drafts
        self._admission = admission
        self.kept_answers = kept_answers
        self._fair_shares = FairShares(engine.pool, max_running_sequences=admission.max_running_sequences, clock=clock)
        self._max_local_prefill_tokens = max_local_prefill_tokens
        self._groups = GroupTable()
        self.samples_of = self._groups.samples_of
        self._reservations = Reservations(
            ingest,
            engine.pool,
            timeout_seconds=transfer_timeout_seconds,
            clock=clock,
            report=self.report,
        )
        self._events: defaultdict[int, list[SequenceGroupEvent]] = defaultdict(list)  # by session
        self._num_arrived = 0
        self.prefix_lookups = PrefixLookups()  # replaced as a whole, so that other threads may read it
        self._with_followers: dict[SequenceGroup, None] = {}  # groups whose first sample still computes shared tokens
        self.is_draining = False  # if true, new groups are refused

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        """Number of groups whose KV is in transfer, plus the number of preempted sequences."""
        return len(self._reservations) + self._engine.scheduler.num_waiting

    @property
    def num_groups_awaiting_kv(self) -> int:
        """Number of groups whose KV is in transfer."""
        return len(self._reservations)

    @property
    def num_sequences_free(self) -> int:
        """Number of samples that could still be admitted; 0 while preempted ones wait. Readable from any thread."""
        if self._engine.scheduler.num_waiting:
            return 0
        return max(self._admission.max_running_sequences - self._groups.num_sequences, 0)

    def samples_to_draft(self) -> list[Sample]:
        """Returns the running samples that lack only the newest token's KV, and so can use drafts."""
        return self._groups.samples_of(
            sequence
            for sequence in self._engine.scheduler.running
            if sequence.kv is not None and sequence.kv.num_tokens == len(sequence.token_ids) - 1
        )

    def report(self, group: SequenceGroup, event: SequenceGroupEvent) -> None:
        self._events[group.session_id].append(event)

    def report_scores(self, scores: Iterable[ScoredSequence]) -> None:
        """Reports prompt logprobs. Called before the step's tokens are reported, so that the logprobs come first."""
        for sequence, logprobs in scores:
            (sample,) = self._groups.samples_of([sequence])
            group_id = sample.group.opened.sequence_group_id
            self.report(sample.group, PromptLogprobs(sequence_group_id=group_id, packed=pack_logprobs(logprobs)))

    def take_events(self) -> EventsBySession:
        events, self._events = self._events, defaultdict(list)
        return events

    # --- from open to start ---------------------------------------------------------------

    def open(self, command: RouterCommand, opened: OpenSequenceGroup) -> None:
        """Grants or rejects a group immediately."""
        fault_point("decode.before_grant")
        if self.is_draining:
            self._reject(command, RejectReason.DRAINING, "the node is draining")
            return
        is_used = opened.transfer_id and self._reservations.is_known(opened.transfer_id)
        if is_used or self._groups.find(command.session_id, opened.sequence_group_id) is not None:
            self._reject(command, RejectReason.INVALID, "the sequence group or transfer id is in use")
            return
        invalid = self._admission.why_invalid(opened, command.compiled)
        if invalid is not None:
            self._reject(command, *invalid)
            return
        adapter = opened.options.adapter
        packed = None if adapter is None else self._engine.find_adapter(adapter)
        if adapter is not None and packed is None:
            self._reject(command, RejectReason.NO_ADAPTER, f"the node does not have the adapter {adapter}")
            return
        shared = opened.shared_token_ids()
        limit = self._max_local_prefill_tokens
        kv, arriving = opening_table(self._engine.pool, opened, shared, limit)
        num_new = self._groups.num_new_blocks(kv, opened, len(shared), arriving=arriving)
        needed = self._admission.blocks_needed(
            opened, kv, num_shared=len(shared), num_new_blocks=num_new, groups=self._groups
        )
        if self._reject_if_full(command.session_id, opened, kv, needed):
            kv.free()
            return
        if self._engine.pool.has_host_blocks:
            kv.free()
            kv, arriving = opening_table(self._engine.pool, opened, shared, limit, may_load=True)
        self._num_arrived += 1
        lookups = self.prefix_lookups
        self.prefix_lookups = PrefixLookups(
            num_query_tokens=lookups.num_query_tokens + len(shared) + 1,
            num_hit_tokens=lookups.num_hit_tokens + kv.num_cached_tokens,
        )
        kv_host, compiled = command.kv_host, command.compiled
        group = SequenceGroup(command.session_id, opened, shared, kv_host, self._num_arrived, kv, compiled, packed)
        self._groups.add(group)
        for start in opened.samples:
            group.sequence_ids[start.sample] = self._groups.next_sequence_id()
            self._drafts.open(group.sequence_ids[start.sample], opened, start)
        kv.reserve(len(shared), arriving=arriving)
        if arriving:
            self._reservations.add(group, opened.transfer_id)
            return
        self._reservations.grant(group, opened.transfer_id)
        self._start_samples(group)

    def _reject_if_full(self, session_id: int, opened: OpenSequenceGroup, kv: SequenceKV, num_blocks: int) -> bool:
        """Rejects the group if there is no room, or if another router has a claim to the room.

        Returns whether the group was rejected.
        """
        is_short = num_blocks > kv.num_free_blocks or len(opened.samples) > self.num_sequences_free
        wait_seconds = 0.0 if is_short else self._fair_shares.hold_back_seconds(session_id, self._groups)
        if not is_short and not wait_seconds:
            self._fair_shares.settle(session_id)
            return False
        if is_short:
            self._fair_shares.claim(session_id)
        message = (
            "no room at present" if is_short else "another router waits for room, and this router already has its share"
        )
        self._report_no_room(session_id, opened, num_blocks, message, wait_seconds=wait_seconds)
        return True

    def _report_no_room(
        self, session_id: int, opened: OpenSequenceGroup, num_blocks: int, message: str, *, wait_seconds: float = 0.0
    ) -> None:
        rejected = Rejected(
            sequence_group_id=opened.sequence_group_id,
            reason=RejectReason.NO_ROOM,
            message=message,
            kv_blocks_needed=self._engine.pool.as_reported(num_blocks),
            num_sequences_needed=len(opened.samples),
            wait_seconds=wait_seconds,
        )
        self._events[session_id].append(rejected)

    def retarget(self, session_id: int, retarget: RetargetSequenceGroup) -> None:
        """Fills the reservation from another transfer or by computation. Does nothing unless the group waits for KV."""
        group = self._groups.find(session_id, retarget.sequence_group_id)
        if group is None or not group.is_waiting_for_kv:
            return
        if retarget.transfer_id and self._reservations.is_known(retarget.transfer_id):
            self._fail(group, "the transfer id is in use", code=code_pb2.INTERNAL)
        elif self._reservations.retarget(group, retarget.transfer_id, keeps_received=retarget.keeps_received):
            self._start_samples(group)

    def transfer_completed(self, command: TransferCompleted) -> None:
        group = self._reservations.complete(command.transfer_id, command.stats)
        if group is not None:
            self._start_samples(group)

    def transfer_failed(self, command: TransferFailed) -> None:
        self._reservations.fail(command.transfer_id, command.reason)

    def advance_groups(self) -> None:
        """Starts samples whose KV is available, and fails groups whose reservation is no longer being filled."""
        for group in tuple(self._with_followers):
            (leader,) = group.samples.values()
            if leader.sequence.num_computed >= len(group.shared_token_ids):
                self._start_followers(group, leader)
        starting, overdue = self._reservations.advance()
        for group in starting:
            self._start_samples(group)
        for group in overdue:
            self._fail(group, "the KV transfer failed, and the router has started no other one in time")

    def reclaim_reservation(self, sequence: EngineSequence) -> bool:
        """Frees the blocks of one group that ranks behind the sequence and has received no KV, if such a group exists.

        The group is rejected as if there had been no room when it arrived. This costs less than preempting a sequence,
        whose KV would have to be recomputed. Returns whether blocks became free.
        """
        kv = sequence.kv
        assert kv is not None
        group = self._reservations.last_idle_behind((-sequence.priority, sequence.arrival), kv)
        if group is None:
            return False
        pool, num_shared = self._engine.pool, len(group.shared_token_ids)
        num_free = pool.free_by_group
        self._free(group)
        needed = self._admission.blocks_needed(
            group.opened, kv, num_shared=num_shared, num_new_blocks=pool.num_blocks_for(num_shared), groups=self._groups
        )
        self._report_no_room(group.session_id, group.opened, needed, "its KV blocks were given to a running sequence")
        return pool.free_by_group != num_free

    def _start_samples(self, group: SequenceGroup) -> None:
        """Starts the samples, which share the blocks of their common tokens (copy on write).

        If some of the shared KV is missing, the first sample computes it and the others start after that. A sample
        begins by computing its known tokens that are not shared.
        """
        kv, group.kv = group.kv, None
        assert kv is not None
        first, *others = group.samples_to_start
        if len(group.shared_token_ids) > kv.num_tokens and others:
            group.followers, others = others, []
            self._with_followers[group] = None
        tables = [kv.fork() for _ in others]
        self._start_sample(group, first, kv)
        for start, table in zip(others, tables, strict=True):
            self._start_sample(group, start, table)
        fault_point("decode.before_first_token")

    def _start_followers(self, group: SequenceGroup, leader: Sample) -> None:
        """Starts the others with the shared KV that the leader computed: all, or a part if the leader ended early."""
        del self._with_followers[group]
        starts, group.followers = group.followers, []
        kv = leader.sequence.kv
        for start in starts:
            if kv is None:  # preempted
                table = cached_table(self._engine.pool, group.opened, group.shared_token_ids)
            else:
                table = forked_table(self._engine.pool, kv, group)
            self._start_sample(group, start, table)

    def _start_sample(self, group: SequenceGroup, start: SampleStart, kv: SequenceKV) -> None:
        opened = group.opened
        sequence = EngineSequence(
            key=group.sequence_ids[start.sample],
            token_ids=list(opened.known_token_ids(start)),
            kv=kv,
            priority=opened.options.priority,
            arrival=group.arrival,
            cache_salt=opened.options.kv_salt,
            adapter=group.adapter,
            scoring=scoring_of(opened, kv.num_tokens) if not group.samples else None,
        )
        sampling = self._engine.sampler.start(
            opened.options.sampling,
            sample=start.sample,
            prompt_token_ids=opened.prompt_token_ids,
            generated_token_ids=start.generated_token_ids,
            stop_token_ids=opened.options.stop_token_ids,
            logprobs=opened.options.logprobs,
        )
        sample = Sample(group, start.sample, sequence, sampling, frozenset(opened.options.stop_token_ids))
        self._groups.add_sample(sample)
        self._engine.scheduler.add_running(sequence)

    def _reject(self, command: RouterCommand, reason: RejectReason, message: str) -> None:
        event = Rejected(sequence_group_id=command.message.sequence_group_id, reason=reason, message=message)
        self._events[command.session_id].append(event)

    # --- the end of samples and groups ----------------------------------------------------

    def finish(self, sample: Sample) -> None:
        """Ends a sample that has its last token."""
        fault_point("decode.done")
        self._admission.observe_finished(sample.num_generated)
        opened = sample.group.opened
        if self.kept_answers is not None and opened.options.adapter is None:  # heads are trained on the model's own
            self.kept_answers.keep(
                sample.sequence.token_ids,
                prompt_length=len(opened.prompt_token_ids),
                temperature=opened.options.sampling.temperature,
            )
        self._drop(sample)

    def cancel(self, session_id: int, cancel: CancelSequenceGroup) -> None:
        group = self._groups.find(session_id, cancel.sequence_group_id)
        if group is None:  # the group has already ended
            return
        if not cancel.samples:
            self._free(group)
            return
        if group.is_waiting_for_kv:
            group.cancelled_samples.update(cancel.samples)
            self._close_drafts(group, cancel.samples)
            if not group.samples_to_start:
                self._free(group)
            return
        for index in cancel.samples:
            group.followers = [start for start in group.followers if start.sample != index]
            sample = group.samples.get(index)
            if sample is not None:
                self._drop(sample)
        self._close_drafts(group, cancel.samples)

    def end_session(self, session_id: int) -> None:
        """Frees the groups of a router whose lease has ended, without reports, since nobody would read them."""
        self._fair_shares.settle(session_id)
        for group in self._groups.of_session(session_id):
            self._free(group)
        self._events.pop(session_id, None)

    def fail(self, sample: Sample, why: str) -> None:
        """Fails a request that no other node could continue. Does nothing if the sample has already ended."""
        if sample.group.samples.get(sample.index) is sample:
            self._fail(sample.group, why, code=code_pb2.INVALID_ARGUMENT)

    def fail_all(self, why: str) -> None:
        for group in self._groups:
            self._fail(group, why)

    def free_all(self) -> None:
        for group in self._groups:
            self._free(group)

    def _fail(self, group: SequenceGroup, message: str, *, code: int = code_pb2.UNAVAILABLE) -> None:
        self.report(
            group,
            SequenceGroupFailed(sequence_group_id=group.opened.sequence_group_id, code=code, message=message),
        )
        self._free(group)

    def _free(self, group: SequenceGroup) -> None:
        self._with_followers.pop(group, None)
        group.followers.clear()
        if group.is_waiting_for_kv:
            self._reservations.drop(group)
        for sample in tuple(group.samples.values()):
            self._drop(sample)
        self._close_drafts(group, tuple(group.sequence_ids))
        self._groups.remove(group)

    def _drop(self, sample: Sample) -> None:
        if sample.group in self._with_followers:
            self._start_followers(sample.group, sample)
        self._engine.scheduler.remove(sample.sequence)
        self._close_drafts(sample.group, (sample.index,))
        self._groups.remove_sample(sample)

    def _close_drafts(self, group: SequenceGroup, samples: Sequence[int]) -> None:
        """Closes the drafts of samples that have ended or will not start."""
        for index in samples:
            sequence_id = group.sequence_ids.pop(index, None)
            if sequence_id is not None:
                self._drafts.close(sequence_id)
