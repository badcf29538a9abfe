"""Sums over the last ten seconds, from which nodes report rates."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

RATE_WINDOW_SECONDS = 10.0


class RecentSum:
    """The sum of the numbers added in the last ten seconds, updated with each addition. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._added: deque[tuple[float, int]] = deque()  # (time, number), oldest first
        self._total = 0

    def add(self, number: int) -> None:
        if number:
            with self._lock:
                self._added.append((self._clock(), number))
                self._total += number
                self._forget_old()

    def total(self) -> int:
        with self._lock:
            self._forget_old()
            return self._total

    def per_second(self) -> float:
        return self.total() / RATE_WINDOW_SECONDS

    def _forget_old(self) -> None:
        oldest = self._clock() - RATE_WINDOW_SECONDS
        while self._added and self._added[0][0] < oldest:
            self._total -= self._added.popleft()[1]
