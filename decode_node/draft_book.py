"""What the decode node knows about its sequences' drafts: newest states out, proposals in, found by each step.

Pure bookkeeping without IO, so that the whole protocol can be tested in microseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from decode_node.draft_targets import DraftTarget, DraftTargets
from decode_node.drafted_sequence import DraftedSequence, Stage
from outrider.speculation.draft_stream import DraftStatus, SequenceProposals, SequenceStart, SequenceUpdate
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import HashedTokens

MAX_TOKENS_PER_UPDATE = 4096
"""A longer remainder of one sequence goes out in pieces, each after the last was acknowledged."""

MAX_TOKENS_PER_MESSAGE = 16_384

STUCK_SECONDS = 10.0
"""A node that leaves an update unanswered for so long has lost it: its stream is begun anew."""


class DraftWant(NamedTuple):
    """One sequence that would verify draft tokens in this step."""

    sequence_id: int
    token_ids: Sequence[int]  # committed: prompt and generated; read during `take` only
    num_wanted: int
    most_tokens: int = 0  # of a tree, if that is more: siblings are tokens besides those on a path


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounters:
    """Since start."""

    num_wants: int = 0
    num_hits: int = 0
    num_updates_sent: int = 0
    num_messages_sent: int = 0
    num_branches: int = 0
    num_ahead_branches: int = 0  # of them, those that came before they were asked for
    lead_seconds: float = 0.0  # of all drafts found: how long each had been here
    num_syncs: int = 0
    num_stale_answers: int = 0  # unasked: for sequences that ended, moved, never were or are answered
    num_quarantined: int = 0
    num_breaker_openings: int = 0


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
        self._targets = DraftTargets(clock)
        self._counts: Counter[str] = Counter()
        self.has_unsent = False

    # The engine thread's side.

    def open(self, sequence_id: int, start: SequenceStart, token_ids: Sequence[int], *, num_wanted: int) -> None:
        """`token_ids`: prompt and what is generated already."""
        assert sequence_id not in self._sequences, "a sequence is opened once"
        drafted = DraftedSequence(sequence_id, start, HashedTokens(token_ids), num_wanted)
        self._sequences[sequence_id] = drafted
        self._assign(drafted)

    def update(self, sequence_id: int, new_token_ids: Sequence[int], *, num_wanted: int) -> None:
        """Newly committed tokens; an unknown sequence is ignored."""
        drafted = self._sequences.get(sequence_id)
        if drafted is not None:
            drafted.commit(new_token_ids, num_wanted=num_wanted)
            self._note_news(drafted)

    def close(self, sequence_id: int) -> None:
        drafted = self._sequences.pop(sequence_id, None)
        if drafted is not None:
            self._unassign(drafted)

    def find(self, wants: Iterable[DraftWant], *, wait_seconds: float) -> tuple[dict[int, DraftTree], list[DraftWant]]:
        """Drafts at hand, and the wants for which it may be worth waiting.

        `wait_seconds`: how long the caller would wait for them.
        """
        now = self._clock()
        found: dict[int, DraftTree] = {}
        missing: list[DraftWant] = []
        lead_seconds = 0.0
        sequences = self._sequences
        for want in wants:
            sequence_id, token_ids, num_wanted, most_tokens = want
            drafted = sequences.get(sequence_id)
            if drafted is None or num_wanted <= 0:
                continue
            if not drafted.is_followed(token_ids):
                drafted.follow(token_ids, num_wanted=num_wanted)
                self._note_news(drafted)
            kept = drafted.trees.take(drafted.committed, num_wanted, most_in_tree=most_tokens)
            if kept is not None:
                found[sequence_id] = kept.tree
                lead_seconds += now - kept.arrived_at
            elif self._may_be_answered(drafted, now, wait_seconds):
                missing.append(want)
        self._count(lead_seconds=lead_seconds)
        return found, missing

    def judge(
        self, wants: Sequence[DraftWant], found: Mapping[int, DraftTree], *, unanswered: Sequence[DraftWant]
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
            drafted = self._sequences.get(want.sequence_id)
            if drafted is None or want.num_wanted <= 0:
                continue
            num_wants += 1
            if drafted.target is None or drafted.target in succeeded:
                continue
            if want.sequence_id in found or drafted.is_answered:
                succeeded.add(drafted.target)
            elif want.sequence_id in waited_for or self._targets[drafted.target].is_overdue(
                drafted.asked_since(), now, step_seconds=self._targets.step_seconds
            ):
                missed.add(drafted.target)
        for index in succeeded:
            self._targets[index].breaker.success()
        for index in missed - succeeded:
            if self._targets[index].missed(now):
                self._spread(self._targets[index], keep=1)
        self._count(num_wants=num_wants, num_hits=len(found))

    def observe_step(self, seconds: float) -> None:
        """How long a step of the engine took: what is late depends on it."""
        self._targets.observe_step(seconds)

    # The streams' side.

    def add_target(self, *, rank: int = 0) -> int:
        """One more; the number by which it is called from here on.

        `rank` decides between targets that serve equally many sequences: decode nodes
        that rank the same targets differently do not all begin with the same one.
        """
        return self._targets.add(rank=rank)

    def remove_target(self, target: int) -> None:
        """Its stream is gone and will not come back."""
        self.disconnected(target)
        self._targets.remove(target)

    def connected(self, target: int) -> None:
        """A new stream is up: its node knows nothing yet."""
        self._targets[target].connected()
        for drafted in self._sequences.values():
            drafted.stream_begins(target)
            if drafted.target is None:
                self._assign(drafted)

    def disconnected(self, target: int) -> None:
        """The stream is gone; its sequences go to other nodes, from their start."""
        self._targets[target].disconnected()
        self._spread(self._targets[target], keep=0)

    def take_updates(self, target: int) -> list[SequenceUpdate]:
        """The newest state of what this target has not been told; empty when there is nothing to send now."""
        state = self._targets[target]
        if not state.may_send():
            return []
        now = self._clock()
        updates = [SequenceUpdate(sequence_id=sequence_id, closed=True) for sequence_id in state.closed]
        state.closed.clear()
        tokens_left = MAX_TOKENS_PER_MESSAGE
        self.has_unsent = any(other.news or other.closed for other in self._targets if other is not state)
        for sequence_id in tuple(state.news):
            drafted = self._sequences[sequence_id]
            stage = drafted.stage(now)
            is_tellable = stage is Stage.READY or stage is Stage.CATCHING_UP
            if is_tellable and tokens_left <= 0:
                self.has_unsent = True
                break
            if is_tellable and drafted.has_news:
                update = drafted.make_update(now, most_tokens=min(MAX_TOKENS_PER_UPDATE, tokens_left))
                tokens_left -= len(update.token_ids)
                updates.append(update)
            if stage is not Stage.POSTPONED:  # else its answer notes what is left, here the clock brings us back
                del state.news[sequence_id]
        if updates:
            state.sent(now)
            self._count(num_messages_sent=1, num_updates_sent=len(updates))
        return updates

    def take_proposals(self, target: int, answers: Iterable[SequenceProposals]) -> None:
        """Checks what a node says and keeps what can be true. Never raises: a peer may say anything."""
        state = self._targets[target]
        now = self._clock()
        state.answered(now, step_seconds=self._targets.step_seconds)
        num_branches = num_syncs = 0
        for answer in answers:
            drafted = self._sequences.get(answer.sequence_id)
            if drafted is not None and drafted.target != target:
                drafted = None
            if answer.status is DraftStatus.AHEAD:
                self._take_ahead(drafted, state, answer, now)
            elif drafted is None or not drafted.is_awaited:
                state.was_unasked()
                self._count(num_stale_answers=1)  # it ended, moved, or was answered already
            elif not drafted.is_plausible(answer, vocab_size=self._vocab_size):
                self._quarantine(drafted, state)
            else:
                state.was_asked()
                seconds = drafted.take_answer(answer, now)
                if seconds is not None:
                    state.observe_answer(seconds)
                num_branches += len(answer.branches)
                num_syncs += answer.status is DraftStatus.UNKNOWN_PREFIX
                self._note_news(drafted)
        self._count(num_branches=num_branches, num_syncs=num_syncs)

    def _take_ahead(
        self, drafted: DraftedSequence | None, target: DraftTarget, answer: SequenceProposals, now: float
    ) -> None:
        """Branches besides answers: as many as updates have allowed. What exceeds that is stale."""
        num_allowed = 0 if drafted is None else drafted.num_ahead_allowed(len(answer.branches))
        if num_allowed < max(1, len(answer.branches)):  # a message without any is one too many
            target.was_unasked()
            self._count(num_stale_answers=1)
        if drafted is None or not num_allowed:
            return
        if not drafted.is_plausible(answer, vocab_size=self._vocab_size):
            self._quarantine(drafted, target)
            return
        trees = answer.branches[:num_allowed]
        drafted.take_ahead(trees, now)
        self._count(num_branches=len(trees), num_ahead_branches=len(trees))

    # Views.

    @property
    def step_seconds(self) -> float:
        """How long a step of the engine takes at present; 0: none was done."""
        return self._targets.measured_step_seconds

    def is_stuck(self, target: int) -> bool:
        """Whether an update has been unanswered for very long."""
        sent_before = self._clock() - STUCK_SECONDS
        return any(
            (asked_since := drafted.asked_since()) is not None and asked_since < sent_before
            for drafted in self._sequences.values()
            if drafted.target == target
        )

    def is_flooding(self, target: int) -> bool:
        """Whether it sends answer after answer that nobody has asked for."""
        return self._targets[target].is_flooding

    def is_connected(self, target: int) -> bool:
        return self._targets[target].is_connected

    def is_breaker_open(self, target: int) -> bool:
        return self._targets[target].breaker.is_open

    def num_sequences(self, target: int) -> int:
        return self._targets[target].num_sequences

    def counters(self) -> DraftCounters:
        counts: Mapping[str, Any] = self._counts
        return DraftCounters(**counts, num_breaker_openings=self._targets.num_breaker_openings)

    # Inside.

    def _may_be_answered(self, drafted: DraftedSequence, now: float, wait_seconds: float) -> bool:
        """Whether a proposal may arrive in time.

        A sequence that had nothing last time is not waited for, nor a node whose answers
        usually take longer than there is time: its late proposals serve all the same.
        """
        if drafted.target is None or drafted.had_nothing or drafted.is_answered:
            return False
        asked_since = drafted.asked_since()
        seconds_ago = 0.0 if asked_since is None else now - asked_since
        return self._targets[drafted.target].may_answer_within(wait_seconds, asked_seconds_ago=seconds_ago)

    def _note_news(self, drafted: DraftedSequence) -> None:
        if drafted.has_news and drafted.target is not None:
            self._targets[drafted.target].news[drafted.sequence_id] = None
            self.has_unsent = True

    def _quarantine(self, drafted: DraftedSequence, target: DraftTarget) -> None:
        """This node is not believed about this sequence any more; another one may be."""
        drafted.refused.add(target.index)
        drafted.trees.clear()
        self._count(num_quarantined=1)
        self._unassign(drafted)
        self._assign(drafted)

    def _assign(self, drafted: DraftedSequence) -> None:
        target = self._targets.choose(refused=drafted.refused)
        if target is not None:
            target.num_sequences += 1
            target.closed.discard(drafted.sequence_id)
            drafted.serve(target.index)
            self._note_news(drafted)

    def _unassign(self, drafted: DraftedSequence) -> None:
        if drafted.target is None:
            return
        target = self._targets[drafted.target]
        target.num_sequences -= 1
        target.news.pop(drafted.sequence_id, None)
        if target.is_connected and drafted.is_known_to_target:
            target.closed.add(drafted.sequence_id)
            self.has_unsent = True
        target.num_under_way += drafted.leave()

    def _spread(self, target: DraftTarget, *, keep: int) -> None:
        """Moves all but `keep` sequences of a target to others that work; without those they stay."""
        if target.is_connected and not self._targets.has_other_than(target):
            return
        moving = [drafted for drafted in self._sequences.values() if drafted.target == target.index]
        for drafted in moving[keep:]:
            self._unassign(drafted)
            self._assign(drafted)

    def _count(self, **increments: float) -> None:
        for name, by in increments.items():
            self._counts[name] += by  # type: ignore[assignment]  # seconds among them
