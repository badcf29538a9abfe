"""Three times the load that the nodes can take: they stay busy, and whoever is refused is told at once."""

from __future__ import annotations

import asyncio

import grpc
import pytest

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
    busy.decode.step_seconds = 0.1  # what runs outlasts what waits
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
