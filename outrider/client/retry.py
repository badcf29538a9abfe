"""Decides which failed calls are repeated, and after which backoff."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from outrider.errors import POISON_REQUEST, AlreadyRunningError, CapacityError, OutriderError, PeerLostError

_BACKOFF_FACTOR = 2.0
_JITTER = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Decides about retries. A call is retried if it may succeed later: when the router has no room (CapacityError), or
    a node or router was lost (PeerLostError).

    Every attempt has the same `request_id`, so that a router never runs two of them at a time.
    Once a part of an answer has arrived, a request with a resume window is resumed instead, as
    often as needed, and these calls do not count as attempts.
    """

    max_attempts: int = 4
    initial_backoff_seconds: float = 0.2  # doubled with each attempt; a longer time that the router asks for prevails
    max_backoff_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}")
        if not 0 <= self.initial_backoff_seconds <= self.max_backoff_seconds:
            raise ValueError("backoffs must be 0 <= initial_backoff_seconds <= max_backoff_seconds")

    def backoff_seconds(self, error: OutriderError, *, num_attempts: int) -> float | None:
        """Returns the seconds to wait after `num_attempts` attempts; None to give up."""
        if num_attempts >= self.max_attempts or not _may_work_later(error, num_attempts):
            return None
        grown = self.initial_backoff_seconds * _BACKOFF_FACTOR ** (num_attempts - 1)
        seconds = max(min(grown, self.max_backoff_seconds), getattr(error, "retry_after_seconds", 0.0))
        # With jitter, clients that were rejected together do not return together.
        return seconds * random.uniform(1.0, 1.0 + _JITTER)  # noqa: S311 no secret


ONE_ATTEMPT = RetryPolicy(max_attempts=1)


def _may_work_later(error: OutriderError, num_attempts: int) -> bool:
    if isinstance(error, AlreadyRunningError):
        # An earlier attempt of this client may still run, if its connection broke and the router has not noticed yet.
        return num_attempts > 1
    return isinstance(error, (CapacityError, PeerLostError)) and error.reason != POISON_REQUEST


class Attempts:
    """Counts the attempts of one call against its policy and deadline. Not thread-safe."""

    def __init__(self, policy: RetryPolicy, *, timeout_seconds: float | None) -> None:
        """`timeout_seconds` covers all attempts. Raises: ValueError if it is not above 0."""
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be above 0, not {timeout_seconds}")
        self._policy = policy
        self._deadline = None if timeout_seconds in (None, math.inf) else time.monotonic() + timeout_seconds
        self.num_attempts = 1

    def remaining_seconds(self) -> float | None:
        """Returns the seconds until the deadline; None without one."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def next_after(self, error: OutriderError) -> float | None:
        """Counts the next attempt and returns the seconds to wait before it; None to give up."""
        seconds = self._policy.backoff_seconds(error, num_attempts=self.num_attempts)
        remaining = self.remaining_seconds()
        if seconds is None or (remaining is not None and seconds >= remaining):
            return None
        self.num_attempts += 1
        return seconds
