"""The queue with a fake placement."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import CapacityError, NotFoundError, PeerLostError
from outrider.request import Adapter
from router.scheduling.placement import Demand
from router.scheduling.request_queue import FairOrder, QueuedRequest
from tests.router.fake_places import NODES, FakePlaces, give_room, leave, make_queue, pump, queue_up, waiting
from tests.support.fake_clock import FakeClock


async def test_a_request_that_was_sent_back_keeps_its_turn_and_is_not_refused():
    places = FakePlaces(1)
    queue = make_queue(places, max_waiting=2)
    first = waiting()
    await queue.wait_for_place(first)
    others = await queue_up(queue, waiting(), waiting())
    first.bypasses_limits = True
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
    places.max_scored_tokens = 2
    await give_room(queue, places, 3)
    assert [task.done() for task in tasks] == [False, False, True]  # a short scored prompt does not overtake a long one
    places.max_scored_tokens = 9
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


async def test_someone_who_has_just_left_is_given_no_place():
    """Room appears in the same turn of the event loop in which the task is cancelled, before the task has run."""
    places = FakePlaces()
    queue = make_queue(places)
    left, other, last = await queue_up(queue, waiting(), waiting(), waiting())
    for task in (left, last):
        task.cancel()
    places.num_free = 3
    queue.pump()
    await asyncio.gather(left, other, last, return_exceptions=True)
    assert [task.cancelled() for task in (left, other, last)] == [True, False, True]
    assert places.num_free == 2
    assert queue.num_waiting == queue.num_waiting_tokens == 0


async def test_those_who_leave_from_the_middle_do_not_pile_up():
    places = FakePlaces()
    queue = make_queue(places, max_waiting=4)
    (first,) = await queue_up(queue, waiting())
    for _ in range(200):
        (task,) = await queue_up(queue, waiting())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(next(iter(queue._lanes.values()))) < 40
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
    for number in range(1000):  # one after the other, each at the current virtual time
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

    for _ in range(20):  # one client fills the queue again and again, and another asks for its share
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
        entry.bypasses_limits = True
    tasks = await queue_up(queue, *begun)  # they return to the queue because their node was lost
    with pytest.raises(CapacityError):
        await queue.wait_for_place(waiting(client="b"))
    assert not any(task.done() for task in tasks)
    await leave(queue, *tasks)


async def test_requests_whose_adapter_was_unloaded_leave_at_once_and_get_their_share_back():
    places = FakePlaces()
    places.has_nodes = False
    queue = make_queue(places, max_waiting=9)
    sql, law = Adapter("sql", "a1"), Adapter("law", "b2")
    entries = [
        QueuedRequest(Demand((1,) * num_tokens, adapter=adapter), priority=0, client="a")
        for adapter in (sql, law, None)
        for num_tokens in (4, 20)
    ]
    tasks = await queue_up(queue, *entries)
    places.unloaded = frozenset({sql})
    await pump(queue)
    for task in tasks[:2]:
        with pytest.raises(NotFoundError, match=r"the adapter 'sql' \(a1\) was unloaded"):
            await task
    late = QueuedRequest(Demand((1,), adapter=sql), priority=0, client="b")
    with pytest.raises(NotFoundError):
        await queue.wait_for_place(late)
    assert not any(task.done() for task in tasks[2:])
    assert (queue.num_waiting, queue.num_waiting_tokens) == (4, 48)
    assert queue._order._ends == {"a": pytest.approx(sum(entry.cost for entry in entries[2:])), "b": 0.0}
    await leave(queue, *tasks[2:])


async def test_an_earlier_outage_does_not_count_in_a_later_one():
    places = FakePlaces()
    now = [0.0]
    queue = make_queue(places, no_node_timeout_seconds=5.0, clock=lambda: now[0])
    (task,) = await queue_up(queue, waiting())
    places.has_nodes = False
    queue.pump()
    now[0] = 4.0
    places.has_nodes = True  # full, but serving
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
    queue.change_demand(too_large, Demand((1,)))  # another node serves now
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


async def test_only_equals_pass_a_head_that_waits_for_room():
    places = FakePlaces(10)
    places.full = frozenset({b"large"})
    queue = make_queue(places)
    entries = [waiting(9, 1, excluded=frozenset({b"small"})), waiting(8, 0), waiting(2, 1)]
    places.num_free = 0
    head, lower, equal = await queue_up(queue, *entries)
    await give_room(queue, places, 10)
    assert [task.done() for task in (head, lower, equal)] == [False, True, True], "nobody above waits for the small one"
    places.full = NODES
    entries = [waiting(9, 1), waiting(8, 0), waiting(2, 1)]
    later = await queue_up(queue, *entries)
    places.full = frozenset({b"large"})
    await give_room(queue, places, 1)
    assert [task.done() for task in later] == [True, False, False]
    await leave(queue, head, *later[1:])


async def test_the_cost_of_requests_that_no_node_can_take_grows_with_their_number_only():
    """Requests whose nodes were lost return to the queue, wait there, and end together."""
    places, clock = FakePlaces(), FakeClock(100.0)
    queue = make_queue(places, no_node_timeout_seconds=5.0, clock=clock)
    places.has_nodes = False
    entries = [waiting(num_tokens=number) for number in range(1, 401)]
    for entry in entries:
        entry.bypasses_limits = True
    tasks = await queue_up(queue, *entries)
    assert len(queue._lanes) < 80
    assert places.num_questions <= len(entries), "one for each that comes"
    queue.pump()
    assert places.num_questions <= len(entries) + 1, "they are one family"
    clock.advance(4.9)
    await pump(queue)
    assert not any(task.done() for task in tasks)
    late = waiting()
    late.bypasses_limits = True
    (last,) = await queue_up(queue, late)
    clock.advance(0.2)
    await pump(queue)
    assert [type(task.exception()) for task in tasks] == [PeerLostError] * len(tasks)
    assert not last.done(), "it has not waited for long"
    await leave(queue, last)


@pytest.mark.parametrize("client", ["alice", "bob"])
async def test_in_a_full_queue_the_last_of_the_lowest_priority_gives_way(client):
    queue = make_queue(FakePlaces(), max_waiting=3)
    low, *high = await queue_up(
        queue, waiting(priority=-5, client="alice"), *(waiting(priority=10, client="alice") for _ in range(2))
    )
    with pytest.raises(CapacityError):
        await queue.wait_for_place(waiting(priority=-6, client=client))
    (middle,) = await queue_up(queue, waiting(priority=0, client=client))
    await asyncio.sleep(0)
    assert isinstance(low.exception(), CapacityError)
    with pytest.raises(CapacityError):
        await queue.wait_for_place(waiting(priority=0, client=client))
    with pytest.raises(CapacityError):
        await queue.wait_for_place(waiting(priority=9, client=client, num_tokens=101))
    (higher,) = await queue_up(queue, waiting(priority=9, client=client))
    await asyncio.sleep(0)
    assert isinstance(middle.exception(), CapacityError)
    assert not any(task.done() for task in (*high, higher))
    await leave(queue, *high, higher)


async def test_what_can_pass_a_full_queue_is_not_refused():
    places = FakePlaces(1)
    places.full = frozenset({b"large"})
    queue = make_queue(places, max_waiting=1)
    (head,) = await queue_up(queue, waiting(9, excluded=frozenset({b"small"})))
    await queue.wait_for_place(waiting())
    with pytest.raises(CapacityError):
        await queue.wait_for_place(waiting())
    await leave(queue, head)


async def test_nobody_passes_where_prefill_nodes_are_short_of_room():
    places = FakePlaces(10)
    places.has_prefill = False
    places.full = frozenset({b"large"})
    queue = make_queue(places)
    tasks = await queue_up(queue, waiting(excluded=frozenset({b"small"})), waiting())
    await pump(queue)
    assert not any(task.done() for task in tasks)
    await leave(queue, *tasks)
