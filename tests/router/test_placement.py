"""The queue and the choice of nodes, without a wire."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from outrider.errors import CapacityError, PeerLostError
from outrider.node import NodeLoad, NodeReport, NodeState
from outrider.session import NO_ROOM_RETRY_SECONDS, Rejected, RejectReason
from router.breaker import Breaker
from router.fair_order import FairOrder
from router.node_link import Refusal
from router.placement import PREFIX_CHUNK_TOKENS, Demand, Placement, PrefixMap, prefix_hashes
from router.request_queue import QueuedRequest, RequestQueue
from tests.support.fake_clock import FakeClock

NODES = frozenset({b"large", b"small"})


class FakePlace:
    def __init__(self, places):
        self._places = places

    def release(self):
        self._places.num_free += 1


class FakePlaces:
    """So many places; `has_nodes` may be taken away."""

    def __init__(self, num_free=0):
        self.num_free = num_free
        self.has_nodes = self.has_prefill = True
        self.full = frozenset()
        self.most_scored_tokens = 0

    @property
    def num_decode_nodes(self):
        return len(NODES) * self.has_nodes

    def usable_nodes(self, demand):
        return NODES - demand.excluded if self.has_nodes else frozenset()

    def has_prefill_room(self, demand):
        return self.has_prefill

    def is_behind_scored(self, demand):
        return demand.num_scored_tokens > self.most_scored_tokens

    def place(self, demand, *, reserved=frozenset()):
        if not self.num_free or not self.has_prefill or not self.usable_nodes(demand) - reserved - self.full:
            return None
        self.num_free -= 1
        return FakePlace(self)


def waiting(num_tokens=4, priority=0, client="", excluded=frozenset()):
    return QueuedRequest(Demand((1,) * num_tokens, excluded), priority=priority, client=client)


def make_queue(places, **limits):
    values = {"max_waiting": 4, "max_waiting_tokens": 100, "no_node_timeout_seconds": 60.0}
    return RequestQueue(places, **values | limits)


async def queue_up(queue, *entries):
    tasks = [asyncio.ensure_future(queue.wait_for_place(entry)) for entry in entries]
    await asyncio.sleep(0)
    return tasks


async def pump(queue):
    queue.pump()
    await asyncio.sleep(0)


async def give_room(queue, places, num_free=1):
    places.num_free = num_free
    await pump(queue)


async def leave(queue, *tasks):
    """They cancel; nothing waits any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert queue.num_waiting == queue.num_waiting_tokens == 0


async def test_a_request_that_was_sent_back_keeps_its_turn_and_is_not_refused():
    places = FakePlaces(1)
    queue = make_queue(places, max_waiting=2)
    first = waiting()
    await queue.wait_for_place(first)
    others = await queue_up(queue, waiting(), waiting())
    first.was_accepted = True
    (again,) = await queue_up(queue, first)
    await give_room(queue, places)
    assert [task.done() for task in (again, *others)] == [True, False, False]
    places.num_free = 2
    queue.pump()
    await asyncio.gather(*others)
    assert queue.num_waiting == queue.num_waiting_tokens == 0


async def test_the_queue_says_how_much_waits_and_how_long_the_oldest_has():
    clock, places = FakeClock(100.0), FakePlaces()
    queue = make_queue(places, clock=clock)
    assert (queue.num_waiting_tokens, queue.oldest_wait_seconds()) == (0, 0.0)
    (first,) = await queue_up(queue, waiting(5))
    clock.advance(2.0)
    (urgent,) = await queue_up(queue, waiting(7, priority=9))
    clock.advance(1.0)
    assert (queue.num_waiting_tokens, queue.oldest_wait_seconds()) == (12, 3.0)
    await give_room(queue, places)
    assert (first.done(), urgent.done()) == (False, True)
    assert (queue.num_waiting_tokens, queue.oldest_wait_seconds()) == (5, 3.0)
    (other,) = await queue_up(queue, waiting(7))
    clock.advance(0.5)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert queue.oldest_wait_seconds() == 0.5
    await leave(queue, other)
    assert queue.oldest_wait_seconds() == 0.0


async def test_prompts_that_are_scored_wait_for_each_other_and_not_others_for_them():
    places = FakePlaces()
    queue = make_queue(places)
    long, short = (QueuedRequest(Demand((1,) * num, is_scored=True), priority=0) for num in (9, 2))
    tasks = await queue_up(queue, long, short, waiting())
    places.most_scored_tokens = 2
    await give_room(queue, places, 3)
    assert [task.done() for task in tasks] == [False, False, True]  # a short one does not pass a long one
    places.most_scored_tokens = 9
    await pump(queue)
    await asyncio.gather(*tasks)


async def test_a_place_given_to_someone_who_has_just_left_is_given_back():
    places = FakePlaces()
    queue = make_queue(places)
    (task,) = await queue_up(queue, waiting())
    places.num_free = 1
    queue.pump()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert places.num_free == 1
    assert queue.num_waiting == 0


