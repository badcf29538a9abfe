"""A circuit breaker, which keeps requests away from a node that has failed some of them."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_COOLDOWN_SECONDS = 1.0
MAX_COOLDOWN_SECONDS = 60.0
FORGET_SECONDS = 120.0
"""Seconds without a failure after which the cooldown starts over at `FIRST_COOLDOWN_SECONDS`."""
MAX_CAUSES = 64
"""Maximum requests remembered as possible causes of a node's failures. If more fail, the node counts as the cause."""


class Breaker:
    """A circuit breaker for one node. Owned by the event loop.

    A failure opens the breaker for a cooldown, which doubles with each further failure. Failures during a cooldown do
    not prolong it, because a broken session ends many attempts at once. After the cooldown, one request at a time is a
    trial: success closes the breaker, failure opens it again. The first trial may come during the cooldown
    (`may_be_tried`), if the other nodes have no room.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cooldown_seconds = 0.0  # 0: no recent failure
        self._failed_at = 0.0
        self._open_until: float | None = None  # None: closed
        self._is_on_trial = False
        self._was_tried = False  # whether a trial has begun since the breaker opened
        self._causes: set[object] = set()  # causes of failures since the last success, except forgiven ones

    @property
    def is_open(self) -> bool:
        return self._open_until is not None and self._clock() < self._open_until

    @property
    def may_be_tried(self) -> bool:
        """Whether a request may go to the node: the breaker is not open, or no trial has begun since it opened."""
        return not (self.is_open and self._was_tried)

    def begin(self) -> None:
        """Records that a request goes to the node."""
        if self._open_until is not None and self.may_be_tried:
            self._is_on_trial = self._was_tried = True
            # After this time another trial may begin, even if this one never ends.
            self._open_until = max(self._open_until, self._clock() + self._cooldown_seconds)

    def succeed(self) -> None:
        self._open_until = None
        self._is_on_trial = self._was_tried = False
        self._causes.clear()

    def fail(self, cause: object = None) -> None:
        """Records a failure. `cause`: the request, if it may be at fault; None: the node is at fault."""
        self._causes.add(cause if len(self._causes) < MAX_CAUSES else None)
        now = self._clock()
        if self.is_open and not self._is_on_trial:
            return
        if now - self._failed_at > FORGET_SECONDS:
            self._cooldown_seconds = 0.0
        self._cooldown_seconds = min(max(2 * self._cooldown_seconds, FIRST_COOLDOWN_SECONDS), MAX_COOLDOWN_SECONDS)
        self._failed_at = now
        self._open_until = now + self._cooldown_seconds
        self._is_on_trial = False

    def forgive(self, cause: object) -> None:
        """Withdraws the failures of a request that also fails on other nodes. Closes the breaker if none remain."""
        self._causes.discard(cause)
        if self._open_until is not None and not self._causes:
            self.succeed()
            self._cooldown_seconds /= 2
