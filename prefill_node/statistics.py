"""What a prefill node reports of itself: the step at hand, its load. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

RATE_SECONDS = 10.0
FIRST_STEP_SECONDS = 1.0
"""Expected of a step before any was measured: a long first chunk on a busy machine is not a death."""
OUTLIER_FACTOR = 3.0
"""A step of more than so many times the expected counts as that: this process may have been frozen."""
SMOOTHING = 0.3
"""Weight of the newest step in the expected time of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One finished step."""

    num_rows: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAtHand:
    """Both durations are 0 when idle."""

    step: int  # steps begun since the start
    expected_seconds: float
    age_seconds: float


class Progress:
    """Written by the engine thread, read by the event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._step = 0
        self._started_at: float | None = None
        self._expected_seconds = 0.0
        self._seconds_per_row = 0.0
        self._outstanding: dict[int, int] = {}  # job -> prompt tokens not computed
        self._computed: deque[tuple[float, int]] = deque()  # (when, rows) of the last ten seconds

    def begin_step(self, num_rows: int) -> None:
        with self._lock:
            self._step += 1
            self._started_at = self._clock()
            self._expected_seconds = self._seconds_per_row * num_rows or FIRST_STEP_SECONDS

    def end_step(self, num_rows: int) -> float:
        """The step's seconds."""
        with self._lock:
            now = self._clock()
            assert self._started_at is not None, "begin_step comes first"
            seconds = now - self._started_at
            self._started_at, self._expected_seconds = None, 0.0
            if num_rows:
                per_row, weight = seconds / num_rows, 1.0
                if self._seconds_per_row:
                    per_row, weight = min(per_row, OUTLIER_FACTOR * self._seconds_per_row), SMOOTHING
                self._seconds_per_row += weight * (per_row - self._seconds_per_row)
                self._computed.append((now, num_rows))
            return seconds

    def step_at_hand(self) -> StepAtHand:
        with self._lock:
            age = 0.0 if self._started_at is None else self._clock() - self._started_at
            return StepAtHand(step=self._step, expected_seconds=self._expected_seconds, age_seconds=age)

    def set_outstanding(self, job_id: int, num_tokens: int) -> None:
        """Prompt tokens of a job that wait for or are in computation; 0 forgets the job."""
        with self._lock:
            if num_tokens:
                self._outstanding[job_id] = num_tokens
            else:
                self._outstanding.pop(job_id, None)

    @property
    def num_outstanding_tokens(self) -> int:
        with self._lock:
            return sum(self._outstanding.values())

    def tokens_per_second(self) -> float:
        """Prompt tokens computed, over the last ten seconds."""
        with self._lock:
            horizon = self._clock() - RATE_SECONDS
            while self._computed and self._computed[0][0] < horizon:
                self._computed.popleft()
            return sum(num_rows for _, num_rows in self._computed) / RATE_SECONDS
