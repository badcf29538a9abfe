"""The queue of the tokenizer's threads is fair and bounded, and skips requests that were cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from outrider.errors import CapacityError
from router.text.tokenizer import NEW_CLIENT_FACTOR, EncodingQueue

PATIENCE_SECONDS = 30.0


class Desk:
    """A queue with one thread, which waits for `gate`. `done` has the finished work in order."""

    def __init__(self, **limits):
        self.queue = EncodingQueue(1, **limits)
        self.gate = threading.Event()
        self.done = []

    def put(self, client, num_bytes=10):
        def work():
            assert self.gate.wait(PATIENCE_SECONDS)
            self.done.append(client)

        return asyncio.ensure_future(self.queue.run(work, client=client, num_bytes=num_bytes))

    async def put_all(self, *clients):
        tasks = [self.put(client) for client in clients]
        await asyncio.sleep(0)
        return tasks


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.gate.set()
    desk.queue.close()


async def finish(desk, tasks):
    desk.gate.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_client_that_floods_waits_behind_others(desk):
    tasks = await desk.put_all(*["flood"] * 8, "b", "c")
    await finish(desk, tasks)
    assert desk.done[:4] == ["flood", "b", "c", "flood"]


async def test_a_clients_texts_are_bounded_and_others_are_let_in():
    desk = Desk(max_client_bytes=20, max_waiting_bytes=30)
    tasks = await desk.put_all("flood", "flood", "flood", "flood", "b", "b")
    over = [task for task in tasks if task.done()]
    assert over == [tasks[2], tasks[3], tasks[5]]
    for task in over:
        with pytest.raises(CapacityError) as refused:
            await task
        assert (refused.value.reason, refused.value.retry_after_seconds) == ("TOKENIZER_BUSY", 1.0)
    await finish(desk, tasks)
    assert sorted(desk.done) == ["b", "flood", "flood"]
    desk.queue.close()


async def test_clients_with_made_up_names_do_not_fill_the_memory():
    desk = Desk(max_client_bytes=20, max_waiting_bytes=30)
    tasks = await desk.put_all(*(f"client {number}" for number in range(50)))
    refused = [task for task in tasks if task.done()]
    assert len(tasks) - len(refused) == NEW_CLIENT_FACTOR * 30 // 10
    await finish(desk, tasks)
    assert len(desk.done) == len(tasks) - len(refused)
    desk.queue.close()


async def test_nothing_is_done_for_those_who_left(desk):
    first, *others = await desk.put_all("a", "b", "b", "c")
    for task in others[:2]:
        task.cancel()
    await asyncio.wait(others[:2])
    await asyncio.sleep(0)  # the thread pool learns of the cancellation one iteration later
    await finish(desk, [first, *others])
    assert desk.done == ["a", "c"]


async def test_who_leaves_while_its_work_runs_keeps_the_thread_until_that_ends(desk):
    first, second = await desk.put_all("a", "b")
    first.cancel()
    await asyncio.sleep(0)
    assert not second.done()
    await finish(desk, [first, second])
    assert desk.done == ["a", "b"]
    assert not desk.queue._num_bytes


async def test_what_fails_fails_its_caller_only(desk):
    def fail():
        raise KeyError("x")

    desk.gate.set()
    with pytest.raises(KeyError):
        await desk.queue.run(fail, client="", num_bytes=1)
    await finish(desk, await desk.put_all("a"))
    assert desk.done == ["a"]
