"""Eight well-behaved streams do not notice a client that floods the router, lies or never reads."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.threaded_router import ThreadedRouter
from tests.support.hostile_peers import CLIENTS, clients

NUM_STREAMS = 8
NUM_TOKENS = 60
MAX_STALL_SECONDS = 1.0
"""Maximum stall, in seconds, of the event loop that the router shares with its fake nodes, on a busy machine. The
faults that this test looks for took two seconds and more."""


@pytest.fixture(scope="module")
def router():
    router = ThreadedRouter(decode_max_running=4 * NUM_STREAMS)
    router.cluster.decode.step_seconds = 0.002
    yield router
    router.stop()


async def honest_streams(cluster):
    """Returns (each stream's token ids, the set of numbers of attempts). One attempt means that no node seemed lost."""
    answers = await asyncio.gather(*(cluster.generate(seed=n, max_tokens=NUM_TOKENS) for n in range(NUM_STREAMS)))
    return [answer.token_ids() for answer in answers], {answer.summary.metrics.attempts for answer in answers}


@pytest.fixture(scope="module")
def undisturbed(router):
    return router.run(honest_streams(router.cluster))[0]


@pytest.mark.parametrize("kind", CLIENTS)
def test_honest_streams_do_not_notice(router, undisturbed, kind):
    method, make = CLIENTS[kind]
    router.longest_stall_seconds = 0.0
    hostile = clients(router.cluster.address, method, make())
    try:
        disturbed, attempts = router.run(honest_streams(router.cluster))
    finally:
        hostile.stop()
    assert disturbed == undisturbed
    assert attempts == {1}
    assert hostile.num_hostile_acts > 0
    assert router.longest_stall_seconds < MAX_STALL_SECONDS
    router.run(router.cluster.is_empty(seconds=10.0))
