"""Eight honest streams of real processes, while routers and senders of KV flood, lie, stall and never read."""

from __future__ import annotations

import concurrent.futures

import pytest

from tests.support.hostile_peers import KINDS

NUM_STREAMS = 8
PROMPT = [20 + (i * 7) % 200 for i in range(40)]


def honest_streams(running, *, max_tokens=150):
    """Returns (token ids, attempts) of each stream."""
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(
            pool.map(
                lambda seed: running.generate(PROMPT, max_tokens=max_tokens, seed=seed, ignore_eos=True),
                range(NUM_STREAMS),
            )
        )
    return [tokens for tokens, _ in answers], [summary.metrics.attempts for _, summary in answers]


@pytest.fixture(scope="module")
def undisturbed(running):
    return honest_streams(running)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_honest_streams_do_not_notice(running, undisturbed, kind):
    peers = KINDS[kind](running.cluster.node("decode-0").address)
    try:
        tokens, attempts = honest_streams(running)
    finally:
        peers.stop()
    assert tokens == undisturbed
    assert attempts == [1] * NUM_STREAMS
    assert peers.num_hostile_acts > 0
    running.wait_until_nothing_is_held()
