"""Progress deadlines, which decide when a process with an open connection is late, silent or lost.

A process stopped by SIGSTOP looks alive to TCP. Every report therefore carries a progress mark
and the expected time of the current step. A process is late if its next report or the end of
its step is overdue by `LATE_SECONDS`; this is a suspicion that is withdrawn when the process makes progress. It is
silent if its reports are overdue by `SILENT_SECONDS`. It is lost if no report arrived for the grace period plus a few
times the expected duration of a step, or if reports arrive but one step takes far longer than expected.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

from outrider.node import NodeReport

DEFAULT_GRACE_SECONDS = 2.0
MIN_GRACE_SECONDS = 1.0
STEP_TOLERANCE = 10.0
"""A step may take this many times its expected duration, since other programs share the cores."""
REPORT_TOLERANCE = 2.0
"""Reports may be missing for the grace period plus this many times the expected duration of a step. The number is
small, because native kernels release the GIL.
"""
LATE_SECONDS = 0.5
"""Seconds that a report or a step may be overdue before the process is suspected."""
SILENT_SECONDS = 1.0
"""Seconds that reports may be overdue before the process is silent. Even a long step does not delay them that much."""
REPORT_SECONDS = 0.2
"""Maximum seconds between two reports."""
LATE_STEP_TOLERANCE = 2.0
"""A step is late `LATE_SECONDS` after its expected time multiplied by this number."""

STALL_SECONDS = 0.1
"""Seconds of delay after which an event loop counts as stalled. It then reads what has arrived before it judges a peer.
"""
MAX_STALLS = 5
"""Number of consecutive stalls after which deadlines are enforced; by then, an overloaded loop has had time to read."""


class Liveness(IntEnum):
    """A peer's liveness, as its progress reports show it."""

    TIMELY = 0
    LATE = 1
    SILENT = 2
    LOST = 3


class ProgressDeadline:
    """Tracks one peer's progress. Not thread-safe; it has one owner.

    The peer's event loop sends the reports, so a missing report says more than a long step.
    Without reports, the process is lost after `grace_seconds` plus `REPORT_TOLERANCE` times the
    expected step (the engine's thread may hold the interpreter for a while). With reports, a step
    may take `STEP_TOLERANCE` times the expected time, since a long chunk on a busy machine is not
    a failure; if it takes longer, the engine counts as hanging.
    """

    def __init__(
        self, *, grace_seconds: float = DEFAULT_GRACE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._grace_seconds = max(grace_seconds, MIN_GRACE_SECONDS)
        self._clock = clock
        self._report_deadline = self._step_deadline = clock() + self._grace_seconds
        self._late_report_at = self._late_step_at = self._report_deadline
        self._least_silent_at = 0.0
        self._mark: int | None = None  # the last report's progress mark; None: the peer was idle
        self.standing = Liveness.TIMELY
        self.watched_until = math.inf  # time of the watcher's next check
        self.on_earlier: Callable[[], None] = lambda: None  # called if the watcher must check sooner

    def feed(self, report: NodeReport) -> None:
        """Processes a report that has just arrived."""
        now = self._clock()
        allowance = self._grace_seconds + report.expected_step_seconds * STEP_TOLERANCE
        self._report_deadline = now + self._grace_seconds + report.expected_step_seconds * REPORT_TOLERANCE
        patience = LATE_SECONDS + report.expected_step_seconds * LATE_STEP_TOLERANCE
        self._late_report_at = now + REPORT_SECONDS + patience
        is_idle = report.expected_step_seconds == 0 and report.step_age_seconds == 0
        if is_idle or report.mark != self._mark:
            self._mark = None if is_idle else report.mark
            self._step_deadline = now + max(allowance - report.step_age_seconds, 0.0)
            self._late_step_at = now + max(patience - report.step_age_seconds, 0.0)
        if is_idle:
            self._late_step_at = self._late_report_at  # an idle process has no step, only reports
        self.standing = Liveness.LATE if self.is_late() else Liveness.TIMELY
        self._least_silent_at = 0.0
        if self.standing is Liveness.LATE or min(self._late_at, self._lost_at) < self.watched_until:
            self.on_earlier()

    def is_late(self) -> bool:
        return self._clock() >= self._late_at

    def is_lost(self) -> bool:
        return self._clock() >= self._lost_at

    @property
    def _late_at(self) -> float:
        return min(self._late_report_at, self._late_step_at)

    @property
    def _lost_at(self) -> float:
        return min(self._report_deadline, self._step_deadline)

    def next_change(self) -> tuple[Liveness, float]:
        """Returns the liveness that follows if no progress is reported, and the seconds until then (at least 0)."""
        lost_at = self._lost_at
        silent_at = max(self._late_report_at + SILENT_SECONDS - LATE_SECONDS, self._least_silent_at)
        if self.standing is Liveness.TIMELY and self._late_at < lost_at:
            standing, at = Liveness.LATE, self._late_at
        elif self.standing is Liveness.LATE and silent_at < lost_at:
            standing, at = Liveness.SILENT, silent_at
        else:
            standing, at = Liveness.LOST, lost_at
        return standing, max(at - self._clock(), 0.0)

    def watch(self) -> float:
        """Returns the seconds until the next change. If a report makes the change earlier, `on_earlier` is called."""
        seconds = self.next_change()[1]
        self.watched_until = self._clock() + seconds
        return seconds

    def advance(self) -> bool:
        """Applies the next change if it is due; returns whether it was."""
        standing, seconds = self.next_change()
        if seconds > 0.0:
            return False
        self.standing = standing
        # The time until silence counts from now, since a stall of this process may have delayed this call.
        self._least_silent_at = self._clock() + SILENT_SECONDS - LATE_SECONDS
        return True


async def watch_progress(progress: ProgressDeadline, on_change: Callable[[], None]) -> None:
    """Calls `on_change` when the peer becomes late or silent; returns once it is lost. The caller feeds `progress`.

    After a stall of this process, the reports that arrived during it are still unread. The deadline
    is then checked again once they have had time to be read, at most `MAX_STALLS` times.
    """
    loop = asyncio.get_running_loop()
    earlier = asyncio.Event()
    progress.on_earlier = earlier.set
    num_stalls = 0
    while True:
        earlier.clear()
        wake_at = loop.time() + progress.watch()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(wake_at):
                await earlier.wait()
        if progress.next_change()[1] > 0.0:
            num_stalls = 0
        elif loop.time() - wake_at > STALL_SECONDS and num_stalls < MAX_STALLS:
            num_stalls += 1
            await asyncio.sleep(STALL_SECONDS)
        elif progress.advance():
            if progress.standing is Liveness.LOST:
                return
            on_change()
