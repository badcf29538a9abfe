"""The router's only queue. It is bounded, and ordered by priority, the client's fair share, and arrival."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence

from outrider.errors import CapacityError, NotFoundError, OutriderError, PeerLostError
from router.scheduling.placement import Demand, Family, Place, Placement

_MAX_RETRY_SECONDS = 30.0
COST_TOKENS = 1024
"""Number of prompt tokens that cost a client as much of its share as one sequence does."""
LANES_PER_DOUBLING = 8
"""Number of lanes into which the request sizes between any size and its double are divided."""
MAX_CLIENTS = 8192
"""Maximum clients whose share is remembered. Bounded, because without authentication clients choose their own names."""
RECHECK_SECONDS = 0.25
"""Seconds between attempts to place queued requests if nothing else triggers one."""

Turn = tuple[float, ...]
"""(negative priority, the request's stamp, arrival number). The smallest goes first."""
_Entry = tuple[Turn, "QueuedRequest"]


class FairOrder:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996).

    A request's stamp is the virtual time at which it would start if its client had a server of its own; the
    smallest stamp goes first. Requests of one client keep their order. A client that was idle starts at the
    current virtual time, so it cannot save up turns. If there are too many clients, those whose last requests end
    first in virtual time are forgotten.
    """

    def __init__(self, *, max_clients: int = MAX_CLIENTS) -> None:
        self._max_clients = max_clients
        self._now = 0.0
        self._ends: dict[str, float] = {}  # by client: the virtual end of its last request

    def stamp(self, client: str, cost: float) -> float:
        """Returns the virtual start time (start tag) of a client's new request.

        `cost`: above 0, in any unit. The client's virtual end advances by this cost.
        """
        start = max(self._now, self._ends.get(client, 0.0))
        self._ends[client] = start + cost
        if len(self._ends) > self._max_clients:
            self._ends = dict(heapq.nlargest(self._max_clients // 2, self._ends.items(), key=lambda item: item[1]))
        return start

    def serve(self, stamp: float) -> None:
        """Advances virtual time to the stamp of a request that got its turn."""
        self._now = max(self._now, stamp)

    def refund(self, client: str, cost: float) -> None:
        """Refunds the cost of a request that left before its turn."""
        if client in self._ends:
            self._ends[client] -= cost


class QueuedRequest:
    """A request's turn in the queue. The request keeps its turn after a decode node has rejected or lost it."""

    def __init__(self, demand: Demand, *, priority: int, client: str = "") -> None:
        self.demand = demand  # changed by `RequestQueue.change_demand` while the request is queued
        self.priority = priority
        self.client = client
        self.cost = demand.num_samples + len(demand.token_ids) / COST_TOKENS  # charged to the client's share
        self.turn: Turn = ()  # empty until the request first asks for a place
        self.bypasses_limits = False  # whether the request is exempt from the queue's bounds
        self.was_placed = False  # whether the request has had a place; if so, it is never displaced and gets no refund
        self.place: asyncio.Future[Place] | None = None  # set from joining a lane until the waiting task resumes
        self.lane: list[_Entry] | None = None  # set while the request is in the queue
        # Whether no node of the role had room for the request while others of its priority waited behind it.
        self.lacks_decode = self.lacks_prefill = False

    @property
    def is_leaving(self) -> bool:
        """Whether the request was cancelled, but is still in its lane because its task has not run since."""
        return self.place is not None and self.place.cancelled()

    @property
    def num_tokens(self) -> int:
        return len(self.demand.token_ids)


