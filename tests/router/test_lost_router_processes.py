"""A router process is killed or frozen in the middle of a stream: the Python client goes on at the other one.

tests/faults/test_lost_routers.py has the kill with a common store, on real nodes.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time

import pytest

from outrider.client import AsyncClient
from tests.support.processes import RoleProcess
from tests.support.router_fakes import FakeDecodeNode, FakePrefillNode
from tests.support.store_server import STORE_PATIENCE

SILENCE_SECONDS = 5.0
"""After which a client gives up a router that answers no ping. A connection that is reset tells it at once."""
PATIENCE_SECONDS = 60.0
NUM_TOKENS = 200
OPTIONS = {"seed": 4, "max_tokens": NUM_TOKENS, "stop": ["never said"]}


class Pair:
    """Two router processes before the same fake nodes."""

    def __init__(self):
        self.decode = FakeDecodeNode()
        self.decode.step_seconds = 0.01
        self.prefill = FakePrefillNode()
        self.processes = []
        self.addresses = []

    async def start(self, *settings):
        for node in (self.decode, self.prefill):
            await node.start()
        for _ in range(2):
            process = RoleProcess(
                "router",
                "server.port=0",
                f"router.decode_targets={self.decode.address}",
                f"router.prefill_targets={self.prefill.address}",
                *settings,
            )
            self.processes.append(process)
        self.addresses = [await asyncio.to_thread(process.serving) for process in self.processes]

    async def stop(self):
        for process in self.processes:
            await asyncio.to_thread(process.__exit__)
        for node in (self.decode, self.prefill):
            await node.stop()

    async def run(self, targets, *, strike=None, **options):
        """(what each sample is, the longest pause between two Deltas in seconds)."""
        arrivals = []
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            AsyncClient(targets) as client,
            client.generate("a prompt", **OPTIONS, **options) as stream,
        ):
            async for _ in stream:
                arrivals.append(time.monotonic())
                if len(arrivals) == 20 and strike is not None:
                    strike()
        samples = range(options.get("n", 1))
        answer = [(stream.text(sample), stream.token_ids(sample), stream.finished[sample]) for sample in samples]
        assert stream.summary.usage.num_generated_tokens == len(samples) * NUM_TOKENS
        return answer, max(later - earlier for earlier, later in itertools.pairwise(arrivals))


@pytest.fixture
async def pair():
    pair = Pair()
    yield pair
    await pair.stop()


async def check_goes_on(pair, number, *, most_seconds, **options):
    undisturbed, _ = await pair.run(pair.addresses[1], **options)
    strike = pair.processes[0].process.send_signal
    answer, gap_seconds = await pair.run(pair.addresses, strike=lambda: strike(number), **options)
    print(f"{number.name} {options}: {gap_seconds:.2f} s")
    assert answer == undisturbed
    assert gap_seconds < most_seconds


async def test_a_frozen_router_of_a_store_costs_the_time_to_notice(pair, store_server):
    await pair.start(f"router.store={store_server.url}", STORE_PATIENCE)
    await check_goes_on(pair, signal.SIGSTOP, n=2, most_seconds=PATIENCE_SECONDS)
    # It comes back, learns that it lost the request, and leaves nothing behind.
    pair.processes[0].process.send_signal(signal.SIGCONT)
    await asyncio.to_thread(
        pair.processes[0].wait_for_log, "request failed", lambda line: line["reason"] == "RESUMED_ELSEWHERE"
    )


async def test_without_a_common_store_one_sample_goes_on_as_well(pair):
    await pair.start()
    await check_goes_on(pair, signal.SIGKILL, most_seconds=SILENCE_SECONDS)
