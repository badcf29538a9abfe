"""A fake placement for tests of the queue: a number of places on two nodes."""

from __future__ import annotations

import asyncio

from router.scheduling.placement import Demand
from router.scheduling.request_queue import QueuedRequest, RequestQueue

NODES = frozenset({b"large", b"small"})


class FakePlace:
    def __init__(self, places):
        self._places = places

    def release(self):
        self._places.num_free += 1


class FakePlaces:
    """A placement with `num_free` places. `has_nodes` may be set to False."""

    def __init__(self, num_free=0):
        self.num_free = num_free
        self.has_nodes = self.has_prefill = True
        self.full = self.unloaded = frozenset()
        self.max_scored_tokens = 0
        self.num_questions = 0

    def is_usable(self, demand):
        self.num_questions += 1
        return bool(self.usable_nodes(demand))

    def is_unloaded(self, demand):
        return demand.adapter in self.unloaded

    def usable_nodes(self, demand):
        return NODES - demand.excluded if self.has_nodes else frozenset()

    def has_prefill_room(self, demand):
        self.num_questions += 1
        return self.has_prefill

    def nodes_to_reserve(self, demand, *, decode, prefill):
        kept = {min(self.usable_nodes(demand))} if decode else set()
        return frozenset(kept | ({b"prefill"} if prefill else set()))

    def waits_for_scored_prompts(self, demand):
        return demand.num_scored_tokens > self.max_scored_tokens

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
    """Cancels the waiting tasks, and checks that the queue is empty."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert queue.num_waiting == queue.num_waiting_tokens == 0
