"""How far an engine is: what a node tells of the step at hand. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FIRST_STEP_SECONDS = 1.0  # the least expected of a number of rows that was never run: a busy machine is not a death
NEWEST_WEIGHT = 0.2
OUTLIER_FACTOR = 3.0  # a step of more than so many times the expected counts as that: this process may have been frozen


@dataclass(frozen=True, slots=True)
class StepAtHand:
    """A snapshot that any thread may read."""

    step: int = 0  # begun, or gone on with, since the start
    expected_seconds: float = 0.0  # 0: idle
    started: float | None = None  # monotonic; None: idle


class StepProgress:
    """How far the engine is, for whoever must tell a long step from a dead process.

    A step is everything that an engine thread does between two waits: commands, drafts,
    planning, the forward pass, events. So a thread that hangs anywhere in it shows as a step
    that grows old, and one that waits for a command or for its turn shows as idle.

    The engine thread swaps in a new frozen snapshot; readers never see half of one. Steps
    are expected to take as long as those of about as many rows, in buckets of powers of
    two; a bucket that was never run, as long for each row as the nearest that was.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds_by_bucket: dict[int, float] = {}
        self._bucket = 0
        self._has_rows = False
        self._age_at_pause = 0.0
        self.at_hand = StepAtHand()

    def begin(self) -> None:
        """A step of which nothing is known yet: it is expected to be like the last one."""
        self._has_rows = False
        self.at_hand = StepAtHand(self.at_hand.step + 1, self._expected_seconds(), self._clock())

    def expect(self, num_rows: int) -> None:
        """The step at hand has a forward pass of so many rows. A new number: the expectation is a new one."""
        self._has_rows = True
        self._bucket = num_rows.bit_length()
        self.at_hand = StepAtHand(self.at_hand.step + 1, self._expected_seconds(), self.at_hand.started)

    def pause(self) -> None:
        """The step at hand waits for others: nothing is expected of this node until `resume`."""
        self._age_at_pause = self.age_seconds()
        self.at_hand = StepAtHand(self.at_hand.step)

    def resume(self) -> None:
        """It goes on. The pause is no part of it; a new number tells that it is not one long step."""
        started = self._clock() - self._age_at_pause
        self.at_hand = StepAtHand(self.at_hand.step + 1, self._expected_seconds(), started)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no part of the step."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def end(self) -> None:
        """Idle until the next one begins. A step with rows says what others of its kind will take."""
        at_hand = self.at_hand
        assert at_hand.started is not None, "begin comes first"
        if self._has_rows:
            seconds = self._clock() - at_hand.started
            known = self._seconds_by_bucket.get(self._bucket, seconds)
            newest = min(seconds, OUTLIER_FACTOR * known)
            self._seconds_by_bucket[self._bucket] = known + NEWEST_WEIGHT * (newest - known)
        self.at_hand = StepAtHand(at_hand.step)

    def age_seconds(self, at_hand: StepAtHand | None = None) -> float:
        """Of a snapshot, without pauses; by default of the present one. Report a snapshot and its own age."""
        started = (at_hand or self.at_hand).started
        return 0.0 if started is None else max(0.0, self._clock() - started)

    def _expected_seconds(self) -> float:
        known = self._seconds_by_bucket
        if self._bucket in known:
            return known[self._bucket]
        if not known:
            return FIRST_STEP_SECONDS
        nearest = min(known, key=lambda bucket: abs(bucket - self._bucket))
        return max(FIRST_STEP_SECONDS, known[nearest] * 2.0 ** (self._bucket - nearest))
