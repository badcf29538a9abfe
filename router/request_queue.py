"""The one queue: bounded, by priority, then by the client's share, then by arrival."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection

from outrider.errors import CapacityError, OutriderError, PeerLostError
from router.fair_order import FairOrder
from router.placement import Demand, Place, Placement

_MAX_RETRY_SECONDS = 30.0
COST_TOKENS = 1024
"""So many prompt tokens count as one more sequence that runs, in a client's share."""
LOOK_AGAIN_SECONDS = 0.25
"""How often the head of the queue is offered to placement when no report does it."""


class QueuedRequest:
    """One request's turn in the queue. It keeps it when a decode node sends it back, and when a node is lost."""

    def __init__(self, demand: Demand, *, priority: int, client: str = "", num_samples: int = 1) -> None:
        self.demand = demand
        self.priority = priority
        self.client = client
        self.cost = num_samples + len(demand.token_ids) / COST_TOKENS  # of its client's share
        self.turn: tuple[int, float, int] | None = None  # the smallest goes first; set when it first asks
        self.was_accepted = False  # the bounds of the queue do not apply to it any more
        self.was_placed = False  # it has had a place once: no other request displaces it
        self.place: asyncio.Future[Place] | None = None  # set while it is in the queue
        self.num_counted_tokens: int | None = None  # while it counts against the queue's bounds
        self.stranded_since: float | None = None  # no serving node could take it since then

    @property
    def is_in_queue(self) -> bool:
        return self.place is not None and not self.place.done()

    @property
    def num_tokens(self) -> int:
        return len(self.demand.token_ids)


