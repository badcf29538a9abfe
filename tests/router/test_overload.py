"""Three times the load that the nodes can take: they stay busy, and whoever is refused is told at once."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from outrider.answer import Delta, Started
from outrider.request import OutputOptions, Request, SamplingParams, StopConditions
from outrider.session import SampleTokens
from router.answer import BEHIND_SECONDS, make_answer

CAPACITY = 8
"""Sequences that the decode node runs at a time."""
NUM_TOKENS = 40
NUM_REQUESTS = 48


class Load:
    """Clients that ask again as soon as they have their answer, or as RetryInfo tells them."""

    def __init__(self, cluster):
        self._cluster = cluster
        self._left = NUM_REQUESTS
        self.num_refused = 0

    async def run(self, num_clients):
        """Tokens in each step of the node, from the first step to the last."""
        node = self._cluster.decode
        first_step = node.step
        async with asyncio.timeout(60):
            await asyncio.gather(*(self._ask(f"client {number}") for number in range(num_clients)))
        return NUM_REQUESTS * NUM_TOKENS / (node.step - first_step)

    async def _ask(self, client):
        while self._left:
            self._left -= 1
            while not await self._is_answered(client):
                await asyncio.sleep(0.02)

    async def _is_answered(self, client):
        sampling = self._cluster.sampling(max_tokens=NUM_TOKENS)
        try:
            await self._cluster.stub.Complete(
                self._cluster.request(sampling=sampling), metadata=(("client_id", client),), timeout=50
            )
        except grpc.aio.AioRpcError as error:
            failure = self._cluster.failure_of(error)
            assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert failure.retry_seconds > 0
            self.num_refused += 1
            return False
        return True


@pytest.fixture
async def busy(cluster):
    cluster.decode.max_running = CAPACITY
    cluster.decode.step_seconds = 0.005
    return await cluster.serve(max_waiting=CAPACITY, prefill_outstanding_tokens=1 << 20)


async def test_at_three_times_the_load_the_nodes_do_nine_tenths_of_their_best(busy):
    best = await Load(busy).run(CAPACITY)
    over = Load(busy)
    assert await over.run(3 * CAPACITY) >= 0.9 * best
    assert over.num_refused
    await busy.is_empty()


async def test_requests_whose_deadline_passes_in_the_queue_cost_the_nodes_nothing(busy):
    sampling = busy.sampling(max_tokens=400)
    running = [busy.stub.Generate(busy.request(sampling=sampling)) for _ in range(CAPACITY)]
    for call in running:
        await call.read()
    late = [busy.stub.Complete(busy.request(request_id=f"late{n}", sampling=sampling), timeout=0.1) for n in range(4)]
    for error in await asyncio.gather(*late, return_exceptions=True):
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await busy.eventually(lambda: busy.services.admission.num_waiting == 0)
    for call in running:
        call.cancel()
    await busy.is_empty()
    assert len(busy.prefill.requests) == CAPACITY


class Reading:
    """One reader of an answer to which a test adds tokens."""

    def __init__(self):
        request = Request(
            request_id="r",
            prompt_token_ids=(1,),
            prompt_text="",
            sampling=SamplingParams(seed=0, max_tokens=100),
            stop=StopConditions(),
            output=OutputOptions(token_ids_only=True),
        )
        self.answer = make_answer(request, tokenizer=None, stop_token_ids=())
        self.answer.begin(Started(request_id="r", num_prompt_tokens=1, seed=0, model="m", router="r"))
        self.batches = self.answer.read().batches()

    def add(self, position):
        tokens = SampleTokens(sequence_group_id=b"", sample=0, start_position=position, token_ids=(position,))
        self.answer.take(tokens)

    async def next(self):
        """Token ids of the next delta."""
        async with asyncio.timeout(10):
            async for events in self.batches:
                found = [event.token_ids for event in events if isinstance(event, Delta)]
                if found:
                    return found[0]
        raise AssertionError("the answer has ended")


async def test_while_the_event_loop_is_behind_deltas_merge():
    reading = Reading()
    reading.add(1)
    time.sleep(2 * BEHIND_SECONDS)  # noqa: ASYNC251 this is the stall
    assert await reading.next() == (1,), "the first token never waits"
    waiting = asyncio.ensure_future(reading.next())
    await asyncio.sleep(0)
    reading.add(2)
    time.sleep(2 * BEHIND_SECONDS)  # noqa: ASYNC251
    await asyncio.sleep(0)
    reading.add(3)
    reading.add(4)
    assert await waiting == (2, 3, 4)


async def test_on_time_each_token_goes_out_by_itself():
    reading = Reading()
    for position in range(1, 5):
        reading.add(position)
        assert await reading.next() == (position,)
