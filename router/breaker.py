"""Keeps requests away from a node that has failed them."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_COOLDOWN_SECONDS = 1.0
MAX_COOLDOWN_SECONDS = 60.0
FORGET_SECONDS = 120.0
"""Without a failure for so long, the next cooldown is the first one again."""


class Breaker:
    """A circuit breaker for one node. Owned by the event loop.

    A failure opens it for a cooldown that doubles with each further one. Failures during a cooldown count once,
    since a broken session ends many attempts. After the cooldown one request at a time is a trial: its success
    closes the breaker, its failure opens it again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cooldown_seconds = 0.0  # 0: it has not failed lately
        self._failed_at = 0.0
        self._open_until: float | None = None  # None: closed
        self._is_on_trial = False

    @property
    def is_open(self) -> bool:
        return self._open_until is not None and self._clock() < self._open_until

    def begin(self) -> None:
        """A request goes to the node."""
        if self._open_until is not None and not self.is_open:
            self._is_on_trial = True
            self._open_until = self._clock() + self._cooldown_seconds  # should the trial have no result

    def succeed(self) -> None:
        self._open_until = None

    def fail(self) -> None:
        now = self._clock()
        if self.is_open and not self._is_on_trial:
            return
        if now - self._failed_at > FORGET_SECONDS:
            self._cooldown_seconds = 0.0
        self._cooldown_seconds = min(max(2 * self._cooldown_seconds, FIRST_COOLDOWN_SECONDS), MAX_COOLDOWN_SECONDS)
        self._failed_at = now
        self._open_until = now + self._cooldown_seconds
        self._is_on_trial = False
