"""The one queue: bounded, by priority, then by the client's share, then by arrival."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence

from outrider.errors import CapacityError, OutriderError, PeerLostError
from router.scheduling.placement import Demand, Family, Place, Placement

_MAX_RETRY_SECONDS = 30.0
COST_TOKENS = 1024
"""So many prompt tokens count as one more sequence that runs, in a client's share."""
SIZES_IN_DOUBLE = 8
"""Lanes between a size and its double."""
MAX_CLIENTS = 8192
"""That are remembered: clients choose their names themselves where nobody asks for tokens."""
LOOK_AGAIN_SECONDS = 0.25
"""How often the head of the queue is offered to placement when no report does it."""


Turn = tuple[float, ...]
"""(minus the priority, the client's share at its arrival, its arrival): the smallest goes first."""
_Entry = tuple[Turn, "QueuedRequest"]


class FairOrder:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996).

    A request's stamp is the virtual time at which it would start if its client had a server
    of its own; the smallest stamp goes first. Requests of one client keep their order. A
    client that was idle starts at the present, so nothing is saved up. Of many clients those that
    have had least are forgotten first.
    """

    def __init__(self, *, max_clients: int = MAX_CLIENTS) -> None:
        self._max_clients = max_clients
        self._now = 0.0
        self._ends: dict[str, float] = {}  # by client: the virtual time at which its last request would end

    def stamp(self, client: str, cost: float) -> float:
        """`cost`: above 0, in any unit."""
        start = max(self._now, self._ends.get(client, 0.0))
        self._ends[client] = start + cost
        if len(self._ends) > self._max_clients:
            self._ends = dict(heapq.nlargest(self._max_clients // 2, self._ends.items(), key=lambda item: item[1]))
        return start

    def serve(self, stamp: float) -> None:
        """A request has got its turn: time goes on to its start."""
        self._now = max(self._now, stamp)

    def refund(self, client: str, cost: float) -> None:
        """A request has left without its turn."""
        if client in self._ends:
            self._ends[client] -= cost


class QueuedRequest:
    """One request's turn in the queue. It keeps it when a decode node sends it back, and when a node is lost."""

    def __init__(self, demand: Demand, *, priority: int, client: str = "") -> None:
        self.demand = demand  # while it is in the queue, `RequestQueue.change_demand` changes it
        self.priority = priority
        self.client = client
        self.cost = demand.num_samples + len(demand.token_ids) / COST_TOKENS  # of its client's share
        self.turn: Turn = ()  # empty until it first asks
        self.was_accepted = False  # the bounds of the queue do not apply to it any more
        self.was_placed = False  # it has had a place once: no other request displaces it
        self.place: asyncio.Future[Place] | None = None  # set while it is in the queue, and until its task goes on
        self.lane: list[_Entry] | None = None  # set while it is in the queue
        self.lacks_decode = self.lacks_prefill = False  # it has found no such node with room, and others would pass it

    @property
    def is_leaving(self) -> bool:
        """Whether its task is cancelled but has not run since: then it is still in its lane."""
        return self.place is not None and self.place.cancelled()

    @property
    def num_tokens(self) -> int:
        return len(self.demand.token_ids)


