"""The draft nodes of a decode node: which is connected, how late its answers are, and whether it has room."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

LATE_STEPS = 4.0
"""A node is late while its answers take longer than so many steps."""

MIN_STEP_SECONDS = 0.0125
"""Shorter steps count as this long: a pause of some milliseconds on either machine says nothing about a node."""

SMOOTHING = 0.2

LOST_SECONDS = 1.0
"""A stream that ends counts as an answer that took so long, and so does any slower answer. After that a node is late
until some fourteen answers in a row were in time."""

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
"""How long a node that has no room is left alone, doubled each time that it has none again."""

MAX_UNSOLICITED_IN_A_ROW = 4096
"""Answers to nothing, before a stream is ended. Some are normal: they were under way when their sequence ended."""


@dataclass(slots=True, eq=False)
class DraftNodeState:
    """One draft node, as the book sees it. Guarded by the book's lock."""

    node_id: int  # never used twice
    rank: int  # among nodes with equally many sequences, the lowest comes first
    is_connected: bool = False
    needs_features: bool = False  # while it is connected
    num_sequences: int = 0
    closed: list[int] = field(default_factory=list)  # stream ids that it has still to forget
    news: dict[int, None] = field(default_factory=dict)  # stream ids of sequences that may have something to tell
    asked: dict[int, float] = field(default_factory=dict)  # stream id → when its unanswered update went; oldest first
    answer_seconds: float = 0.0  # running mean
    gave_away: bool = False  # its sequences but one, since it is late
    num_unsolicited: int = 0  # in a row
    retry_seconds: float = 0.0  # 0: as far as is known it has room
    retry_at: float = 0.0
    trial: int | None = None  # stream id of the one sequence that tries whether there is room again
    refused_length: int = 0  # tokens of the shortest sequence that was refused since all had room

    def unanswered_seconds(self, now: float) -> float:
        """The age of the oldest unanswered update."""
        return now - next(iter(self.asked.values()), now)

    def observe_answer(self, seconds: float) -> None:
        """One answer to an update that wanted drafts."""
        self.answer_seconds += SMOOTHING * (min(seconds, LOST_SECONDS) - self.answer_seconds)

    def disconnected(self) -> None:
        """A node whose streams end is as good as one that answers late."""
        if self.is_connected:
            self.answer_seconds = LOST_SECONDS
        self.is_connected = self.needs_features = False
        self.num_unsolicited = 0
        self.closed.clear()
        self.asked.clear()

    # Room. A node that has refused a sequence is given one at a time until it takes all that wait. What it has refused
    # may have been too long for it at any time: that says nothing of a sequence of less than half the length.

    def is_taken_for_full(self, length: int) -> bool:
        """Whether it has no room for so many tokens, by what it has refused."""
        return self.retry_seconds > 0.0 and 2 * length >= self.refused_length

    def has_room(self, now: float, length: int) -> bool:
        """Whether one more sequence of so many tokens may be given to it, by what it has said."""
        return not self.is_taken_for_full(length) or (self.trial is None and now >= self.retry_at)

    def has_refused(self, stream_id: int, now: float, length: int) -> None:
        is_first = self.retry_seconds == 0.0
        self.refused_length = length if is_first else min(self.refused_length, length)
        if is_first or stream_id == self.trial:
            self.retry_seconds = min(2.0 * self.retry_seconds or MIN_RETRY_SECONDS, MAX_RETRY_SECONDS)
            self.retry_at = now + self.retry_seconds

    def has_accepted(self, stream_id: int, now: float, *, others_wait: bool) -> bool:
        """Whether this was the sequence that tried: the next one may."""
        if stream_id != self.trial:
            return False
        self.trial = None
        self.retry_seconds = MIN_RETRY_SECONDS if others_wait else 0.0
        self.retry_at = now
        return True

    @property
    def is_flooding(self) -> bool:
        """Whether it sends answer after answer to nothing."""
        return self.num_unsolicited > MAX_UNSOLICITED_IN_A_ROW


class DraftNodes:
    """Every draft node at present. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self._nodes: list[DraftNodeState] = []
        self._num_ever = 0
        self._long_step_seconds = MIN_STEP_SECONDS  # running mean of a step's time, at least that
        self.step_seconds = 0.0  # the same, as it is at present; 0: no step was done

    def __iter__(self) -> Iterator[DraftNodeState]:
        return iter(self._nodes)

    def observe_step(self, seconds: float) -> None:
        weight = SMOOTHING if self.step_seconds > 0.0 else 1.0
        self.step_seconds += weight * (seconds - self.step_seconds)
        self._long_step_seconds += SMOOTHING * (max(seconds, MIN_STEP_SECONDS) - self._long_step_seconds)

    def add(self, *, rank: int = 0) -> DraftNodeState:
        """`rank` decides between nodes that serve equally many sequences: decode nodes that rank the same nodes
        differently do not all begin with the same one.
        """
        self._num_ever += 1
        node = DraftNodeState(self._num_ever, rank)
        self._nodes.append(node)
        return node

    def remove(self, node: DraftNodeState) -> None:
        self._nodes.remove(node)

    def is_late(self, node: DraftNodeState, now: float) -> bool:
        """Whether steps should not wait for it, and its sequences are better served by another."""
        delay = max(node.answer_seconds, node.unanswered_seconds(now))
        return delay > LATE_STEPS * self._long_step_seconds

    def is_usable(self, node: DraftNodeState, now: float) -> bool:
        return node.is_connected and not self.is_late(node, now)

    def choose(self, now: float, length: int, *, refused: AbstractSet[int]) -> DraftNodeState | None:
        """For a sequence of so many tokens the connected node with the fewest sequences that has room.

        A late one gets one at most while others work.
        """
        able = [each for each in self if each.is_connected and each.node_id not in refused]
        able = [each for each in able if each.has_room(now, length)]
        preferred = [node for node in able if node.num_sequences == 0 or not self.is_late(node, now)]
        return min(preferred or able, key=lambda node: (node.num_sequences, node.rank, node.node_id), default=None)
