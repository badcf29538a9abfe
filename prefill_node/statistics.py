"""What a prefill node reports of itself, besides the step at hand: its prompt tokens. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

RATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One finished step."""

    num_rows: int
    seconds: float
    nanoseconds: Mapping[str, int]  # by outrider.profile.Part, since the end of the step before


class PromptTokens:
    """How many are waiting, how many were computed lately. Written by the engine thread, read by the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outstanding: dict[int, int] = {}  # job -> prompt tokens not computed
        self._computed: deque[tuple[float, int]] = deque()  # (when, rows) of the last ten seconds

    def set_outstanding(self, job_id: int, num_tokens: int) -> None:
        """Prompt tokens of a job that wait for or are in computation; 0 forgets the job."""
        with self._lock:
            if num_tokens:
                self._outstanding[job_id] = num_tokens
            else:
                self._outstanding.pop(job_id, None)

    def add_computed(self, num_tokens: int) -> None:
        with self._lock:
            self._computed.append((time.monotonic(), num_tokens))

    @property
    def num_outstanding(self) -> int:
        with self._lock:
            return sum(self._outstanding.values())

    def tokens_per_second(self) -> float:
        """Prompt tokens computed, over the last ten seconds."""
        with self._lock:
            horizon = time.monotonic() - RATE_SECONDS
            while self._computed and self._computed[0][0] < horizon:
                self._computed.popleft()
            return sum(num_tokens for _, num_tokens in self._computed) / RATE_SECONDS
