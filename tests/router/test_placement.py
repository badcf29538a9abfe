"""The queue and the choice of nodes, without a wire."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import CapacityError, PeerLostError
from outrider.node import NodeLoad
from outrider.session import NO_ROOM_RETRY_SECONDS, Rejected, RejectReason
from router.admission import Admission, Waiting
from router.fair_order import FairOrder
from router.placement import PREFIX_CHUNK_TOKENS, Demand, PrefixMap, Refusal, prefix_hashes


class FakePlace:
    def __init__(self, places):
        self._places = places

    def release(self):
        self._places.num_free += 1


class FakePlaces:
    """So many places; `has_nodes` may be taken away."""

    def __init__(self, num_free=0):
        self.num_free = num_free
        self.has_nodes = True

    def could_serve(self, demand):
        return self.has_nodes

    def place(self, demand):
        if not self.num_free or not self.has_nodes:
            return None
        self.num_free -= 1
        return FakePlace(self)


def waiting(num_tokens=4, priority=0, client=""):
    return Waiting(Demand((1,) * num_tokens), priority=priority, client=client)


def make_admission(places, **limits):
    values = {"max_waiting": 4, "max_waiting_tokens": 100, "no_node_timeout_seconds": 60.0}
    return Admission(places, **values | limits)


async def queue_up(admission, *entries):
    tasks = [asyncio.ensure_future(admission.wait_for_place(entry)) for entry in entries]
    await asyncio.sleep(0)
    return tasks


async def test_a_request_that_was_sent_back_keeps_its_turn_and_is_not_refused():
    places = FakePlaces(1)
    admission = make_admission(places, max_waiting=2)
    first = waiting()
    await admission.wait_for_place(first)
    others = await queue_up(admission, waiting(), waiting())
    first.has_waited = True
    (again,) = await queue_up(admission, first)
    places.num_free = 1
    admission.pump()
    await asyncio.sleep(0)
    assert [task.done() for task in (again, *others)] == [True, False, False]
    places.num_free = 2
    admission.pump()
    await asyncio.gather(*others)
    assert admission.num_waiting == admission.num_waiting_tokens == 0


async def test_a_place_given_to_someone_who_has_just_left_is_given_back():
    places = FakePlaces()
    admission = make_admission(places)
    (task,) = await queue_up(admission, waiting())
    places.num_free = 1
    admission.pump()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert places.num_free == 1
    assert admission.num_waiting == 0


async def test_those_who_leave_from_the_middle_do_not_pile_up():
    places = FakePlaces()
    admission = make_admission(places, max_waiting=4)
    (first,) = await queue_up(admission, waiting())
    for _ in range(200):
        (task,) = await queue_up(admission, waiting())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(admission._heap) < 40
    first.cancel()


async def test_limits_count_requests_and_tokens():
    admission = make_admission(FakePlaces(), max_waiting=2, max_waiting_tokens=10)
    tasks = await queue_up(admission, waiting(4))
    with pytest.raises(CapacityError):
        await admission.wait_for_place(waiting(7))
    tasks += await queue_up(admission, waiting(6))
    with pytest.raises(CapacityError):
        await admission.wait_for_place(waiting(0))
    for task in tasks:
        task.cancel()


async def test_clients_take_turns_however_much_each_asks_for():
    places = FakePlaces()
    admission = make_admission(places, max_waiting=100, max_waiting_tokens=1000)
    order = []

    async def one(client):
        await admission.wait_for_place(waiting(client=client))
        order.append(client)

    tasks = [asyncio.ensure_future(one(client)) for client in ["flood"] * 20 + ["b", "c", "b"]]
    await asyncio.sleep(0)
    for _ in range(8):
        places.num_free = 1
        admission.pump()
        await asyncio.sleep(0)
    assert order == ["flood", "b", "c", "flood", "b", "flood", "flood", "flood"]
    places.num_free = 100
    admission.pump()
    await asyncio.gather(*tasks)


async def test_of_one_client_priority_and_arrival_count_as_ever():
    places = FakePlaces()
    admission = make_admission(places, max_waiting=100)
    entries = [waiting(9), waiting(1), waiting(1, priority=-1), waiting(9, priority=1)]
    order = []

    async def one(index, entry):
        await admission.wait_for_place(entry)
        order.append(index)

    tasks = [asyncio.ensure_future(one(index, entry)) for index, entry in enumerate(entries)]
    await asyncio.sleep(0)
    for _ in entries:
        places.num_free = 1
        admission.pump()
        await asyncio.sleep(0)
    assert order == [3, 0, 1, 2]
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
        assert len(order) <= 100
    assert order.stamp("busy", 1.0) == 5.0, "who has had most is remembered"


async def test_in_a_full_queue_the_busiest_clients_last_request_gives_way():
    admission = make_admission(FakePlaces(), max_waiting=4)
    flood = await queue_up(admission, *(waiting(client="flood") for _ in range(4)))
    with pytest.raises(CapacityError):
        await admission.wait_for_place(waiting(client="flood"))
    others = await queue_up(admission, waiting(client="b"), waiting(client="c"))
    (again,) = await queue_up(admission, waiting(client="b"))
    assert admission.num_waiting == 4
    with pytest.raises(CapacityError):
        await again
    for task in flood[2:]:
        with pytest.raises(CapacityError) as displaced:
            await task
        assert displaced.value.retry_after_seconds > 0
    assert [task.done() for task in (*flood[:2], *others)] == [False] * 4
    for task in (*flood[:2], *others):
        task.cancel()
    await asyncio.gather(*flood, *others, return_exceptions=True)
    assert admission.num_waiting == admission.num_waiting_tokens == 0


async def test_nobody_gives_way_to_a_request_that_does_not_fit_all_the_same():
    admission = make_admission(FakePlaces(), max_waiting=100, max_waiting_tokens=100)
    others = await queue_up(admission, *(waiting(20, client="a") for _ in range(5)))
    with pytest.raises(CapacityError):
        await admission.wait_for_place(waiting(90, client="b"))
    await asyncio.sleep(0)
    assert not any(task.done() for task in others)
    (fits,) = await queue_up(admission, waiting(50, client="b"))
    await asyncio.sleep(0)
    assert [task.done() for task in (*others, fits)] == [False, False, True, True, True, False]
    for task in (*others, fits):
        task.cancel()
    await asyncio.gather(*others, fits, return_exceptions=True)
    assert admission.num_waiting == admission.num_waiting_tokens == 0


async def test_a_client_does_not_pay_for_requests_that_gave_way():
    places = FakePlaces()
    admission = make_admission(places, max_waiting=4)
    served = []

    async def serve(entry):
        place = await admission.wait_for_place(entry)
        served.append(entry.client)
        return place

    for _ in range(20):  # over and over it fills the queue, and another client asks for a part of it
        flood = await queue_up(admission, *(waiting(client="flood") for _ in range(4)))
        others = await queue_up(admission, waiting(client="b"), waiting(client="b"))
        await asyncio.sleep(0)
        assert [task.done() for task in flood] == [False, False, True, True]
        for task in (*flood, *others):
            task.cancel()
        await asyncio.gather(*flood, *others, return_exceptions=True)
    tasks = [asyncio.ensure_future(serve(waiting(client=client))) for client in ("flood", "flood", "b", "b")]
    await asyncio.sleep(0)
    for _ in tasks:
        places.num_free = 1
        admission.pump()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert served == ["flood", "b", "flood", "b"]


async def test_what_has_begun_is_displaced_by_nobody():
    places = FakePlaces(3)
    admission = make_admission(places, max_waiting=3)
    begun = [waiting(client="flood") for _ in range(3)]
    for entry in begun:
        await admission.wait_for_place(entry)
        entry.has_waited = True
    tasks = await queue_up(admission, *begun)  # their node was lost
    with pytest.raises(CapacityError):
        await admission.wait_for_place(waiting(client="b"))
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()


async def test_without_nodes_everyone_who_waits_is_told():
    places = FakePlaces()
    places.has_nodes = False
    now = [0.0]
    admission = make_admission(places, no_node_timeout_seconds=5.0)
    admission._clock = lambda: now[0]
    tasks = await queue_up(admission, waiting(), waiting())
    admission.pump()
    now[0] = 4.9
    admission.pump()
    assert not any(task.done() for task in tasks)
    now[0] = 5.1
    admission.pump()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, PeerLostError) for result in results)


def test_a_node_without_room_is_asked_again_when_a_report_shows_what_was_missing():
    rejected = Rejected(
        sequence_group_id=b"",
        reason=RejectReason.NO_ROOM,
        message="",
        kv_blocks_needed=10,
        num_sequences_needed=2,
        wait_seconds=0.5,
    )
    refusal = Refusal.of(rejected, now=100.0)
    room = NodeLoad(kv_blocks_free=10, num_sequences_free=2)
    assert refusal.is_over(room, 100.5)
    assert not refusal.is_over(room, 100.4), "another router goes first"
    assert not refusal.is_over(NodeLoad(kv_blocks_free=9, num_sequences_free=2), 101.0)
    assert not refusal.is_over(NodeLoad(kv_blocks_free=10, num_sequences_free=1), 101.0)
    assert refusal.is_over(NodeLoad(), 100.0 + NO_ROOM_RETRY_SECONDS)


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
    admission = make_admission(places, no_node_timeout_seconds=5.0)
    admission._clock = lambda: now[0]
    (task,) = await queue_up(admission, waiting())
    places.has_nodes = False
    admission.pump()
    now[0] = 4.0
    places.has_nodes = True  # full, but there
    admission.pump()
    places.has_nodes = False
    now[0] = 100.0
    admission.pump()
    now[0] = 104.0
    admission.pump()
    await asyncio.sleep(0)
    assert not task.done()
    now[0] = 105.0
    admission.pump()
    with pytest.raises(PeerLostError):
        await task


async def test_a_head_that_no_serving_node_can_take_holds_up_nobody():
    places = FakePlaces()
    too_large, small = waiting(), waiting()
    places.could_serve = lambda demand: demand is not too_large.demand
    admission = make_admission(places)
    head, behind = await queue_up(admission, too_large, small)
    places.num_free = 1
    admission.pump()
    await asyncio.sleep(0)
    assert (head.done(), behind.done()) == (False, True)
    places.could_serve = lambda _demand: True  # another node has come
    places.num_free = 1
    admission.pump()
    await asyncio.sleep(0)
    assert head.done()
