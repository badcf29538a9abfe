"""Stops steps from waiting for a draft node that does not answer in time."""

from __future__ import annotations

from collections.abc import Callable

MISSES_TO_OPEN = 5
PROBE_SECONDS = 1.0


class Breaker:
    """Opens after five misses in a row, probes once a second, closes itself on the first success.

    While it is open no step waits, and the node is sent at most one message a second.
    Not thread-safe: guarded by its owner's lock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_misses = 0
        self._next_probe: float | None = None  # None: closed
        self.num_openings = 0

    @property
    def is_open(self) -> bool:
        return self._next_probe is not None

    def miss(self) -> bool:
        """A step found nothing in time. True when this miss opens the breaker."""
        self._num_misses += 1
        if self.is_open or self._num_misses < MISSES_TO_OPEN:
            return False
        self._next_probe = self._clock() + PROBE_SECONDS
        self.num_openings += 1
        return True

    def success(self) -> bool:
        """The node answered in time. True when this closes the breaker."""
        was_open = self.is_open
        self._num_misses = 0
        self._next_probe = None
        return was_open

    def may_send(self) -> bool:
        """Whether a message may go out now: always when closed, else when a probe is due."""
        return self._next_probe is None or self._clock() >= self._next_probe

    def probed(self) -> None:
        """A message went out; while open, the next one waits for a second."""
        if self._next_probe is not None:
            self._next_probe = self._clock() + PROBE_SECONDS
