"""The one queue: bounded, by priority, then by arrival."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol

from outrider.errors import CapacityError, OutriderError, PeerLostError
from router.placement import Demand, Place

_MAX_RETRY_SECONDS = 30.0
LOOK_AGAIN_SECONDS = 0.25
"""How often the head of the queue is offered to placement when no report does it."""


class Places(Protocol):
    """What the queue asks for room (`router.placement.Placement`)."""

    def could_serve(self, demand: Demand) -> bool: ...

    def place(self, demand: Demand) -> Place | None: ...


class Waiting:
    """One request's turn in the queue. It keeps it when a decode node sends it back, and when a node is lost."""

    def __init__(self, demand: Demand, *, priority: int) -> None:
        self.demand = demand
        self.priority = priority
        self.arrival: int | None = None  # order among equals; set when it first asks
        self.has_waited = False  # accepted into the queue: it is not refused any more
        self.place: asyncio.Future[Place] | None = None  # set while it is in the queue
        self.stranded_since: float | None = None  # no serving node could take it since then

    @property
    def is_in_queue(self) -> bool:
        return self.place is not None and not self.place.done()

    @property
    def num_tokens(self) -> int:
        return len(self.demand.token_ids)


class Admission:
    """Hands places to requests in order; the first in line is never passed by.

    Owned by the event loop. `pump` gives out what has become free; whoever changes the
    room calls it.
    """

    def __init__(
        self,
        places: Places,
        *,
        max_waiting: int,
        max_waiting_tokens: int,
        no_node_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = places
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._no_node_timeout_seconds = no_node_timeout_seconds
        self._clock = clock
        self._heap: list[tuple[int, int, Waiting]] = []  # (-priority, arrival, request); may hold some that left
        self._arrivals = itertools.count()
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._timer: asyncio.TimerHandle | None = None
        self._mean_service_seconds = 1.0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        return self._num_waiting_tokens

    async def wait_for_place(self, waiting: Waiting) -> Place:
        """The request's place, now or when its turn comes.

        Raises: CapacityError at once when the queue is full; PeerLostError when no node
        has served for too long. Cancelling leaves the queue.
        """
        if waiting.arrival is None:
            waiting.arrival = next(self._arrivals)
        if not self._is_behind_others(waiting):
            place = self._places.place(waiting.demand)
            if place is not None:
                return place
        if not waiting.has_waited:
            self._check_limits(waiting)
            waiting.has_waited = True
        future: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        waiting.place = future
        heapq.heappush(self._heap, (-waiting.priority, waiting.arrival, waiting))
        self._num_waiting += 1
        num_tokens = waiting.num_tokens
        self._num_waiting_tokens += num_tokens
        self._set_timer()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # given out at the moment it was no longer wanted
            raise
        finally:
            waiting.place = None
            self._num_waiting -= 1
            self._num_waiting_tokens -= num_tokens
            self._drop_gone()

    def pump(self) -> None:
        """Gives places to the first in line, as long as there are any.

        A request that no serving node could take holds up nobody; it waits at most
        `no_node_timeout_seconds` for one that can.
        """
        stranded = []
        while (first := self._first()) is not None:
            if not self._places.could_serve(first.demand):
                stranded.append(heapq.heappop(self._heap))
                continue
            first.stranded_since = None
            place = self._places.place(first.demand)
            if place is None:
                break
            heapq.heappop(self._heap)
            assert first.place is not None, "a request in the queue has a future"
            first.place.set_result(place)
        for entry in stranded:
            self._strand(entry[2])
            heapq.heappush(self._heap, entry)

    def _strand(self, waiting: Waiting) -> None:
        now = self._clock()
        if waiting.stranded_since is None:
            waiting.stranded_since = now
        if now - waiting.stranded_since >= self._no_node_timeout_seconds and waiting.is_in_queue:
            error = PeerLostError("no decode node or no prefill node serves", reason="NO_NODE")
            waiting.place.set_exception(error)  # type: ignore[union-attr] # it is in the queue

    def withdraw(self, waiting: Waiting, error: OutriderError) -> None:
        """Ends the wait of a request that is in the queue; others do not notice."""
        if waiting.place is not None and not waiting.place.done():
            waiting.place.set_exception(error)

    def observe_service(self, seconds: float) -> None:
        """How long a request took once admitted: what RetryInfo is estimated from."""
        self._mean_service_seconds += 0.1 * (seconds - self._mean_service_seconds)

    def _check_limits(self, waiting: Waiting) -> None:
        retry_after = min(max(self._mean_service_seconds, 0.1), _MAX_RETRY_SECONDS)
        if self._num_waiting + 1 > self._max_waiting:
            raise CapacityError(
                f"{self._num_waiting} requests are waiting; at most {self._max_waiting} may",
                retry_after_seconds=retry_after,
                reason="QUEUE_FULL",
            )
        if self._num_waiting_tokens + waiting.num_tokens > self._max_waiting_tokens:
            raise CapacityError(
                f"{self._num_waiting_tokens} prompt tokens are waiting, {waiting.num_tokens} more would exceed"
                f" {self._max_waiting_tokens}",
                retry_after_seconds=retry_after,
                reason="QUEUE_FULL",
            )

    def _is_behind_others(self, waiting: Waiting) -> bool:
        first = self._first()
        if first is None:
            return False
        assert waiting.arrival is not None, "it has asked"
        assert first.arrival is not None, "it is in the queue"
        return (-first.priority, first.arrival) < (-waiting.priority, waiting.arrival)

    def _first(self) -> Waiting | None:
        self._drop_gone()
        return self._heap[0][2] if self._heap else None

    def _drop_gone(self) -> None:
        """Those that left: cancelled, or their deadline has passed."""
        while self._heap and not self._heap[0][2].is_in_queue:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * self._num_waiting + 16:  # many left from behind a first that stays
            self._heap = [entry for entry in self._heap if entry[2].is_in_queue]
            heapq.heapify(self._heap)

    def _set_timer(self) -> None:
        """Looks again after a while even if nothing changes: nodes that were full, nodes that never come."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.pump()
        if self._num_waiting:
            self._set_timer()
