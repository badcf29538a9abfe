"""What the engine thread tells about its steps: it neither logs nor counts in metrics itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_STEP_SECONDS = 1.0  # expected of a row bucket that was never run
NEWEST_WEIGHT = 0.2
OUTLIER_FACTOR = 3.0  # a step of more than so many times the expected counts as that: this process may have been frozen
RATE_WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step, in seconds and counts."""

    seconds: float
    draft_seconds: float  # gathering drafts, the wait for them included
    forward_seconds: float
    num_rows: int
    num_sequences: int
    num_generated_tokens: int
    num_preempted: int
    num_drafts: int  # verifications with a draft
    num_draft_tokens: int
    num_accepted_draft_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLookups:
    """Totals over granted groups."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0

    def plus(self, *, num_query_tokens: int, num_hit_tokens: int) -> PrefixLookups:
        return PrefixLookups(
            num_query_tokens=self.num_query_tokens + num_query_tokens,
            num_hit_tokens=self.num_hit_tokens + num_hit_tokens,
        )


@dataclass(frozen=True, slots=True)
class StepAtHand:
    """A snapshot that any thread may read."""

    step: int = 0
    expected_seconds: float = 0.0
    started: float | None = None  # monotonic; None: idle


class StepProgress:
    """How far the engine is, for whoever must tell a long step from a dead process.

    The engine thread swaps in a new frozen snapshot; readers never see half of one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds_by_bucket: dict[int, float] = {}
        self._bucket = 0
        self.at_hand = StepAtHand()

    def begin(self, num_rows: int) -> None:
        self._bucket = num_rows.bit_length()
        expected = self._seconds_by_bucket.get(self._bucket, FIRST_STEP_SECONDS)
        self.at_hand = StepAtHand(self.at_hand.step + 1, expected, self._clock())

    def end(self) -> None:
        at_hand = self.at_hand
        if at_hand.started is not None:
            seconds = self._clock() - at_hand.started
            known = self._seconds_by_bucket.get(self._bucket, seconds)
            seconds = min(seconds, OUTLIER_FACTOR * known)
            self._seconds_by_bucket[self._bucket] = known + NEWEST_WEIGHT * (seconds - known)
        self.at_hand = StepAtHand(at_hand.step)

    def age_seconds(self) -> float:
        started = self.at_hand.started
        return 0.0 if started is None else max(0.0, self._clock() - started)


@dataclass(slots=True)
class RecentRates:
    """Tokens a second and acceptance over the last ten seconds. One owner: the event loop."""

    clock: Callable[[], float] = time.monotonic
    _steps: deque[tuple[float, StepStats]] = field(default_factory=deque)

    def add(self, stats: StepStats) -> None:
        self._steps.append((self.clock(), stats))
        self._forget_old()

    def tokens_per_second(self) -> float:
        self._forget_old()
        return sum(stats.num_generated_tokens for _, stats in self._steps) / RATE_WINDOW_SECONDS

    def mean_acceptance_length(self) -> float:
        """1 + accepted draft tokens for each draft; 0 where nothing was drafted."""
        self._forget_old()
        num_drafts = sum(stats.num_drafts for _, stats in self._steps)
        accepted = sum(stats.num_accepted_draft_tokens for _, stats in self._steps)
        return 1.0 + accepted / num_drafts if num_drafts else 0.0

    def _forget_old(self) -> None:
        oldest = self.clock() - RATE_WINDOW_SECONDS
        while self._steps and self._steps[0][0] < oldest:
            self._steps.popleft()
