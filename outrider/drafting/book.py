"""The decode node's side of the draft protocol: it sends the newest states and finds drafts for each step.

It does no I/O, so the whole protocol can be tested in microseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.drafting.draft_nodes import DraftNodes, DraftNodeState
from outrider.drafting.drafted_sequence import Assignment, DraftedSequence, FeatureSource
from outrider.speculation.draft_stream import (
    MAX_FEATURE_BYTES_PER_MESSAGE,
    DraftStatus,
    SequenceProposals,
    SequenceStart,
    SequenceUpdate,
    StepNotice,
)
from outrider.speculation.draft_tree import DraftTree, RankedDraft
from outrider.speculation.prefix_hash import HashedTokens

MAX_TOKENS_PER_UPDATE = 4096
"""Maximum tokens of one update. More tokens take several updates, each sent after the previous one is acknowledged."""

MAX_TOKENS_PER_MESSAGE = 16_384

FeatureParts = dict[int, tuple[Assignment, range]]
"""By place in a list of updates: the sequence, and the tokens whose features the update is to carry."""

UNANSWERED_SECONDS = 10.0
"""Seconds after which an unanswered update counts as lost, and the stream is opened again."""


@dataclass(slots=True)
class DraftCounters:
    """Counters since the start of the process."""

    lead_seconds: float = 0.0  # sum of the times between a draft's arrival and its use
    num_stale_answers: int = 0  # for sequences that have ended or moved, never existed, or are already answered
    num_quarantined: int = 0  # invalid answers, whose sequences were moved to other nodes


@dataclass(slots=True)
class StepDrafts:
    """The drafts of one step, by sequence id: those of draft nodes, and the best ones of all sources."""

    trees: dict[int, DraftTree] = field(default_factory=dict)  # from draft nodes
    requested: set[int] = field(default_factory=set)  # sequences that want drafts
    awaited: set[int] = field(default_factory=set)  # requested sequences whose draft node is not late
    hits: set[int] = field(default_factory=set)  # requested sequences whose draft was available
    missing: list[int] = field(default_factory=list)  # requested sequences whose draft may arrive if the step waits
    waited_seconds: float = 0.0
    ranked: dict[int, RankedDraft] = field(default_factory=dict)  # the best draft of each sequence, from any source


class DraftBook:
    """The newest state of every sequence, for any number of draft nodes. Guarded by its owner's lock.

    A sequence has at most one unanswered update. So a node that was suspended, for however long, finds one message when
    it resumes, and the next message is made from the state that is newest then.

    One node serves a sequence at a time: first the connected node with the fewest sequences, then another one if the
    first is lost, late or full, or sends an invalid answer. Each such assignment has its own stream id.
    """

    def __init__(self, *, clock: Callable[[], float], features: FeatureSource | None = None) -> None:
        """`features`: where the features of tokens are; None if none are computed."""
        self._clock = clock
        self._features = features
        self.reads_wait = features is not None and features.reads_wait  # whether `read_features` may wait
        self.nodes = DraftNodes()
        self._sequences: dict[int, DraftedSequence] = {}  # by the engine's sequence id
        self._served: dict[int, Assignment] = {}  # by stream id
        self._unserved: dict[DraftedSequence, None] = {}  # sequences for which no node has room
        self._stream_ids = itertools.count(1)
        self.counters = DraftCounters()
        self.min_reach = 0.0
        """The `min_reach` of requests: see ProposalRequest."""

    # Called by the engine thread.

    def open(self, sequence_id: int, start: SequenceStart, token_ids: Sequence[int], *, num_wanted: int) -> None:
        """Adds a sequence. `token_ids`: the prompt and already generated tokens."""
        assert sequence_id not in self._sequences, "a sequence is opened once"
        drafted = DraftedSequence(start, HashedTokens(token_ids), num_wanted)
        self._sequences[sequence_id] = drafted
        self._assign(drafted, self._clock())

    def update(self, sequence_id: int, new_token_ids: Sequence[int], *, num_wanted: int, kv: Any = None) -> None:
        """Adds newly committed tokens; an unknown sequence is ignored. `kv`: the table of the blocks with features."""
        drafted = self._sequences.get(sequence_id)
        if drafted is not None:
            drafted.kv = kv
            drafted.commit(new_token_ids, num_wanted=num_wanted)
            self._mark_dirty(drafted)

    def begin_step(self, verified: Mapping[int, tuple[int, ...]]) -> None:
        """Makes notices of a step for the nodes that draft for its sequences.

        `verified`: by sequence id, the likeliest path of the draft that is verified; empty if there is none.
        """
        for sequence_id, token_ids in verified.items():
            drafted = self._sequences.get(sequence_id)
            served = None if drafted is None or drafted.num_wanted <= 0 else drafted.assignment
            if drafted is not None and served is not None and served.sent_length:
                notice = StepNotice(served.stream_id, len(drafted.committed), token_ids)
                served.node.notices[served.stream_id] = notice
                served.node.has_due_notices |= notice.length == served.sent_length

    def close(self, sequence_id: int) -> None:
        """Forgets a sequence, if it is known."""
        drafted = self._sequences.pop(sequence_id, None)
        if drafted is None:
            return
        self._unserved.pop(drafted, None)
        if drafted.assignment is not None:
            drafted.assignment.node.retry_at = 0.0  # if the node was full, it now has room again
            self._unassign(drafted.assignment)

    def find(self, sequence_ids: Iterable[int], *, wait_seconds: float) -> StepDrafts:
        """Finds the available drafts. `wait_seconds`: how long the caller would wait for missing ones."""
        now = self._clock()
        found = StepDrafts()
        for sequence_id in sequence_ids:
            drafted = self._sequences.get(sequence_id)
            if drafted is None or drafted.num_wanted <= 0:
                continue
            found.requested.add(sequence_id)
            if drafted.assignment is not None and self.nodes.is_usable(drafted.assignment.node, now):
                found.awaited.add(sequence_id)
            kept = drafted.trees.take(drafted.committed)
            if kept is not None:
                found.trees[sequence_id] = kept.tree
                found.hits.add(sequence_id)
                self.counters.lead_seconds += now - kept.arrived_at
            elif wait_seconds > 0.0 and self._may_come(drafted, now, wait_seconds):
                found.missing.append(sequence_id)
        return found

    def observe_step(self, seconds: float) -> None:
        """Records the duration of a step, and moves the sequences of late nodes to other nodes."""
        self.nodes.observe_step(seconds)
        now = self._clock()
        for node in self.nodes:
            is_late = node.is_connected and self.nodes.is_late(node, now)
            if not is_late:
                node.was_relieved = False
            elif not node.was_relieved and any(self.nodes.is_usable(other, now) for other in self.nodes):
                node.was_relieved = True
                self._move_away(node, keep=1)

    # Called by the streams.

    def remove_node(self, node: DraftNodeState) -> None:
        """Removes a node whose stream will not come back."""
        self.disconnected(node)
        self.nodes.remove(node)

    def connected(self, node: DraftNodeState, *, needs_features: bool = False) -> None:
        """Records that a stream is open. The node knows no sequence yet. `needs_features`: whether it has a head."""
        node.is_connected = True
        node.needs_features = needs_features
        node.retry_seconds = 0.0
        self._assign_unserved(self._clock())

    def disconnected(self, node: DraftNodeState) -> None:
        """Records that the stream has ended. The node's sequences are sent to other nodes, from the first token on."""
        node.disconnected()
        self._move_away(node, keep=0)

    def begin_updates(self, node: DraftNodeState) -> tuple[list[SequenceUpdate], FeatureParts]:
        """Returns updates with everything that this node does not know yet, and the features that are to be added.

        There are none if there is nothing to send now.
        """
        if not node.is_connected:
            return [], {}
        now = self._clock()
        min_length = min((len(each.committed) for each in self._unserved), default=0)
        if self._unserved and any(other.is_connected and other.has_room(now, min_length) for other in self.nodes):
            self._assign_unserved(now)
        updates = [SequenceUpdate(sequence_id=stream_id, closed=True) for stream_id in node.closed]
        node.closed.clear()
        feature_bytes = 0 if self._features is None else self._features.bytes_per_token
        tokens_left, feature_bytes_left = MAX_TOKENS_PER_MESSAGE, MAX_FEATURE_BYTES_PER_MESSAGE
        parts: FeatureParts = {}
        for stream_id in tuple(node.dirty):
            served = self._served[stream_id]
            if served.pending is None and now < served.ready_at:
                continue  # the sequence stays in `dirty` until then
            if served.pending is None and served.sequence.is_dirty:
                if tokens_left <= 0 or feature_bytes_left < feature_bytes:
                    break
                update, features = served.make_update(
                    now,
                    max_tokens=min(MAX_TOKENS_PER_UPDATE, tokens_left),
                    max_feature_bytes=feature_bytes_left,
                    min_reach=self.min_reach,
                )
                node.unanswered[served.stream_id] = now
                tokens_left -= len(update.token_ids)
                if features:
                    feature_bytes_left -= len(features) * feature_bytes
                    parts[len(updates)] = served, features
                updates.append(update)
            del node.dirty[stream_id]  # the answer adds the id again if there is more to send
        return updates, parts

    def read_features(self, parts: FeatureParts) -> list[bytes | None]:
        """Reads the features. Call it without the lock: on a GPU, the read may wait for a forward pass."""
        if not parts or self._features is None:
            return []
        return self._features.read([(served.sequence.kv, part.start, part.stop) for served, part in parts.values()])

    def finish_updates(
        self, updates: list[SequenceUpdate], parts: FeatureParts, payloads: Sequence[bytes | None]
    ) -> list[SequenceUpdate]:
        """Adds what was read. Features of a sequence that has lost its blocks are left out."""
        for (place, (served, _)), payload in zip(parts.items(), payloads, strict=True):
            updates[place] = updates[place]._replace(features=payload or b"")
            if payload is None and served.pending is not None:
                served.pending = served.pending._replace(num_features=0)
        return updates

    def take_notices(self, node: DraftNodeState) -> list[StepNotice]:
        """Returns the newest notices of sequences whose newest tokens the node was sent. Comes after `begin_updates`.

        A notice whose update waits for the answer to the one before stays, until both leave or a newer one replaces it.
        """
        due = [each for key, each in node.notices.items() if each.length == self._served[key].sent_length]
        for notice in due:
            del node.notices[notice.sequence_id]
        node.has_due_notices = False
        return due

    def take_answer(self, node: DraftNodeState, answer: SequenceProposals, *, is_well_formed: bool) -> bool:
        """Applies an answer if it is due and plausible. Never raises, since a peer's input is not trusted.

        Args:
            node: the node on whose stream the answer came.
            answer: the parsed message.
            is_well_formed: the result of the function `is_well_formed` for this answer.

        Returns:
            False if the answer was invalid; then the node no longer serves this sequence.
        """
        now = self._clock()
        served = self._served.get(answer.sequence_id)
        if served is None or served.node is not node:
            self._count_stale(node)  # the sequence has ended, or moved
            return True
        is_ahead, branches = answer.status is DraftStatus.AHEAD, answer.branches
        if is_ahead:
            branches = branches[: served.num_ahead_allowed]
            if len(branches) < max(1, len(answer.branches)):  # a message without branches is unsolicited, too
                self._count_stale(node)
            if not branches:
                return True
        elif served.pending is None and not served.is_catching_up:  # no answer is due
            self._count_stale(node)
            return True
        if not is_well_formed or not served.is_plausible(answer):
            self._quarantine(served, now)
            return False
        if is_ahead:
            served.num_ahead_allowed -= len(branches)
            served.sequence.keep(branches, now)
            return True
        node.num_unsolicited = 0
        if answer.status is DraftStatus.NO_ROOM:
            node.observe_refusal(served.stream_id, now, served.sent_length)
            served.sequence.num_refusals += 1
            self._move(served, now)
            return True
        seconds = served.take_answer(answer, now)
        if seconds is not None:
            node.observe_answer(seconds)
        if served.pending is None:
            node.unanswered.pop(served.stream_id, None)
        is_accepted = answer.status is not DraftStatus.UNKNOWN_PREFIX
        if is_accepted and node.observe_acceptance(served.stream_id, now, others_wait=bool(self._unserved)):
            self._assign_unserved(now)
        self._mark_dirty(served.sequence)
        return True

    # State.

    @property
    def has_unsent(self) -> bool:
        """Whether there may be something to send to a node."""
        return any(node.dirty or node.closed or node.has_due_notices for node in self.nodes)

    @property
    def needs_features(self) -> bool:
        """Whether any connected node needs features."""
        return any(node.needs_features for node in self.nodes)

    def is_late(self, node: DraftNodeState) -> bool:
        """Returns whether this node is late or not connected, so that steps do not wait for it."""
        return not self.nodes.is_usable(node, self._clock())

    def has_lost_an_update(self, node: DraftNodeState) -> bool:
        """Returns whether an update has been unanswered for more than UNANSWERED_SECONDS."""
        return node.unanswered_seconds(self._clock()) > UNANSWERED_SECONDS

    # Private.

    def _may_come(self, drafted: DraftedSequence, now: float, wait_seconds: float) -> bool:
        """Returns whether a draft may arrive in time, judging by the usual duration of the node's answers.

        Steps wait neither for a sequence that had no draft last time nor for a late node.
        """
        served = drafted.assignment
        if served is None or served.had_no_draft or not (drafted.is_dirty or served.pending):
            return False
        usual = served.node.answer_seconds
        age = 0.0 if served.pending is None else now - served.pending.at
        return usual - wait_seconds <= age <= usual + wait_seconds and not self.nodes.is_late(served.node, now)

    def _mark_dirty(self, drafted: DraftedSequence) -> None:
        """Marks a sequence that may have something to send. Behind an unanswered update, the answer marks it."""
        served = drafted.assignment
        if drafted.is_dirty and served is not None and served.pending is None:
            served.node.dirty[served.stream_id] = None

    def _count_stale(self, node: DraftNodeState) -> None:
        node.num_unsolicited += 1
        self.counters.num_stale_answers += 1

    def _quarantine(self, served: Assignment, now: float) -> None:
        """Drops the sequence's drafts after an invalid answer of its node, and assigns it to another node."""
        served.sequence.refused.add(served.node.node_id)
        served.sequence.trees.clear()
        self.counters.num_quarantined += 1
        self._move(served, now)

    def _assign(self, drafted: DraftedSequence, now: float) -> None:
        length = len(drafted.committed)
        node = self.nodes.choose(now, length, refused=drafted.refused)
        if node is None:
            self._unserved[drafted] = None
            return
        self._unserved.pop(drafted, None)
        stream_id = next(self._stream_ids)
        source = self._features if node.needs_features else None
        drafted.assignment = self._served[stream_id] = Assignment(drafted, stream_id, node, source)
        drafted.is_dirty = True
        node.num_sequences += 1
        if node.seems_full(length):
            node.trial = stream_id
        self._mark_dirty(drafted)

    def _assign_unserved(self, now: float) -> None:
        # The least often refused come first, so that a sequence that is too long for every node does not delay others.
        for drafted in sorted(self._unserved, key=lambda each: each.num_refusals):
            self._assign(drafted, now)

    def _unassign(self, served: Assignment) -> None:
        node, stream_id = served.node, served.stream_id
        served.withdraw()
        served.sequence.assignment = None
        del self._served[stream_id]
        node.num_sequences -= 1
        node.dirty.pop(stream_id, None)
        node.notices.pop(stream_id, None)
        node.unanswered.pop(stream_id, None)
        if node.trial == stream_id:
            node.trial = None
        if node.is_connected and served.sent_length > 0:
            node.closed.append(stream_id)

    def _move(self, served: Assignment, now: float) -> None:
        """Assigns the sequence to the node that is most suitable now."""
        self._unassign(served)
        self._assign(served.sequence, now)

    def _move_away(self, node: DraftNodeState, *, keep: int) -> None:
        """Moves all but `keep` of a node's sequences to other nodes."""
        now = self._clock()
        moving = [served for served in self._served.values() if served.node is node]
        for served in moving[keep:]:
            self._move(served, now)
