"""When is a process that still holds its connection dead? When its progress stops.

SIGSTOP looks alive to TCP. Every report carries the step counter and the expected time
of the step at hand; a process is lost when no report came for the grace, or when one
step has gone on for far longer than it was expected to.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.node import NodeReport

DEFAULT_GRACE_SECONDS = 2.0
LEAST_GRACE_SECONDS = 1.0
STEP_TOLERANCE = 10.0
"""A step may take this many times what was expected: other programs share the cores."""


class ProgressDeadline:
    """Tracks one peer's progress. Not thread-safe: one owner.

    The deadline after a report is `grace_seconds`, plus what remains of the step at hand
    times `STEP_TOLERANCE`: the engine's thread may hold the interpreter while it computes,
    so a long chunk on a busy machine is not a death. Reports that keep coming while one
    step stands still past the same deadline are a death as well: the engine hangs.
    """

    def __init__(
        self, *, grace_seconds: float = DEFAULT_GRACE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._grace_seconds = max(grace_seconds, LEAST_GRACE_SECONDS)
        self._clock = clock
        now = clock()
        self._report_deadline = now + self._grace_seconds
        self._step_deadline = now + self._grace_seconds
        self._step: int | None = None  # None: idle at the last report

    def feed(self, report: NodeReport) -> None:
        """Takes a report that has just arrived."""
        now = self._clock()
        allowance = self._grace_seconds + report.expected_step_seconds * STEP_TOLERANCE
        self._report_deadline = now + allowance
        is_idle = report.expected_step_seconds == 0 and report.step_age_seconds == 0
        if is_idle or report.step != self._step:
            self._step = None if is_idle else report.step
            self._step_deadline = now + max(allowance - report.step_age_seconds, 0.0)

    @property
    def deadline(self) -> float:
        """When the peer is lost unless it moves, on the clock's scale (seconds)."""
        return min(self._report_deadline, self._step_deadline)

    def is_lost(self, now: float | None = None) -> bool:
        return (self._clock() if now is None else now) >= self.deadline

    def remaining_seconds(self) -> float:
        """At least 0."""
        return max(self.deadline - self._clock(), 0.0)