async def test_those_who_leave_from_the_middle_do_not_pile_up():
    places = FakePlaces()
    queue = make_queue(places, max_waiting=4)
    (first,) = await queue_up(queue, waiting())
    for _ in range(200):
        (task,) = await queue_up(queue, waiting())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(queue._heap) < 40
    first.cancel()


async def test_limits_count_requests_and_tokens():
    queue = make_queue(FakePlaces(), max_waiting=2, max_waiting_tokens=10)
    tasks = await queue_up(queue, waiting(4))
    with pytest.raises(CapacityError):
        await queue.wait_for_place(waiting(7))
    tasks += await queue_up(queue, waiting(6))
    with pytest.raises(CapacityError):
        await queue.wait_for_place(waiting(0))
    await leave(queue, *tasks)


async def test_clients_take_turns_however_much_each_asks_for():
    places = FakePlaces()
    queue = make_queue(places, max_waiting=100, max_waiting_tokens=1000)
    order = []

    async def one(client):
        await queue.wait_for_place(waiting(client=client))
        order.append(client)

    tasks = [asyncio.ensure_future(one(client)) for client in ["flood"] * 20 + ["b", "c", "b"]]
    await asyncio.sleep(0)
    for _ in range(8):
        await give_room(queue, places)
    assert order == ["flood", "b", "c", "flood", "b", "flood", "flood", "flood"]
    places.num_free = 100
    queue.pump()
    await asyncio.gather(*tasks)


async def test_a_client_that_was_idle_saves_nothing_up():
    order = FairOrder()
    for _ in range(5):
        order.serve(order.stamp("busy", 1.0))
    stamps = [order.stamp("busy", 1.0), order.stamp("idle", 1.0), order.stamp("idle", 1.0), order.stamp("busy", 1.0)]
    assert stamps == [5.0, 4.0, 5.0, 6.0]


def test_clients_that_are_seen_once_are_not_remembered_for_ever():
    order = FairOrder(max_clients=100)
    order.stamp("busy", 5.0)
    for number in range(1000):  # one after the other, each from the present on
        order.serve(order.stamp(f"client {number}", 1.0))
        assert len(order._ends) <= 100
    assert order.stamp("busy", 1.0) == 5.0, "who has had most is remembered"


async def test_in_a_full_queue_the_busiest_clients_last_request_gives_way():
    queue = make_queue(FakePlaces(), max_waiting=4)
    flood = await queue_up(queue, *(waiting(client="flood") for _ in range(4)))
    with pytest.raises(CapacityError):
        await queue.wait_for_place(waiting(client="flood"))
    others = await queue_up(queue, waiting(client="b"), waiting(client="c"))
    (again,) = await queue_up(queue, waiting(client="b"))
    assert queue.num_waiting == 4
    with pytest.raises(CapacityError):
        await again
    for task in flood[2:]:
        with pytest.raises(CapacityError) as displaced:
            await task
        assert displaced.value.retry_after_seconds > 0
    assert [task.done() for task in (*flood[:2], *others)] == [False] * 4
    await leave(queue, *flood[:2], *others)


async def test_nobody_gives_way_to_a_request_that_does_not_fit_all_the_same():
    queue = make_queue(FakePlaces(), max_waiting=100, max_waiting_tokens=100)
    others = await queue_up(queue, *(waiting(20, client="a") for _ in range(5)))
    with pytest.raises(CapacityError):
        await queue.wait_for_place(waiting(90, client="b"))
    await asyncio.sleep(0)
    assert not any(task.done() for task in others)
    (fits,) = await queue_up(queue, waiting(50, client="b"))
    await asyncio.sleep(0)
    assert [task.done() for task in (*others, fits)] == [False, False, True, True, True, False]
    await leave(queue, *others, fits)


async def test_a_client_does_not_pay_for_requests_that_gave_way():
    places = FakePlaces()
    queue = make_queue(places, max_waiting=4)
    served = []

    async def serve(entry):
        place = await queue.wait_for_place(entry)
        served.append(entry.client)
        return place

    for _ in range(20):  # over and over it fills the queue, and another client asks for a part of it
        flood = await queue_up(queue, *(waiting(client="flood") for _ in range(4)))
        others = await queue_up(queue, waiting(client="b"), waiting(client="b"))
        await asyncio.sleep(0)
        assert [task.done() for task in flood] == [False, False, True, True]
        await leave(queue, *flood, *others)
    tasks = [asyncio.ensure_future(serve(waiting(client=client))) for client in ("flood", "flood", "b", "b")]
    await asyncio.sleep(0)
    for _ in tasks:
        await give_room(queue, places)
    await asyncio.gather(*tasks)
    assert served == ["flood", "b", "flood", "b"]


async def test_what_has_begun_is_displaced_by_nobody():
    places = FakePlaces(3)
    queue = make_queue(places, max_waiting=3)
    begun = [waiting(client="flood") for _ in range(3)]
    for entry in begun:
        await queue.wait_for_place(entry)
        entry.was_accepted = True
    tasks = await queue_up(queue, *begun)  # their node was lost
    with pytest.raises(CapacityError):
        await queue.wait_for_place(waiting(client="b"))
    assert not any(task.done() for task in tasks)
    await leave(queue, *tasks)


