"""Clients that begin requests and leave them: nodes compute prompts whose answers nobody reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import CapacityError

CREDITS_PER_SECOND = 2.0
MAX_CLIENTS = 8192
"""That are remembered: clients choose their names themselves where nobody asks for tokens."""


@dataclass(slots=True)
class _Standing:
    """How a client stands."""

    credits: float
    at: float
    num_running: int = 0


class Departures:
    """Requests that were granted, and whose clients left before their end, by client. Owned by the event loop.

    A departure costs a client a credit; an answer that it reads to its end brings one, a second two, up
    to `max_left`. Requests that fail, or leave the queue, change nothing. With half of the credits a client
    is not limited. With fewer it may have as many requests as it has credits at a time. Nobody owes credits:
    a gateway that restarts leaves all its requests at once, and is back at its old load after it has read a
    few answers.
    """

    def __init__(self, max_left: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_left`: 0 limits nobody."""
        self._max_left = max_left
        self._clock = clock
        self._clients: dict[str, _Standing] = {}

    def __len__(self) -> int:
        """Clients that are remembered."""
        return len(self._clients)

    def check(self, client: str) -> None:
        """Raises: CapacityError for a client that may begin no request now."""
        standing = self._clients.get(client)
        if standing is None:
            return
        self._refill(standing)
        missing = min(standing.num_running + 1.0, self._max_left / 2) - standing.credits
        if missing > 0.0:
            raise CapacityError(
                "this client leaves more requests than it reads to their ends",
                retry_after_seconds=missing / CREDITS_PER_SECOND,
                reason="LEFT_TOO_MANY",
            )

    def begin(self, client: str) -> None:
        self._standing(client).num_running += 1

    def end(self, client: str) -> None:
        """Of a request that was begun."""
        self._standing(client).num_running -= 1
        if len(self._clients) > MAX_CLIENTS:
            self._forget()

    def settle(self, client: str, *, was_left: bool) -> None:
        """Of a request that nodes have worked on. `was_left`: its client did not wait for its end."""
        standing = self._standing(client)
        self._refill(standing)
        change = -1.0 if was_left else 1.0
        standing.credits = min(max(standing.credits + change, 0.0), float(self._max_left))

    def _standing(self, client: str) -> _Standing:
        return self._clients.setdefault(client, _Standing(float(self._max_left), self._clock()))

    def _refill(self, standing: _Standing) -> None:
        now = self._clock()
        standing.credits = min(standing.credits + (now - standing.at) * CREDITS_PER_SECOND, float(self._max_left))
        standing.at = now

    def _forget(self) -> None:
        """All but those who have to wait, or who have requests."""
        for standing in self._clients.values():
            self._refill(standing)
        self._clients = {
            client: standing
            for client, standing in self._clients.items()
            if standing.num_running or standing.credits < min(1.0, self._max_left)
        }