class RequestQueue:
    """Hands places to requests in order. A request passes others only to nodes that none of those can use.

    Among equal priorities clients take turns, by what their requests cost (`FairOrder`). When the
    queue is full, a client that has less in it than another displaces that one's last request.

    Owned by the event loop. `pump` gives out what has become free; whoever changes the
    room calls it.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        max_waiting: int,
        max_waiting_tokens: int,
        no_node_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placement = placement
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._no_node_timeout_seconds = no_node_timeout_seconds
        self._clock = clock
        self._heap: list[tuple[tuple[int, float, int], QueuedRequest]] = []  # by turn; may hold some that left
        self._order = FairOrder()
        self._arrivals = itertools.count()
        self.num_waiting = 0
        self.num_waiting_tokens = 0  # of the prompts of requests in the queue
        self._waiting_since: dict[QueuedRequest, float] = {}  # of those that are counted, the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._mean_service_seconds = 1.0

    def oldest_wait_seconds(self) -> float:
        """Of those in the queue, how long the oldest has been there; 0: none. May be asked by any thread."""
        since = list(self._waiting_since.values())  # a copy, in one go: the event loop's thread goes on
        return max(self._clock() - since[0], 0.0) if since else 0.0

    async def wait_for_place(self, waiting: QueuedRequest) -> Place:
        """The request's place, now or when its turn comes.

        Raises: CapacityError at once when the queue is full; PeerLostError when no node
        has served for too long. Cancelling leaves the queue.
        """
        if waiting.turn is None:
            stamp = self._order.stamp(waiting.client, waiting.cost)
            waiting.turn = (-waiting.priority, stamp, next(self._arrivals))
        if not self._is_behind_others(waiting):
            place = self._placement.place(waiting.demand)
            if place is not None:
                self._note_place(waiting)
                return place
        if not waiting.was_accepted:
            try:
                self._make_room(waiting)
            except CapacityError:
                self._refund(waiting)
                raise
            waiting.was_accepted = True
        future: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        waiting.place = future
        heapq.heappush(self._heap, (waiting.turn, waiting))
        self._count_in(waiting)
        self._set_timer()
        self.pump()  # it may pass those before it
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # given out at the moment it was no longer wanted
            else:
                self._refund(waiting)
            raise
        except OutriderError:  # it gave way to another client, or no node serves
            self._refund(waiting)
            raise
        finally:
            waiting.place = None
            self._count_out(waiting)
            self._drop_gone()

    def pump(self) -> None:
        """Gives places to the first in line, as long as there are any.

        The decode nodes that a request waits for are reserved for it: later ones get places on the others. Where
        room on prefill nodes is short nobody passes, since a large prompt would never get any; but prompts that are
        to be scored wait for each other in their order, and others pass them. A request that no serving node could
        take holds up nobody; it waits at most `no_node_timeout_seconds` for one that can.
        """
        placement = self._placement
        skipped = []
        reserved: frozenset[bytes] = frozenset()
        is_scoring = False  # and a prompt waits for that; others that are to be scored do not pass it
        while (first := self._first()) is not None and (not reserved or len(reserved) < placement.num_decode_nodes):
            if first.demand.is_scored and (is_scoring or placement.is_behind_scored(first.demand)):
                is_scoring = True
                skipped.append(heapq.heappop(self._heap))
                continue
            usable = placement.usable_nodes(first.demand)
            first.stranded_since = None if usable else self._strand(first)
            place = None if usable <= reserved else placement.place(first.demand, reserved=reserved)
            if place is None and usable and not placement.has_prefill_room(first.demand):
                break
            entry = heapq.heappop(self._heap)
            if place is None:
                reserved |= usable
                skipped.append(entry)
                continue
            assert first.place is not None, "a request in the queue has a future"
            self._note_place(first)
            first.place.set_result(place)
        for entry in skipped:
            heapq.heappush(self._heap, entry)

    def _strand(self, waiting: QueuedRequest) -> float:
        """Since when no serving node could take it. Ends its wait after `no_node_timeout_seconds`."""
        now = self._clock()
        since = now if waiting.stranded_since is None else waiting.stranded_since
        if now - since >= self._no_node_timeout_seconds:
            self.withdraw(waiting, PeerLostError("no decode node serves", reason="NO_NODE"))
        return since

    def withdraw(self, waiting: QueuedRequest, error: OutriderError) -> None:
        """Ends the wait of a request that is in the queue; others do not notice."""
        if waiting.place is not None and not waiting.place.done():
            waiting.place.set_exception(error)

    def observe_service(self, seconds: float) -> None:
        """How long a request took once admitted: what RetryInfo is estimated from."""
        self._mean_service_seconds += 0.1 * (seconds - self._mean_service_seconds)

    def _note_place(self, waiting: QueuedRequest) -> None:
        assert waiting.turn is not None, "it has asked"
        waiting.was_placed = True
        self._order.serve(waiting.turn[1])

    def _refund(self, waiting: QueuedRequest) -> None:
        """It leaves without having had a place."""
        if not waiting.was_placed:
            self._order.refund(waiting.client, waiting.cost)

    def _make_room(self, waiting: QueuedRequest) -> None:
        """In the queue, where others give way if need be, and if it helps. Raises: CapacityError."""
        displaced: dict[QueuedRequest, CapacityError] = {}
        while (error := self._why_full(waiting, without=displaced)) is not None:
            last = self._last_of_busiest(besides=waiting.client, without=displaced)
            if last is None:
                raise error
            displaced[last] = error
        for other, error in displaced.items():
            self.withdraw(other, error)
            self._count_out(other)

    def _count_in(self, waiting: QueuedRequest) -> None:
        waiting.num_counted_tokens = waiting.num_tokens
        self.num_waiting += 1
        self.num_waiting_tokens += waiting.num_tokens
        self._waiting_since[waiting] = self._clock()

    def _count_out(self, waiting: QueuedRequest) -> None:
        """Idempotent."""
        if waiting.num_counted_tokens is not None:
            self.num_waiting -= 1
            self.num_waiting_tokens -= waiting.num_counted_tokens
            del self._waiting_since[waiting]
            waiting.num_counted_tokens = None

    def _why_full(self, waiting: QueuedRequest, *, without: Collection[QueuedRequest]) -> CapacityError | None:
        retry_after = min(max(self._mean_service_seconds, 0.1), _MAX_RETRY_SECONDS)
        if self.num_waiting - len(without) + 1 > self._max_waiting:
            return CapacityError(
                f"{self.num_waiting} requests are waiting; at most {self._max_waiting} may",
                retry_after_seconds=retry_after,
                reason="QUEUE_FULL",
            )
        num_tokens = self.num_waiting_tokens - sum(other.num_tokens for other in without)
        if num_tokens + waiting.num_tokens > self._max_waiting_tokens:
            return CapacityError(
                f"{self.num_waiting_tokens} prompt tokens are waiting, {waiting.num_tokens} more would exceed"
                f" {self._max_waiting_tokens}",
                retry_after_seconds=retry_after,
                reason="QUEUE_FULL",
            )
        return None

    def _last_of_busiest(self, *, besides: str, without: Collection[QueuedRequest]) -> QueuedRequest | None:
        """Of the client with the most in the queue, if that is at least two more than `besides` has."""
        in_queue = [waiting for _, waiting in self._heap if waiting.is_in_queue and waiting not in without]
        counts = Counter(waiting.client for waiting in in_queue)
        client, most = max(counts.items(), key=lambda item: item[1], default=(besides, 0))
        if client == besides or most < counts[besides] + 2:
            return None
        mine = [waiting for waiting in in_queue if waiting.client == client and not waiting.was_placed]
        return max(mine, key=lambda waiting: waiting.turn or (), default=None)

    def _is_behind_others(self, waiting: QueuedRequest) -> bool:
        first = self._first()
        if first is None:
            return False
        assert waiting.turn is not None, "it has asked"
        assert first.turn is not None, "it is in the queue"
        return first.turn < waiting.turn

    def _first(self) -> QueuedRequest | None:
        self._drop_gone()
        return self._heap[0][1] if self._heap else None

    def _drop_gone(self) -> None:
        """Those that left: cancelled, or their deadline has passed."""
        while self._heap and not self._heap[0][1].is_in_queue:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * self.num_waiting + 16:  # many left from behind a first that stays
            self._heap = [entry for entry in self._heap if entry[1].is_in_queue]
            heapq.heapify(self._heap)

    def _set_timer(self) -> None:
        """Looks again after a while even if nothing changes: nodes that were full, nodes that never come."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.pump()
        if self.num_waiting:
            self._set_timer()