def test_a_node_without_room_is_asked_again_when_a_report_shows_what_was_missing():
    rejected = Rejected(
        sequence_group_id=b"",
        reason=RejectReason.NO_ROOM,
        message="",
        kv_blocks_needed=10,
        num_sequences_needed=2,
        wait_seconds=0.5,
    )
    refusal = Refusal(rejected, 100.0)
    room = NodeLoad(kv_blocks_free=10, num_sequences_free=2)
    assert refusal.is_over(room, 100.5)
    assert not refusal.is_over(room, 100.4), "another router goes first"
    assert not refusal.is_over(NodeLoad(kv_blocks_free=9, num_sequences_free=2), 101.0)
    assert not refusal.is_over(NodeLoad(kv_blocks_free=10, num_sequences_free=1), 101.0)
    assert refusal.is_over(NodeLoad(), 100.0 + NO_ROOM_RETRY_SECONDS)


class Node:
    """A decode node that serves, as placement sees it."""

    numerics, report, session = "", NodeReport(state=NodeState.SERVING, incarnation=b""), None
    num_placed = chosen_at = 0
    no_room = None

    def __init__(self, name, *, is_late=False, has_failed=False):
        self.name, self.incarnation, self.is_late = name, name.encode(), is_late
        self.breaker = Breaker()
        if has_failed:
            self.breaker.fail()

    def has_room(self, now):
        return True


def test_a_node_that_is_on_time_is_found_though_it_failed_lately_and_a_late_one_did_not():
    nodes = SimpleNamespace(decode_nodes=[Node("late", is_late=True), Node("sick", has_failed=True)], prefill_nodes=[])
    placement = Placement(nodes, prefill_outstanding_tokens=1)
    assert placement.place(Demand((1,)), must_be_timely=True).decode.name == "sick"
    assert placement.place(Demand((1,))).decode.name == "late"


def test_prefixes_are_known_by_whole_chunks_and_by_node():
    prefixes = PrefixMap(max_chunks=8)
    tokens = list(range(3 * PREFIX_CHUNK_TOKENS + 1))
    hashes = prefix_hashes(tokens)
    assert len(hashes) == 3
    assert len(prefix_hashes(tokens[:-1])) == 2, "the last token is always computed"
    prefixes.remember(hashes[:2], b"a")
    assert prefixes.num_held_tokens(hashes, b"a") == 2 * PREFIX_CHUNK_TOKENS
    assert prefixes.num_held_tokens(hashes, b"b") == 0
    other = prefix_hashes([9, *tokens[1:]])
    assert prefixes.num_held_tokens(other, b"a") == 0
    for start in range(1000, 1020):
        prefixes.remember(prefix_hashes(list(range(start, start + PREFIX_CHUNK_TOKENS + 1))), b"a")
    assert len(prefixes._nodes) == 8
    assert prefixes.num_held_tokens(hashes, b"a") == 0, "the least recently used is forgotten"


async def test_an_earlier_outage_does_not_count_in_a_later_one():
    places = FakePlaces()
    now = [0.0]
    queue = make_queue(places, no_node_timeout_seconds=5.0, clock=lambda: now[0])
    (task,) = await queue_up(queue, waiting())
    places.has_nodes = False
    queue.pump()
    now[0] = 4.0
    places.has_nodes = True  # full, but there
    queue.pump()
    places.has_nodes = False
    now[0] = 100.0
    queue.pump()
    now[0] = 104.0
    await pump(queue)
    assert not task.done()
    now[0] = 105.0
    queue.pump()
    with pytest.raises(PeerLostError):
        await task


async def test_a_head_that_no_serving_node_can_take_holds_up_nobody():
    places = FakePlaces()
    queue = make_queue(places)
    too_large = waiting(excluded=NODES)
    head, behind = await queue_up(queue, too_large, waiting())
    await give_room(queue, places)
    assert (head.done(), behind.done()) == (False, True)
    too_large.demand = Demand((1,))  # another node has come
    await give_room(queue, places)
    assert head.done()


async def test_a_head_that_waits_for_a_full_node_does_not_hold_up_those_whom_others_can_take():
    places = FakePlaces(10)
    places.full = frozenset({b"large"})
    queue = make_queue(places)
    head, *behind = await queue_up(queue, waiting(excluded=frozenset({b"small"})), waiting(), waiting())
    await asyncio.sleep(0)
    assert [task.done() for task in (head, *behind)] == [False, True, True]
    places.full = NODES
    (later,) = await queue_up(queue, waiting())
    places.full = frozenset({b"small"})
    await give_room(queue, places)
    assert (head.done(), later.done()) == (True, False), "what it waits for is not given to others"
    later.cancel()


async def test_nobody_passes_where_prefill_nodes_are_short_of_room():
    places = FakePlaces(10)
    places.has_prefill = False
    places.full = frozenset({b"large"})
    queue = make_queue(places)
    tasks = await queue_up(queue, waiting(excluded=frozenset({b"small"})), waiting())
    await pump(queue)
    assert not any(task.done() for task in tasks)
    await leave(queue, *tasks)
