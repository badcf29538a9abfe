"""The state of a decode node's draft nodes: whether they are connected, how late their answers are, and their room."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from outrider.speculation.draft_stream import StepNotice

LATE_STEPS = 4.0
"""Maximum duration of a node's answers, in steps. A node whose answers take longer is late."""

MIN_STEP_SECONDS = 0.0125
"""Seconds that a shorter step counts as, so that a pause of some milliseconds on either machine makes no node late."""

SMOOTHING = 0.2

LOST_SECONDS = 1.0
"""Seconds that a slower answer counts as. The end of a stream counts as such an answer, so that the node is late until
about fourteen answers in a row have been in time.
"""

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
"""Seconds until a node without room is tried again. They are doubled after each refused trial, up to the maximum."""

MAX_UNSOLICITED_IN_A_ROW = 4096
"""Number of consecutive unsolicited answers after which a stream is closed. A few are normal when sequences end."""


@dataclass(slots=True, eq=False)
class DraftNodeState:
    """The state of one draft node. Guarded by the book's lock."""

    node_id: int  # never used twice
    rank: int  # breaks ties between nodes with equally many sequences, lowest first
    is_connected: bool = False
    needs_features: bool = False  # False while the node is not connected
    num_sequences: int = 0
    closed: list[int] = field(default_factory=list)  # ended stream ids that are not announced to the node yet
    dirty: dict[int, None] = field(default_factory=dict)  # stream ids of sequences that may have something to send
    notices: dict[int, StepNotice] = field(default_factory=dict)  # the newest ones, by stream id
    has_due_notices: bool = False  # whether some of them need not wait for an update
    unanswered: dict[int, float] = field(default_factory=dict)  # by stream id: when its update was sent, oldest first
    answer_seconds: float = 0.0  # running mean
    was_relieved: bool = False  # whether all its sequences but one were moved because it is late
    num_unsolicited: int = 0  # in a row
    retry_seconds: float = 0.0  # 0: the node is not known to be full
    retry_at: float = 0.0
    trial: int | None = None  # stream id of the sequence that tests whether there is room again
    refused_length: int = 0  # length of the shortest sequence refused since the node last had room for all

    def unanswered_seconds(self, now: float) -> float:
        """Returns the age of the oldest unanswered update."""
        return now - next(iter(self.unanswered.values()), now)

    def observe_answer(self, seconds: float) -> None:
        """Records the delay of an answer to an update that asked for drafts."""
        self.answer_seconds += SMOOTHING * (min(seconds, LOST_SECONDS) - self.answer_seconds)

    def disconnected(self) -> None:
        """Records that the stream has ended, which counts as a late answer."""
        if self.is_connected:
            self.answer_seconds = LOST_SECONDS
        self.is_connected = self.needs_features = self.has_due_notices = False
        self.num_unsolicited = 0
        self.closed.clear()
        self.notices.clear()
        self.unanswered.clear()

    # A node that has refused a sequence gets one trial sequence at a time until no sequence waits any more. It may
    # refuse a long sequence at any time, so sequences of less than half the refused length are not held back.

    def seems_full(self, length: int) -> bool:
        """Returns whether the node has no room for `length` tokens, judging by its refusals."""
        return self.retry_seconds > 0.0 and 2 * length >= self.refused_length

    def has_room(self, now: float, length: int) -> bool:
        """Returns whether the node may be given one more sequence of `length` tokens."""
        return not self.seems_full(length) or (self.trial is None and now >= self.retry_at)

    def observe_refusal(self, stream_id: int, now: float, length: int) -> None:
        """Records that the node had no room for a sequence of `length` tokens."""
        is_first = self.retry_seconds == 0.0
        self.refused_length = length if is_first else min(self.refused_length, length)
        if is_first or stream_id == self.trial:
            self.retry_seconds = min(2.0 * self.retry_seconds or MIN_RETRY_SECONDS, MAX_RETRY_SECONDS)
            self.retry_at = now + self.retry_seconds

    def observe_acceptance(self, stream_id: int, now: float, *, others_wait: bool) -> bool:
        """Records that the node had room for a sequence. Returns True if it was the trial, so the next may follow."""
        if stream_id != self.trial:
            return False
        self.trial = None
        self.retry_seconds = MIN_RETRY_SECONDS if others_wait else 0.0
        self.retry_at = now
        return True

    @property
    def is_flooding(self) -> bool:
        """Whether the node keeps sending unsolicited answers."""
        return self.num_unsolicited > MAX_UNSOLICITED_IN_A_ROW


class DraftNodes:
    """All present draft nodes. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self._nodes: list[DraftNodeState] = []
        self._num_ever = 0
        self._long_step_seconds = MIN_STEP_SECONDS  # running mean; a shorter step counts as MIN_STEP_SECONDS
        self.step_seconds = 0.0  # running mean of the durations of steps; 0: no step has run

    def __iter__(self) -> Iterator[DraftNodeState]:
        return iter(self._nodes)

    def observe_step(self, seconds: float) -> None:
        """Records the duration of a step."""
        weight = SMOOTHING if self.step_seconds > 0.0 else 1.0
        self.step_seconds += weight * (seconds - self.step_seconds)
        self._long_step_seconds += SMOOTHING * (max(seconds, MIN_STEP_SECONDS) - self._long_step_seconds)

    def add(self, *, rank: int = 0) -> DraftNodeState:
        """Adds a node. `rank` decides between nodes with equally many sequences.

        Since decode nodes rank draft nodes differently, they do not all begin with the same draft node.
        """
        self._num_ever += 1
        node = DraftNodeState(self._num_ever, rank)
        self._nodes.append(node)
        return node

    def remove(self, node: DraftNodeState) -> None:
        self._nodes.remove(node)

    def is_late(self, node: DraftNodeState, now: float) -> bool:
        """Returns whether the node's answers take too long for steps to wait for them."""
        delay = max(node.answer_seconds, node.unanswered_seconds(now))
        return delay > LATE_STEPS * self._long_step_seconds

    def is_usable(self, node: DraftNodeState, now: float) -> bool:
        return node.is_connected and not self.is_late(node, now)

    def choose(self, now: float, length: int, *, refused: AbstractSet[int]) -> DraftNodeState | None:
        """Chooses the connected node with the fewest sequences that has room for a sequence of `length` tokens.

        A late node gets at most one sequence while others are in time.
        """
        able = [each for each in self if each.is_connected and each.node_id not in refused]
        able = [each for each in able if each.has_room(now, length)]
        preferred = [node for node in able if node.num_sequences == 0 or not self.is_late(node, now)]
        return min(preferred or able, key=lambda node: (node.num_sequences, node.rank, node.node_id), default=None)
