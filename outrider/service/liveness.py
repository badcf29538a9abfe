"""Progress deadlines: when a process that still holds its connection is late, and when it is lost.

SIGSTOP looks alive to TCP. Every report carries the step counter and the expected time
of the step at hand. A process is late when its next report or the end of its step is
overdue by `LATE_SECONDS`: a suspicion, taken back when it moves. It is silent when its
reports are overdue by `SILENT_SECONDS`. It is lost when no report came for the grace and a
few expected steps, or when reports come and one step has gone on for far longer than it was
expected to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outrider.node import NodeReport

DEFAULT_GRACE_SECONDS = 2.0
LEAST_GRACE_SECONDS = 1.0
STEP_TOLERANCE = 10.0
"""A step may take this many times what was expected: other programs share the cores."""
REPORT_TOLERANCE = 2.0
"""Reports may be missing for the grace and this many expected steps: native kernels release the interpreter."""
LATE_SECONDS = 0.5
"""How far a report or a step may be overdue before the process is suspected."""
SILENT_SECONDS = 1.0
"""How far reports may be overdue before the process is silent: a long step delays none of them for so long."""
REPORT_SECONDS = 0.2
"""Reports come at least this often."""
LATE_STEP_TOLERANCE = 2.0
"""A step of twice the expected time is not late yet."""

STALL_SECONDS = 0.1
"""An event loop that wakes this much too late was stalled itself: it reads what has arrived before it judges."""


class ProgressDeadline:
    """Tracks one peer's progress. Not thread-safe: one owner.

    Reports come from the event loop's thread, so one that is missing says more than a long
    step: without any, the process is lost after `grace_seconds` plus `REPORT_TOLERANCE` times
    the expected step (the engine's thread may hold the interpreter for a while). With
    reports, a step may take `STEP_TOLERANCE` times what was expected, since a long chunk on
    a busy machine is not a death; past that the engine hangs.
    """

    def __init__(
        self, *, grace_seconds: float = DEFAULT_GRACE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._grace_seconds = max(grace_seconds, LEAST_GRACE_SECONDS)
        self._clock = clock
        now = clock()
        self._report_deadline = now + self._grace_seconds
        self._step_deadline = now + self._grace_seconds
        self._late_report_at = now + self._grace_seconds
        self._late_step_at = now + self._grace_seconds
        self._step: int | None = None  # None: idle at the last report

    def feed(self, report: NodeReport) -> None:
        """Takes a report that has just arrived."""
        now = self._clock()
        allowance = self._grace_seconds + report.expected_step_seconds * STEP_TOLERANCE
        self._report_deadline = now + self._grace_seconds + report.expected_step_seconds * REPORT_TOLERANCE
        patience = LATE_SECONDS + report.expected_step_seconds * LATE_STEP_TOLERANCE
        self._late_report_at = now + REPORT_SECONDS + patience
        is_idle = report.expected_step_seconds == 0 and report.step_age_seconds == 0
        if is_idle or report.step != self._step:
            self._step = None if is_idle else report.step
            self._step_deadline = now + max(allowance - report.step_age_seconds, 0.0)
            self._late_step_at = now + max(patience - report.step_age_seconds, 0.0)
        if is_idle:
            self._late_step_at = self._late_report_at  # an idle process owes reports only

    @property
    def deadline(self) -> float:
        """When the peer is lost unless it moves, on the clock's scale (seconds)."""
        return min(self._report_deadline, self._step_deadline)

    @property
    def late_at(self) -> float:
        """When the peer is suspected unless it moves, on the clock's scale (seconds)."""
        return min(self._late_report_at, self._late_step_at)

    def seconds_until_late(self) -> float:
        """At least 0."""
        return max(self.late_at - self._clock(), 0.0)

    def seconds_until_silent(self) -> float:
        """At least 0."""
        return max(self._late_report_at + SILENT_SECONDS - LATE_SECONDS - self._clock(), 0.0)

    def is_late(self, now: float | None = None) -> bool:
        return (self._clock() if now is None else now) >= self.late_at

    def is_lost(self, now: float | None = None) -> bool:
        return (self._clock() if now is None else now) >= self.deadline

    def remaining_seconds(self) -> float:
        """At least 0."""
        return max(self.deadline - self._clock(), 0.0)


async def until_lost(deadline: ProgressDeadline) -> None:
    """Returns once the peer is lost; whoever takes its reports feeds the deadline meanwhile.

    After a stall of this process the reports that came during it are still unread, so the
    deadline is looked at again when they have had time to be read.
    """
    loop = asyncio.get_running_loop()
    while True:
        wake_at = loop.time() + deadline.remaining_seconds()
        await asyncio.sleep(wake_at - loop.time())
        if loop.time() - wake_at > STALL_SECONDS:
            await asyncio.sleep(STALL_SECONDS)
        elif deadline.is_lost():
            return