class RequestQueue:
    """Hands places to requests in order; smaller ones pass others that wait for more room than there is.

    Among equal priorities clients take turns, by what their requests cost (`FairOrder`). When the
    queue is full, the last in this order gives way, be it the one that comes.

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
        # By family and, about, size: heaps, which may hold some that left. Nobody is tried before the first of a lane.
        self._lanes: dict[tuple[Family, tuple[int, ...]], list[_Entry]] = {}
        self._num_gone = 0  # that the lanes may hold
        self._stranded: dict[Family, float] = {}  # families that no serving node could take, and since when
        self._order = FairOrder()
        self._arrivals = itertools.count()
        self.num_waiting_tokens = 0  # of the prompts of requests in the queue
        # (since when, prompt tokens) of those that count against the bounds, the oldest first.
        self._waiting: dict[QueuedRequest, tuple[float, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._mean_service_seconds = 1.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def oldest_wait_seconds(self) -> float:
        """Of those in the queue, how long the oldest has been there; 0: none. May be asked by any thread."""
        counted = list(self._waiting.values())  # a copy, in one go: the event loop's thread goes on
        return max(self._clock() - counted[0][0], 0.0) if counted else 0.0

    async def wait_for_place(self, waiting: QueuedRequest) -> Place:
        """The request's place, now or when its turn comes.

        Raises: CapacityError when it would have to wait and the queue is full; PeerLostError when no node that could
        take it has served for too long. Cancelling leaves the queue.
        """
        if not waiting.turn:
            stamp = self._order.stamp(waiting.client, waiting.cost)
            waiting.turn = (-waiting.priority, stamp, next(self._arrivals))
        if not self._lanes and (place := self._placement.place(waiting.demand)) is not None:
            self._note_place(waiting)
            return place
        future: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        waiting.place = future
        self._join_lane(waiting)
        try:
            self.pump()
            if not future.done():
                if not waiting.was_accepted:
                    self._make_room(waiting)
                    waiting.was_accepted = True
                self._count_in(waiting)
                self._set_timer()
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # given out at the moment it was no longer wanted
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
        """It keeps its turn."""
        is_in_queue = waiting.lane is not None
        self._leave_lane(waiting)
        waiting.demand = demand
        if is_in_queue:
            self._join_lane(waiting)

    def pump(self) -> None:
        """Gives places to the first in line, as long as there are any.

        For the first of a priority that finds no room, the node is kept that will have it first: the others of this
        priority may have what they need on the other nodes. Those of lower priority have nothing of what it waits for.
        Prompts that are to be scored wait for each other in their order, and others pass them. Requests that no serving
        node could take hold up nobody; they wait at most `no_node_timeout_seconds` for one that can.
        """
        if not self._lanes:
            return
        placement = self._placement
        usable = self._tend_stranded()
        heads = [lane[0] for (family, _), lane in self._lanes.items() if family in usable]
        heapq.heapify(heads)
        blocked: list[QueuedRequest] = []  # in this round
        reserved: frozenset[bytes] | None = frozenset()  # None: to be found out
        while heads:
            first = heapq.heappop(heads)[1]
            demand, lane = first.demand, first.lane
            if any(_needs_no_less(demand, other.demand) for other in blocked):
                continue
            if demand.is_scored and placement.is_behind_scored(demand):
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
                self._note_place(first)
                first.place.set_result(place)
                if _drop_gone(lane):
                    heapq.heappush(heads, lane[0])
                continue
            if not blocked or first.priority < blocked[-1].priority:
                reserved = None
            blocked.append(first)

    def _reserve(self, blocked: Sequence[QueuedRequest], priority: int) -> frozenset[bytes] | None:
        """The nodes that are not for those that come after the blocked ones; None: nothing is."""
        placement = self._placement
        reserved: frozenset[bytes] = frozenset()
        for other in blocked:
            has_prefill_room = placement.has_prefill_room(other.demand)
            if other.priority == priority:
                other.lacks_prefill |= not has_prefill_room
                other.lacks_decode |= has_prefill_room
                return reserved | placement.nodes_to_keep(
                    other.demand, decode=other.lacks_decode, prefill=other.lacks_prefill
                )
            if not has_prefill_room:
                return None
            reserved |= placement.usable_nodes(other.demand)
        return reserved

    def _tend_stranded(self) -> set[Family]:
        """The families that a serving node could take. Ends the wait of others when it has been long enough."""
        now, since, timeout = self._clock(), self._stranded, self._no_node_timeout_seconds
        self._lanes = {key: lane for key, lane in self._lanes.items() if _drop_gone(lane)}
        demands = {family: lane[0][1].demand for (family, _), lane in self._lanes.items()}
        usable = {family for family, demand in demands.items() if self._placement.is_usable(demand)}
        self._stranded = {family: since.get(family, now) for family in demands.keys() - usable}
        ended = {family for family, at in self._stranded.items() if now - at >= timeout}
        if ended:
            long = itertools.takewhile(lambda item: now - item[1][0] >= timeout, self._waiting.items())
            for waiting in [waiting for waiting, _ in long if waiting.demand.family in ended]:
                self.withdraw(waiting, PeerLostError("no decode node serves", reason="NO_NODE"))
        return usable

    def withdraw(self, waiting: QueuedRequest, error: OutriderError) -> None:
        """Ends the wait of a request that is in the queue; others do not notice."""
        if waiting.place is not None and not waiting.place.done():
            self._leave_lane(waiting)
            waiting.place.set_exception(error)

    def observe_service(self, seconds: float) -> None:
        """How long a request took once admitted: what RetryInfo is estimated from."""
        self._mean_service_seconds += 0.1 * (seconds - self._mean_service_seconds)

    def _note_place(self, waiting: QueuedRequest) -> None:
        waiting.was_placed = True
        self._order.serve(waiting.turn[1])

    def _refund(self, waiting: QueuedRequest) -> None:
        """It leaves without having had a place."""
        if not waiting.was_placed:
            self._order.refund(waiting.client, waiting.cost)

    def _make_room(self, waiting: QueuedRequest) -> None:
        """In the queue, where those behind it give way if need be, and if it helps. Raises: CapacityError."""
        displaced: dict[QueuedRequest, CapacityError] = {}
        behind: list[QueuedRequest] | None = None  # the last in line last
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
        """Idempotent."""
        _, num_tokens = self._waiting.pop(waiting, (0.0, 0))
        self.num_waiting_tokens -= num_tokens

    def _why_full(self, waiting: QueuedRequest, *, without: Collection[QueuedRequest]) -> CapacityError | None:
        num_tokens = self.num_waiting_tokens - sum(other.num_tokens for other in without)
        if self.num_waiting - len(without) + 1 > self._max_waiting:
            message = f"{self.num_waiting} requests are waiting; at most {self._max_waiting} may"
        elif num_tokens + waiting.num_tokens > self._max_waiting_tokens:
            message = (
                f"{self.num_waiting_tokens} prompt tokens are waiting, {waiting.num_tokens} more would exceed"
                f" {self._max_waiting_tokens}"
            )
        else:
            return None
        retry_after = min(max(self._mean_service_seconds, 0.1), _MAX_RETRY_SECONDS)
        return CapacityError(message, retry_after_seconds=retry_after, reason="QUEUE_FULL")

    def _join_lane(self, waiting: QueuedRequest) -> None:
        demand = waiting.demand
        num_tokens, num_samples = demand.size
        size = () if demand.is_scored else (num_samples, round(SIZES_IN_DOUBLE * math.log2(max(num_tokens, 1))))
        waiting.lane = self._lanes.setdefault((demand.family, size), [])
        heapq.heappush(waiting.lane, (waiting.turn, waiting))

    def _leave_lane(self, waiting: QueuedRequest) -> None:
        """Idempotent."""
        if waiting.lane is None:
            return
        waiting.lane = None
        self._num_gone += 1
        if self._num_gone > self.num_waiting + 16:  # many left from behind a first that stays
            self._num_gone = 0
            for lane in self._lanes.values():
                lane[:] = [entry for entry in lane if entry[1].lane is lane]
                heapq.heapify(lane)

    def _set_timer(self) -> None:
        """Looks again after a while even if nothing changes: nodes that were full, nodes that never come."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.pump()
        if self.num_waiting:
            self._set_timer()


def _drop_gone(lane: list[_Entry]) -> bool:
    """Removes requests at the front that left, or are leaving. Returns whether any is left."""
    while lane and (lane[0][1].lane is not lane or lane[0][1].is_leaving):
        heapq.heappop(lane)
    return bool(lane)


def _needs_no_less(demand: Demand, other: Demand) -> bool:
    """Whether a node without room for `other` has none for this one."""
    size, least = demand.size, other.size
    is_no_smaller = size.num_tokens >= least.num_tokens and size.num_samples >= least.num_samples
    return is_no_smaller and demand.family == other.family
