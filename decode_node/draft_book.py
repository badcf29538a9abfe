"""What the decode node knows about its sequences' drafts: newest state, proposals, who serves whom.

Pure bookkeeping without IO, so that the whole protocol can be tested in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from decode_node.draft_breaker import Breaker
from decode_node.drafted_sequence import DraftedSequence, SequenceStartInfo
from outrider.speculation.draft_stream import MAX_BRANCHES_PER_SEQUENCE, SequenceProposals, SequenceUpdate
from outrider.speculation.proposal_table import ProposalTable

MAX_TOKENS_PER_UPDATE = 4096
"""A longer remainder of one sequence goes out in pieces, each after the last was acknowledged."""

MAX_TOKENS_PER_MESSAGE = 16_384

KEEP_UP_TOKENS = 32
"""A sequence that wants no drafts is told of in pieces of so many tokens, not at each step."""

RETRY_SECONDS = 1.0
"""Between two tries of a sequence that its node lost twice or has no room for."""

LATE_SECONDS = 0.05
"""An update that is unanswered for longer counts as a miss even if no step waited for it."""

LATENCY_SMOOTHING = 0.2

STUCK_SECONDS = 10.0
"""A node that leaves an update unanswered for so long has lost it: its stream is begun anew."""

PROBE_BUDGET_SECONDS = 0.025
"""An answer that comes within this closes an open breaker."""


@dataclass(frozen=True, slots=True)
class DraftWant:
    """One sequence that would verify draft tokens in this step."""

    sequence_id: int
    token_ids: Sequence[int]  # committed: prompt and generated; read during `take` only
    num_wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounters:
    """Since start."""

    num_wants: int = 0
    num_hits: int = 0
    num_updates_sent: int = 0
    num_messages_sent: int = 0
    num_branches: int = 0
    num_syncs: int = 0
    num_stale_answers: int = 0  # for sequences that ended, moved or never were
    num_quarantined: int = 0
    num_breaker_openings: int = 0


@dataclass(slots=True)
class _Target:
    breaker: Breaker
    rank: int  # among targets with equally many sequences, the lowest comes first
    is_connected: bool = False
    num_sequences: int = 0
    closed: set[int] = field(default_factory=set)  # the node has still to hear of
    probe_sent_at: float | None = None
    missed_at: float = float("-inf")
    answer_seconds: float = 0.0  # running mean of how long an answer takes

    def observe_answer(self, seconds: float) -> None:
        self.answer_seconds += LATENCY_SMOOTHING * (seconds - self.answer_seconds)


class DraftBook:
    """Newest state of every sequence, for any number of draft targets. Guarded by its owner's lock.

    A sequence has at most one unanswered update. So however long a node is frozen, it
    finds one message when it thaws, and the next is made from the state of that moment.

    One target serves a sequence at a time: the connected one with the fewest of them when
    it is opened, another one when that is lost, stands still or answers nonsense.
    """

    def __init__(self, *, vocab_size: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._vocab_size = vocab_size
        self._sequences: dict[int, DraftedSequence] = {}
        self._targets: dict[int, _Target] = {}
        self._num_targets_ever = 0
        self._num_past_openings = 0  # of the breakers of targets that are gone
        self._table = ProposalTable(max_branches_per_sequence=MAX_BRANCHES_PER_SEQUENCE)
        self._counters = DraftCounters()
        self._wait_seconds = 0.0
        self.has_unsent = False

    # The engine thread's side.

    def open(self, sequence_id: int, start: SequenceStartInfo, *, num_wanted: int) -> None:
        assert sequence_id not in self._sequences, "a sequence is opened once"
        tracked = DraftedSequence.of(start, num_wanted=num_wanted)
        self._sequences[sequence_id] = tracked
        self._assign(sequence_id, tracked)

    def update(self, sequence_id: int, new_token_ids: Sequence[int], *, num_wanted: int) -> None:
        """Newly committed tokens; an unknown sequence is ignored."""
        tracked = self._sequences.get(sequence_id)
        if tracked is None:
            return
        tracked.committed.extend(new_token_ids)
        only_keeps_up = num_wanted <= 0 and tracked.num_wanted <= 0
        tracked.num_wanted = num_wanted
        if not only_keeps_up or len(tracked.committed) - tracked.sent_length >= KEEP_UP_TOKENS:
            self._mark_unsent(tracked)

    def close(self, sequence_id: int) -> None:
        tracked = self._sequences.pop(sequence_id, None)
        if tracked is not None:
            self._unassign(sequence_id, tracked)
        self._table.forget(sequence_id)

    def find(
        self, wants: Iterable[DraftWant], *, wait_seconds: float
    ) -> tuple[dict[int, tuple[int, ...]], list[DraftWant]]:
        """Proposals at hand, and the wants for which it may be worth waiting.

        `wait_seconds`: how long the caller would wait for them.
        """
        self._wait_seconds = wait_seconds
        found: dict[int, tuple[int, ...]] = {}
        missing: list[DraftWant] = []
        for want in wants:
            tracked = self._sequences.get(want.sequence_id)
            if tracked is None or want.num_wanted <= 0:
                continue
            self._follow(tracked, want)
            token_ids = self._table.take(want.sequence_id, tracked.committed, want.num_wanted)
            if token_ids:
                found[want.sequence_id] = token_ids
            elif self._may_be_answered(tracked):
                missing.append(want)
        return found, missing

    def judge(
        self, wants: Sequence[DraftWant], found: dict[int, tuple[int, ...]], *, unanswered: Sequence[DraftWant]
    ) -> None:
        """Counts the step, and tells each target's breaker how it did.

        A miss is a step that wanted drafts and found none of them in time although the
        node was asked; an answer that it has nothing is no miss.
        """
        now = self._clock()
        waited_for = {want.sequence_id for want in unanswered}
        succeeded: set[int] = set()
        missed: set[int] = set()
        num_wants = 0
        for want in wants:
            tracked = self._sequences.get(want.sequence_id)
            if tracked is None or want.num_wanted <= 0:
                continue
            num_wants += 1
            if tracked.target is None:
                continue
            if want.sequence_id in found or tracked.answered_length >= len(tracked.committed):
                succeeded.add(tracked.target)
            elif want.sequence_id in waited_for or self._is_overdue(tracked, self._targets[tracked.target], now):
                missed.add(tracked.target)
        for index in succeeded:
            self._targets[index].breaker.success()
        for index in missed - succeeded:
            self._targets[index].missed_at = now
            if self._targets[index].breaker.miss():
                self._spread(index, keep=1)
        counters = self._counters
        self._counters = replace(
            counters, num_wants=counters.num_wants + num_wants, num_hits=counters.num_hits + len(found)
        )

    # The streams' side.

    def add_target(self, *, rank: int = 0) -> int:
        """One more; the number by which it is called from here on.

        `rank` decides between targets that serve equally many sequences: decode nodes
        that rank the same targets differently do not all begin with the same one.
        """
        target = self._num_targets_ever
        self._num_targets_ever += 1
        self._targets[target] = _Target(Breaker(self._clock), rank)
        return target

    def remove_target(self, target: int) -> None:
        """Its stream is gone and will not come back."""
        self.disconnected(target)
        self._num_past_openings += self._targets.pop(target).breaker.num_openings

    def connected(self, target: int) -> None:
        """A new stream is up: its node knows nothing yet."""
        self._targets[target].is_connected = True
        self._targets[target].breaker.success()
        for sequence_id, tracked in self._sequences.items():
            tracked.refused.discard(target)  # what the last stream said is no guilt of this one
            if tracked.target is None:
                self._assign(sequence_id, tracked)

    def disconnected(self, target: int) -> None:
        """The stream is gone; its sequences go to other nodes, from their start."""
        state = self._targets[target]
        state.is_connected = False
        self._spread(target, keep=0)
        state.closed.clear()
        state.probe_sent_at = None

    def take_updates(self, target: int) -> list[SequenceUpdate]:
        """The newest state of what this target has not been told; empty when there is nothing to send now."""
        state = self._targets[target]
        if not state.is_connected or not state.breaker.may_send():
            return []
        now = self._clock()
        updates = [SequenceUpdate(sequence_id=sequence_id, closed=True) for sequence_id in state.closed]
        state.closed.clear()
        tokens_left = MAX_TOKENS_PER_MESSAGE
        all_sent = True
        for sequence_id, tracked in self._sequences.items():
            if tracked.target is None or not tracked.is_unsent:
                continue
            if tracked.target != target or tokens_left <= 0:
                all_sent = False
                continue
            if tracked.asked_length is not None or now < tracked.not_before:
                continue  # its answer, or the clock of the stream, brings us back here
            update = tracked.make_update(sequence_id, now, min(MAX_TOKENS_PER_UPDATE, tokens_left))
            tokens_left -= len(update.token_ids)
            updates.append(update)
        self.has_unsent = not all_sent
        if updates:
            if state.breaker.is_open:
                state.probe_sent_at = now
            state.breaker.probed()
            counters = self._counters
            self._counters = replace(
                counters,
                num_messages_sent=counters.num_messages_sent + 1,
                num_updates_sent=counters.num_updates_sent + len(updates),
            )
        return updates

    def take_proposals(self, target: int, answers: Iterable[SequenceProposals]) -> None:
        """Checks what a node says and keeps what can be true. Never raises: a peer may say anything."""
        state = self._targets[target]
        if state.probe_sent_at is not None and self._clock() - state.probe_sent_at <= PROBE_BUDGET_SECONDS:
            state.breaker.success()
        state.probe_sent_at = None
        for answer in answers:
            tracked = self._sequences.get(answer.sequence_id)
            if tracked is None or tracked.target != target or not tracked.sent_length:
                self._count(num_stale_answers=1)  # it ended, moved, or has come back just now
            elif not tracked.is_plausible(answer, vocab_size=self._vocab_size):
                self._quarantine(answer.sequence_id, tracked)
            else:
                self._apply(tracked, state, answer)

    # Views.

    def is_stuck(self, target: int) -> bool:
        """Whether an update has been unanswered for very long."""
        sent_before = self._clock() - STUCK_SECONDS
        return any(
            tracked.target == target and tracked.asked_length is not None and tracked.asked_at < sent_before
            for tracked in self._sequences.values()
        )

    def is_connected(self, target: int) -> bool:
        return self._targets[target].is_connected

    def is_breaker_open(self, target: int) -> bool:
        return self._targets[target].breaker.is_open

    def num_sequences(self, target: int) -> int:
        return self._targets[target].num_sequences

    def counters(self) -> DraftCounters:
        num_openings = sum(state.breaker.num_openings for state in self._targets.values())
        return replace(self._counters, num_breaker_openings=self._num_past_openings + num_openings)

    # Inside.

    def _follow(self, tracked: DraftedSequence, want: DraftWant) -> None:
        """Takes over what the want knows and no update has told."""
        if len(want.token_ids) > len(tracked.committed):
            tracked.committed.extend(want.token_ids[len(tracked.committed) :])
            self._mark_unsent(tracked)
        if tracked.num_wanted <= 0:
            tracked.num_wanted = want.num_wanted
            self._mark_unsent(tracked)

    def _may_be_answered(self, tracked: DraftedSequence) -> bool:
        """Whether a proposal may arrive in time.

        A sequence that had nothing last time is not waited for, nor a node whose answers
        usually take longer than there is time: its late proposals serve all the same.
        """
        if tracked.target is None or tracked.last_was_empty or tracked.answered_length >= len(tracked.committed):
            return False
        state = self._targets[tracked.target]
        if not state.is_connected or state.breaker.is_open:
            return False
        seconds_ago = 0.0 if tracked.asked_length is None else self._clock() - tracked.asked_at
        return state.answer_seconds - seconds_ago <= self._wait_seconds

    def _is_overdue(self, tracked: DraftedSequence, state: _Target, now: float) -> bool:
        """Whether an unanswered update is a miss by its age alone: once in each span of that length."""
        return tracked.asked_length is not None and now - max(tracked.asked_at, state.missed_at) > LATE_SECONDS

    def _mark_unsent(self, tracked: DraftedSequence) -> None:
        tracked.is_unsent = True
        if tracked.target is not None:
            self.has_unsent = True

    def _apply(self, tracked: DraftedSequence, state: _Target, answer: SequenceProposals) -> None:
        asked_length = tracked.asked_length
        now = self._clock()
        if answer.need_sync:
            if now - tracked.synced_at < RETRY_SECONDS:
                tracked.not_before = tracked.synced_at + RETRY_SECONDS
            tracked.synced_at = now
            tracked.acked_length = 0
            tracked.asked_length = None
            self._mark_unsent(tracked)
            self._count(num_syncs=1)
            return
        tracked.acked_length = max(tracked.acked_length, answer.acked_length)
        if asked_length is not None and (answer.acked_length >= asked_length or not answer.branches):
            if answer.acked_length < asked_length:  # no room for it over there
                tracked.not_before = now + RETRY_SECONDS
                self._mark_unsent(tracked)
            if tracked.asked_wanted > 0:
                state.observe_answer(now - tracked.asked_at)
                tracked.answered_length = max(tracked.answered_length, asked_length)
                tracked.last_was_empty = not answer.branches
            tracked.asked_length = None
        for branch in answer.branches:
            self._table.add(answer.sequence_id, branch)
        if answer.branches:
            tracked.last_was_empty = False
            self._count(num_branches=len(answer.branches))
        if tracked.is_unsent:
            self.has_unsent = True

    def _quarantine(self, sequence_id: int, tracked: DraftedSequence) -> None:
        """This node is not believed about this sequence any more; another one may be."""
        assert tracked.target is not None
        tracked.refused.add(tracked.target)
        self._table.forget(sequence_id)
        self._count(num_quarantined=1)
        self._unassign(sequence_id, tracked)
        self._assign(sequence_id, tracked)

    def _assign(self, sequence_id: int, tracked: DraftedSequence) -> None:
        """To the connected target with the fewest sequences; one that is being probed gets one at most."""
        able = [
            (state.num_sequences, state.rank, index)
            for index, state in self._targets.items()
            if state.is_connected
            and index not in tracked.refused
            and (not state.breaker.is_open or state.num_sequences == 0)
        ]
        if not able:
            able = [
                (state.num_sequences, state.rank, index)
                for index, state in self._targets.items()
                if state.is_connected and index not in tracked.refused
            ]
        if not able:
            return
        tracked.target = min(able)[-1]
        state = self._targets[tracked.target]
        state.num_sequences += 1
        state.closed.discard(sequence_id)
        tracked.begin_stream()
        self._mark_unsent(tracked)

    def _unassign(self, sequence_id: int, tracked: DraftedSequence) -> None:
        if tracked.target is None:
            return
        state = self._targets[tracked.target]
        state.num_sequences -= 1
        if state.is_connected and tracked.sent_length > 0:
            state.closed.add(sequence_id)
            self.has_unsent = True
        tracked.target = None

    def _spread(self, target: int, *, keep: int) -> None:
        """Moves all but `keep` sequences of a target to others that work; without those they stay."""
        others = [
            index
            for index, state in self._targets.items()
            if index != target and state.is_connected and not state.breaker.is_open
        ]
        if not others and self._targets[target].is_connected:
            return
        for sequence_id, tracked in self._sequences.items():
            if tracked.target != target:
                continue
            if keep > 0:
                keep -= 1
                continue
            self._unassign(sequence_id, tracked)
            self._assign(sequence_id, tracked)

    def _count(self, **increments: int) -> None:
        changes = {name: getattr(self._counters, name) + by for name, by in increments.items()}
        self._counters = replace(self._counters, **changes)
