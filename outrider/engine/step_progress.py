"""An engine's progress, from which others tell a long step from a dead process. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FIRST_STEP_SECONDS = 1.0  # least expected duration in a bucket without steps: on a busy machine they are slow
NEWEST_WEIGHT = 0.2
OUTLIER_FACTOR = 3.0  # longer steps count as so many times the expected duration: this process may have been frozen


@dataclass(frozen=True, slots=True)
class StepAtHand:
    """A snapshot that any thread may read."""

    mark: int = 0  # another one whenever the thread begins something, or goes on with it
    expected_seconds: float = 0.0  # 0: idle
    started: float | None = None  # monotonic; None: idle


class StepProgress:
    """The engine thread's current step, its age and its expected duration.

    A step is everything that the thread does between two waits: commands, drafts, planning, the forward pass, events. A
    thread that hangs in it shows as a step that grows old; one that waits for a command or its turn shows as idle.

    The expected duration is a moving average over steps of about as many rows, in buckets of powers of two. A bucket
    without steps takes the time for each row of the nearest one. Snapshots are frozen and replaced as a whole, so any
    thread may read them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._seconds_by_bucket: dict[int, float] = {}
        self._bucket = 0
        self._has_rows = False
        self.at_hand = StepAtHand()
        self.num_steps = 0  # with a forward pass, since the start

    def begin(self) -> None:
        """A step begins. Until its rows are known it is expected to take as long as the last one."""
        self._has_rows = False
        self.at_hand = StepAtHand(self.at_hand.mark + 1, self._expected_seconds(), self.clock())

    def expect(self, num_rows: int) -> None:
        """The current step has a forward pass of so many rows. It gets a new mark, with its new expectation."""
        self.num_steps += 1
        self._has_rows = True
        self._bucket = num_rows.bit_length()
        self.at_hand = StepAtHand(self.at_hand.mark + 1, self._expected_seconds(), self.at_hand.started)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The current step waits: inside, the thread counts as idle. It goes on under a new mark, without that time."""
        age = self.age_seconds()
        self.at_hand = StepAtHand(self.at_hand.mark)
        try:
            yield
        finally:
            self.at_hand = StepAtHand(self.at_hand.mark + 1, self._expected_seconds(), self.clock() - age)

    def end(self) -> None:
        """Idle until the next step begins. The duration of a step with rows is averaged into its bucket."""
        at_hand = self.at_hand
        assert at_hand.started is not None, "begin comes first"
        if self._has_rows:
            seconds = self.clock() - at_hand.started
            known = self._seconds_by_bucket.get(self._bucket, seconds)
            newest = min(seconds, OUTLIER_FACTOR * known)
            self._seconds_by_bucket[self._bucket] = known + NEWEST_WEIGHT * (newest - known)
        self.at_hand = StepAtHand(at_hand.mark)

    def age_seconds(self, at_hand: StepAtHand | None = None) -> float:
        """Of a snapshot, by default the current one, without pauses. Report an age with its own snapshot."""
        started = (at_hand or self.at_hand).started
        return 0.0 if started is None else max(0.0, self.clock() - started)

    def _expected_seconds(self) -> float:
        known = self._seconds_by_bucket
        if self._bucket in known:
            return known[self._bucket]
        if not known:
            return FIRST_STEP_SECONDS
        nearest = min(known, key=lambda bucket: abs(bucket - self._bucket))
        return max(FIRST_STEP_SECONDS, known[nearest] * 2.0 ** (self._bucket - nearest))
