"""Progress deadlines: when a process that still holds its connection is late, and when it is lost.

SIGSTOP looks alive to TCP. Every report carries a mark of progress and the expected time
of the step at hand. A process is late when its next report or the end of its step is
overdue by `LATE_SECONDS`: a suspicion, taken back when it moves. It is silent when its
reports are overdue by `SILENT_SECONDS`. It is lost when no report came for the grace and a
few expected steps, or when reports come and one step has gone on for far longer than it was
expected to.
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
MAX_STALLS = 5
"""After so many stalls in a row the loop is overloaded, and has had time to read: the deadline holds."""


class Standing(IntEnum):
    """What a peer's progress says of it."""

    TIMELY = 0
    LATE = 1
    SILENT = 2
    LOST = 3


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
        self._report_deadline = self._step_deadline = clock() + self._grace_seconds
        self._late_report_at = self._late_step_at = self._report_deadline
        self._least_silent_at = 0.0
        self._mark: int | None = None  # None: idle at the last report
        self.standing = Standing.TIMELY
        self.watched_until = math.inf  # when the watcher looks again
        self.on_earlier: Callable[[], None] = lambda: None  # it must look sooner

    def feed(self, report: NodeReport) -> None:
        """Takes a report that has just arrived."""
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
            self._late_step_at = self._late_report_at  # an idle process owes reports only
        self.standing = Standing.LATE if self.is_late() else Standing.TIMELY
        self._least_silent_at = 0.0
        if self.standing is Standing.LATE or min(self._late_at, self._lost_at) < self.watched_until:
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

    def next_change(self) -> tuple[Standing, float]:
        """(what it becomes next, in so many seconds, at least 0) unless it moves."""
        lost_at = self._lost_at
        silent_at = max(self._late_report_at + SILENT_SECONDS - LATE_SECONDS, self._least_silent_at)
        if self.standing is Standing.TIMELY and self._late_at < lost_at:
            standing, at = Standing.LATE, self._late_at
        elif self.standing is Standing.LATE and silent_at < lost_at:
            standing, at = Standing.SILENT, silent_at
        else:
            standing, at = Standing.LOST, lost_at
        return standing, max(at - self._clock(), 0.0)

    def watch(self) -> float:
        """Seconds until the next change. Reports that bring it nearer call `on_earlier`."""
        seconds = self.next_change()[1]
        self.watched_until = self._clock() + seconds
        return seconds

    def advance(self) -> bool:
        """Takes a change that is due; False: none is."""
        standing, seconds = self.next_change()
        if seconds > 0.0:
            return False
        self.standing = standing
        # After our own stall, restart the silence timer.
        self._least_silent_at = self._clock() + SILENT_SECONDS - LATE_SECONDS
        return True


async def watch_progress(progress: ProgressDeadline, on_change: Callable[[], None]) -> None:
    """Calls `on_change` when the peer becomes late or silent; returns once it is lost. Others feed `progress`.

    After a stall of this process the reports that came during it are still unread, so the
    deadline is looked at again when they have had time to be read, at most `MAX_STALLS` times.
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
            if progress.standing is Standing.LOST:
                return
            on_change()
