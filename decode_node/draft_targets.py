"""Who serves whom: the draft nodes of a decode node, how well each does, and which one a sequence goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from decode_node.draft_breaker import Breaker

LATE_STEPS = 4.0
"""An update that is unanswered for longer than so many steps counts as a miss even if no step waited for it."""

LATENCY_SMOOTHING = 0.2

MAX_UNASKED_IN_A_ROW = 1024
"""Answers that nobody has asked for, before the stream is given up. Those that were under way when their sequence ended
or moved to another node are not counted."""

PROBE_STEPS = 2.0
"""An answer that comes within so many steps closes an open breaker."""

LEAST_STEP_SECONDS = 0.0125
"""What a step is taken to last at least: a pause of some milliseconds on either machine says nothing about a node."""


@dataclass(slots=True)
class DraftTarget:
    """One draft node: whether it is there, how quickly it answers, how much it serves."""

    index: int  # its name; never used twice
    rank: int  # among targets with equally many sequences, the lowest comes first
    breaker: Breaker
    is_connected: bool = False
    num_sequences: int = 0
    closed: set[int] = field(default_factory=set)  # sequences that have ended, of which the node has still to hear
    news: dict[int, None] = field(default_factory=dict)  # its sequences that may have something to tell, in order
    num_under_way: int = 0  # answers and branches that may still come for sequences that have left it
    _num_unasked: int = 0  # in a row
    _probe_sent_at: float | None = None
    _missed_at: float = float("-inf")
    _answer_seconds: float = 0.0  # running mean of how long an answer takes

    @property
    def is_usable(self) -> bool:
        """Whether steps may count on it."""
        return self.is_connected and not self.breaker.is_open

    def connected(self) -> None:
        self.is_connected = True
        self.was_asked()
        self.breaker.success()

    def disconnected(self) -> None:
        self.is_connected = False
        self.closed.clear()
        self._probe_sent_at = None

    def may_send(self) -> bool:
        return self.is_connected and self.breaker.may_send()

    def sent(self, now: float) -> None:
        if self.breaker.is_open:
            self._probe_sent_at = now
        self.breaker.probed()

    def answered(self, now: float, *, step_seconds: float) -> None:
        """A message has come."""
        if self._probe_sent_at is not None and now - self._probe_sent_at <= PROBE_STEPS * step_seconds:
            self.breaker.success()
        self._probe_sent_at = None

    @property
    def is_flooding(self) -> bool:
        return self._num_unasked > MAX_UNASKED_IN_A_ROW + self.num_under_way

    def was_asked(self) -> None:
        """One of its answers was due."""
        self._num_unasked = self.num_under_way = 0

    def was_unasked(self) -> None:
        self._num_unasked += 1

    def observe_answer(self, seconds: float) -> None:
        """How long the answer to one update took."""
        self._answer_seconds += LATENCY_SMOOTHING * (seconds - self._answer_seconds)

    def may_answer_within(self, seconds: float, *, asked_seconds_ago: float) -> bool:
        """Whether waiting so long is worth it, by how long its answers usually take."""
        return self.is_usable and self._answer_seconds - asked_seconds_ago <= seconds

    def is_overdue(self, asked_since: float | None, now: float, *, step_seconds: float) -> bool:
        """Whether an unanswered update is a miss by its age alone: once in each span of that length."""
        return asked_since is not None and now - max(asked_since, self._missed_at) > LATE_STEPS * step_seconds

    def missed(self, now: float) -> bool:
        """A step found nothing in time. True when this opens the breaker."""
        self._missed_at = now
        return self.breaker.miss()


class DraftTargets:
    """Every draft node at present. Guarded by its owner's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._targets: dict[int, DraftTarget] = {}
        self._num_ever = 0
        self.step_seconds = LEAST_STEP_SECONDS  # running mean of how long a step of the engine lasts, at least
        self.measured_step_seconds = 0.0  # the same, as it is
        self._num_past_openings = 0  # of the breakers of targets that are gone

    def __getitem__(self, index: int) -> DraftTarget:
        return self._targets[index]

    def __iter__(self) -> Iterator[DraftTarget]:
        return iter(self._targets.values())

    @property
    def num_breaker_openings(self) -> int:
        """Since start."""
        return self._num_past_openings + sum(target.breaker.num_openings for target in self)

    def observe_step(self, seconds: float) -> None:
        weight = LATENCY_SMOOTHING if self.measured_step_seconds > 0.0 else 1.0
        self.measured_step_seconds += weight * (seconds - self.measured_step_seconds)
        self.step_seconds += LATENCY_SMOOTHING * (max(seconds, LEAST_STEP_SECONDS) - self.step_seconds)

    def add(self, *, rank: int) -> int:
        index = self._num_ever
        self._num_ever += 1
        self._targets[index] = DraftTarget(index, rank, Breaker(self._clock))
        return index

    def remove(self, index: int) -> None:
        self._num_past_openings += self._targets.pop(index).breaker.num_openings

    def choose(self, *, refused: AbstractSet[int]) -> DraftTarget | None:
        """The connected one with the fewest sequences; one that is being probed gets one at most while others work."""
        connected = [target for target in self if target.is_connected and target.index not in refused]
        able = [target for target in connected if target.num_sequences == 0 or not target.breaker.is_open]
        return min(
            able or connected, key=lambda target: (target.num_sequences, target.rank, target.index), default=None
        )

    def has_other_than(self, target: DraftTarget) -> bool:
        """Whether another one works."""
        return any(other.is_usable for other in self if other is not target)
