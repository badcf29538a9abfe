"""Statistics of a prefill node: steps and prompt tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.service.telemetry.recent_sum import RATE_WINDOW_SECONDS, RecentSum


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One finished step."""

    num_rows: int
    seconds: float
    nanoseconds: Mapping[str, int]  # by outrider.profile.Part, since the end of the step before


class PromptTokens:
    """The numbers of outstanding and recently computed tokens. The engine thread writes them; any thread reads them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._outstanding: dict[int, int] = {}  # prompt tokens that are not computed yet, by job id
        self._clock = clock
        self._busy: deque[tuple[float, float]] = deque()  # (start, end) of each past period with outstanding tokens
        self._busy_since: float | None = None  # start of the current period
        self._computed = RecentSum(clock)
        self.add_computed = self._computed.add
        self.tokens_per_second = self._computed.per_second

    def set_outstanding(self, job_id: int, num_tokens: int) -> None:
        """Sets the number of a job's prompt tokens that are waiting or in computation. 0 removes the job."""
        with self._lock:
            if num_tokens:
                self._outstanding[job_id] = num_tokens
            else:
                self._outstanding.pop(job_id, None)
            now = self._clock()
            if self._outstanding and self._busy_since is None:
                self._busy_since = now
            elif not self._outstanding and self._busy_since is not None:
                self._busy.append((self._busy_since, now))
                self._busy_since = None
                self._forget_old(now)

    @property
    def num_outstanding(self) -> int:
        with self._lock:
            return sum(self._outstanding.values())

    def saturation(self) -> float:
        """Returns the fraction (0 to 1) of the last ten seconds in which tokens were outstanding.

        If the process is younger, the time before its start counts as idle.
        """
        with self._lock:
            now = self._clock()
            self._forget_old(now)
            times = [*self._busy] if self._busy_since is None else [*self._busy, (self._busy_since, now)]
            oldest = now - RATE_WINDOW_SECONDS
            return min(sum(end - max(start, oldest) for start, end in times) / RATE_WINDOW_SECONDS, 1.0)

    def _forget_old(self, now: float) -> None:
        """Drops old periods. The lock must be held."""
        while self._busy and self._busy[0][1] <= now - RATE_WINDOW_SECONDS:
            self._busy.popleft()