class RequestQueue:
    """Assigns places to requests in order; smaller ones may pass those that need more room than is free.

    At equal priority, clients take turns, weighted by the cost of their requests (`FairOrder`). If the queue is
    full, the last request in this order is displaced, even if it is the new one.

    Owned by the event loop. Code that frees room calls `pump`, which assigns places.
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
        # Heaps of requests by family and approximate size, each served in order. They may hold requests that have left.
        self._lanes: dict[tuple[Family, tuple[int, ...]], list[_Entry]] = {}
        self._num_gone = 0  # requests that have left and may still be in lanes
        self._stranded: dict[Family, float] = {}  # families that no serving node can take, and since when
        self._order = FairOrder()
        self._arrivals = itertools.count()
        self.num_waiting_tokens = 0  # prompt tokens of the requests in the queue
        # (since when, prompt tokens) of requests that count towards the bounds, the oldest first.
        self._waiting: dict[QueuedRequest, tuple[float, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._mean_service_seconds = 1.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def oldest_wait_seconds(self) -> float:
        """Returns how long the oldest request has been queued; 0 if none is queued. Thread-safe."""
        counted = list(self._waiting.values())  # an atomic copy, because the event loop changes the original
        return max(self._clock() - counted[0][0], 0.0) if counted else 0.0

    async def wait_for_place(self, waiting: QueuedRequest) -> Place:
        """Returns the request's place, now or when its turn comes. Cancelling the call leaves the queue.

        Raises: CapacityError if the request would have to wait and the queue is full; PeerLostError after too long
        a time without a serving node that could take the request; NotFoundError if its adapter was unloaded.
        """
        if not waiting.turn:
            stamp = self._order.stamp(waiting.client, waiting.cost)
            waiting.turn = (-waiting.priority, stamp, next(self._arrivals))
        if not self._lanes and (place := self._placement.place(waiting.demand)) is not None:
            self._record_place(waiting)
            return place
        future: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        waiting.place = future
        self._join_lane(waiting)
        try:
            self.pump()
            if not future.done():
                if not waiting.bypasses_limits:
                    self._make_room(waiting)
                    waiting.bypasses_limits = True
                self._count_in(waiting)
                self._set_timer()
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # a place assigned in the loop iteration that cancelled the wait
            else:
                self._refund(waiting)
            raise
        except OutriderError:  # the queue is full, or no node serves
            self._refund(waiting)
            raise
        finally:
            self._leave_lane(waiting)
            waiting.place = None
            self._count_out(waiting)

    def change_demand(self, waiting: QueuedRequest, demand: Demand) -> None:
        """Changes the request's demand. The request keeps its turn."""
        is_in_queue = waiting.lane is not None
        self._leave_lane(waiting)
        waiting.demand = demand
        if is_in_queue:
            self._join_lane(waiting)

    def pump(self) -> None:
        """Assigns free places in order.

        If the first request of a priority finds no room, the nodes that will have room for it first are reserved, and
        others of this priority may use the other nodes. Requests of lower priority may not use any node that could take
        this first request.
        Scored prompts wait for each other in order, and others pass them. Requests that no serving node could take
        block no others, and wait at most `no_node_timeout_seconds` for a node that can.
        """
        if not self._lanes:
            return
        placement = self._placement
        usable = self._update_stranded()
        heads = [lane[0] for (family, _), lane in self._lanes.items() if family in usable]
        heapq.heapify(heads)
        blocked: list[QueuedRequest] = []  # requests that found no room in this round
        reserved: frozenset[bytes] | None = frozenset()  # None: not computed yet
        while heads:
            first = heapq.heappop(heads)[1]
            demand, lane = first.demand, first.lane
            if any(_needs_no_less(demand, other.demand) for other in blocked):
                continue
            if demand.is_scored and placement.waits_for_scored_prompts(demand):
                continue
            if blocked and (reserved is None or first.priority < blocked[-1].priority):
                reserved = self._reserve(blocked, first.priority)
                if reserved is None:
                    break
            place = placement.place(demand, reserved=reserved or frozenset())
            if place is not None:
                assert first.place is not None, "a request in the queue has a future"
                assert lane is not None, "a request in the queue has a lane"
                self._leave_lane(first)
                self._record_place(first)
                first.place.set_result(place)
                if _drop_gone(lane):
                    heapq.heappush(heads, lane[0])
                continue
            if not blocked or first.priority < blocked[-1].priority:
                reserved = None
            blocked.append(first)

    def _reserve(self, blocked: Sequence[QueuedRequest], priority: int) -> frozenset[bytes] | None:
        """Returns the nodes that later requests of this priority must not use; None: they must not use any node."""
        placement = self._placement
        reserved: frozenset[bytes] = frozenset()
        for other in blocked:
            has_prefill_room = placement.has_prefill_room(other.demand)
            if other.priority == priority:
                other.lacks_prefill |= not has_prefill_room
                other.lacks_decode |= has_prefill_room
                return reserved | placement.nodes_to_reserve(
                    other.demand, decode=other.lacks_decode, prefill=other.lacks_prefill
                )
            if not has_prefill_room:
                return None
            reserved |= placement.usable_nodes(other.demand)
        return reserved

    def _update_stranded(self) -> set[Family]:
        """Returns families that a serving node could take. Fails requests of other families that waited too long, or
        whose adapter was unloaded.
        """
        now, since, timeout = self._clock(), self._stranded, self._no_node_timeout_seconds
        self._lanes = {key: lane for key, lane in self._lanes.items() if _drop_gone(lane)}
        demands = {family: lane[0][1].demand for (family, _), lane in self._lanes.items()}
        usable = {family for family, demand in demands.items() if self._placement.is_usable(demand)}
        self._stranded = {family: since.get(family, now) for family in demands.keys() - usable}
        for family in self._stranded:
            if self._placement.is_unloaded(demands[family]):
                self._end_unloaded(family)
        ended = {family for family, at in self._stranded.items() if now - at >= timeout}
        if ended:
            long = itertools.takewhile(lambda item: now - item[1][0] >= timeout, self._waiting.items())
            for waiting in [waiting for waiting, _ in long if waiting.demand.family in ended]:
                adapter = waiting.demand.adapter
                which = "" if adapter is None else f" with the adapter {adapter}"
                message = f"no decode node{which} is available for the request"
                self.withdraw(waiting, PeerLostError(message, reason="NO_NODE"))
        return usable

    def _end_unloaded(self, family: Family) -> None:
        lanes = [lane for (of, _), lane in self._lanes.items() if of == family]
        for waiting in [waiting for lane in lanes for _, waiting in lane if waiting.lane is lane]:
            message = f"the adapter {waiting.demand.adapter} was unloaded"
            self.withdraw(waiting, NotFoundError(message, reason="MODEL_NOT_FOUND"))

    def withdraw(self, waiting: QueuedRequest, error: OutriderError) -> None:
        """Removes a request from the queue and fails its wait with `error`. Other requests are not affected."""
        if waiting.place is not None and not waiting.place.done():
            self._leave_lane(waiting)
            waiting.place.set_exception(error)

    def observe_service(self, seconds: float) -> None:
        """Records how long a request took after admission. RetryInfo is estimated from such times."""
        self._mean_service_seconds += 0.1 * (seconds - self._mean_service_seconds)

    def _record_place(self, waiting: QueuedRequest) -> None:
        waiting.was_placed = True
        self._order.serve(waiting.turn[1])

    def _refund(self, waiting: QueuedRequest) -> None:
        """Refunds the cost of a request that leaves before it has had a place."""
        if not waiting.was_placed:
            self._order.refund(waiting.client, waiting.cost)

    def _make_room(self, waiting: QueuedRequest) -> None:
        """Displaces requests behind this one until it fits into the queue. Raises: CapacityError if it cannot fit."""
        displaced: dict[QueuedRequest, CapacityError] = {}
        behind: list[QueuedRequest] | None = None  # sorted: the last in line is at the end
        while (error := self._why_full(waiting, without=displaced)) is not None:
            if behind is None:
                others = (other for other in self._waiting if other.lane is not None and not other.was_placed)
                behind = sorted((o for o in others if o.turn > waiting.turn), key=lambda other: other.turn)
            if not behind:
                raise error
            displaced[behind.pop()] = error
        for other, error in displaced.items():
            self.withdraw(other, error)
            self._count_out(other)

    def _count_in(self, waiting: QueuedRequest) -> None:
        self._waiting[waiting] = self._clock(), waiting.num_tokens
        self.num_waiting_tokens += waiting.num_tokens

    def _count_out(self, waiting: QueuedRequest) -> None:
        """Stops counting the request. Idempotent."""
        _, num_tokens = self._waiting.pop(waiting, (0.0, 0))
        self.num_waiting_tokens -= num_tokens

    def _why_full(self, waiting: QueuedRequest, *, without: Collection[QueuedRequest]) -> CapacityError | None:
        num_tokens = self.num_waiting_tokens - sum(other.num_tokens for other in without)
        if self.num_waiting - len(without) + 1 > self._max_waiting:
            message = f"the queue is full: {self.num_waiting} of at most {self._max_waiting} requests are waiting"
        elif num_tokens + waiting.num_tokens > self._max_waiting_tokens:
            message = (
                f"the queue is full: {self.num_waiting_tokens} of at most {self._max_waiting_tokens} prompt tokens are"
                f" waiting, and this request has {waiting.num_tokens}"
            )
        else:
            return None
        retry_after = min(max(self._mean_service_seconds, 0.1), _MAX_RETRY_SECONDS)
        return CapacityError(message, retry_after_seconds=retry_after, reason="QUEUE_FULL")

    def _join_lane(self, waiting: QueuedRequest) -> None:
        demand = waiting.demand
        num_tokens, num_samples = demand.size
        size = () if demand.is_scored else (num_samples, round(LANES_PER_DOUBLING * math.log2(max(num_tokens, 1))))
        waiting.lane = self._lanes.setdefault((demand.family, size), [])
        heapq.heappush(waiting.lane, (waiting.turn, waiting))

    def _leave_lane(self, waiting: QueuedRequest) -> None:
        """Removes the request from its lane. Idempotent."""
        if waiting.lane is None:
            return
        waiting.lane = None
        self._num_gone += 1
        if self._num_gone > self.num_waiting + 16:  # many requests that have left are still in lanes, behind others
            self._num_gone = 0
            for lane in self._lanes.values():
                lane[:] = [entry for entry in lane if entry[1].lane is lane]
                heapq.heapify(lane)

    def _set_timer(self) -> None:
        """Schedules a recheck in case nothing else triggers one."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RECHECK_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.pump()
        if self.num_waiting:
            self._set_timer()


def _drop_gone(lane: list[_Entry]) -> bool:
    """Removes requests at the front that have left or are leaving. Returns whether any remain."""
    while lane and (lane[0][1].lane is not lane or lane[0][1].is_leaving):
        heapq.heappop(lane)
    return bool(lane)


def _needs_no_less(demand: Demand, other: Demand) -> bool:
    """Whether a node that has no room for `other` has no room for `demand` either."""
    size, other_size = demand.size, other.size
    is_no_smaller = size.num_tokens >= other_size.num_tokens and size.num_samples >= other_size.num_samples
    return is_no_smaller and demand.family == other.family
