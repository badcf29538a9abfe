"""The progress of an engine thread, from which other processes tell a long step from a dead engine. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

FIRST_STEP_SECONDS = 1.0  # minimum expected duration in a bucket without steps, since the machine may be busy
NEWEST_WEIGHT = 0.2  # weight of a new duration in the moving average
OUTLIER_FACTOR = 3.0  # a duration counts as at most this multiple of the average: the process may have been frozen


class StepSnapshot(NamedTuple):
    """A snapshot of the current step that any thread may read."""

    mark: int = 0  # changes whenever the thread begins or resumes work
    expected_seconds: float = 0.0  # 0: idle
    started: float | None = None  # monotonic clock; None: idle


class StepProgress:
    """The engine thread's current step, its age and its expected duration.

    A step is everything that the thread does between two waits: commands, drafts, planning, the forward pass, events.
    If the thread hangs, its step grows older and older; if it waits for a command or its turn, it is idle.

    The expected duration is a moving average over steps with a similar number of rows, in buckets of powers of two. A
    bucket without steps uses the time per row of the nearest bucket. Snapshots are immutable and replaced as a whole,
    so any thread may read them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._seconds_by_bucket: dict[int, float] = {}
        self._bucket = 0
        self._has_rows = False
        self.current_step = StepSnapshot()
        self.num_steps = 0  # steps with a forward pass, since the start

    def begin(self) -> None:
        """Begins a step. Until its number of rows is known, it is expected to take as long as the last one."""
        self._has_rows = False
        self.current_step = StepSnapshot(self.current_step.mark + 1, self._expected_seconds(), self.clock())

    def expect(self, num_rows: int) -> None:
        """Sets the current forward pass's number of rows, and gives the step a new mark and expected duration."""
        self.num_steps += 1
        self._has_rows = True
        self._bucket = num_rows.bit_length()
        self.current_step = StepSnapshot(
            self.current_step.mark + 1, self._expected_seconds(), self.current_step.started
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Makes the thread idle within the context. The step then resumes with a new mark and its previous age."""
        age = self.age_seconds()
        self.current_step = StepSnapshot(self.current_step.mark)
        try:
            yield
        finally:
            self.current_step = StepSnapshot(self.current_step.mark + 1, self._expected_seconds(), self.clock() - age)

    def end(self) -> None:
        """Ends the step; the thread is then idle. The duration of a step with rows updates its bucket's average."""
        current_step = self.current_step
        assert current_step.started is not None, "begin comes first"
        if self._has_rows:
            seconds = self.clock() - current_step.started
            known = self._seconds_by_bucket.get(self._bucket, seconds)
            newest = min(seconds, OUTLIER_FACTOR * known)
            self._seconds_by_bucket[self._bucket] = known + NEWEST_WEIGHT * (newest - known)
        self.current_step = StepSnapshot(current_step.mark)

    def age_seconds(self, current_step: StepSnapshot | None = None) -> float:
        """Returns the age, without pauses, of a snapshot (by default the current one). Report it with that snapshot."""
        started = (current_step or self.current_step).started
        return 0.0 if started is None else max(0.0, self.clock() - started)

    def _expected_seconds(self) -> float:
        known = self._seconds_by_bucket
        if self._bucket in known:
            return known[self._bucket]
        if not known:
            return FIRST_STEP_SECONDS
        nearest = min(known, key=lambda bucket: abs(bucket - self._bucket))
        return max(FIRST_STEP_SECONDS, known[nearest] * 2.0 ** (self._bucket - nearest))
