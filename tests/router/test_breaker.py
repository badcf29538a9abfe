"""A node that fails what it is given is not given more, as long as another one serves."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from router.breaker import FIRST_COOLDOWN_SECONDS, FORGET_SECONDS, MAX_COOLDOWN_SECONDS, Breaker
from tests.support.fake_clock import FakeClock


@pytest.fixture
def clock():
    return FakeClock(1000.0)


@pytest.fixture
def breaker(clock):
    return Breaker(clock)


def cooldown_of(breaker, clock):
    """Waits until it is over; how long that took."""
    start = clock()
    while breaker.is_open:
        clock.advance(0.1)
    return clock() - start


def test_the_cooldown_doubles_with_each_failed_trial_up_to_a_limit(breaker, clock):
    cooldowns = []
    for _ in range(9):
        breaker.begin()
        breaker.fail()
        cooldowns.append(cooldown_of(breaker, clock))
    expected = [min(FIRST_COOLDOWN_SECONDS * 2**nth, MAX_COOLDOWN_SECONDS) for nth in range(9)]
    assert cooldowns == pytest.approx(expected, abs=0.2)


def test_failures_of_one_moment_count_once(breaker, clock):
    for _ in range(20):
        breaker.fail()
    assert cooldown_of(breaker, clock) == pytest.approx(FIRST_COOLDOWN_SECONDS, abs=0.2)


def test_after_the_cooldown_one_request_is_a_trial(breaker, clock):
    breaker.fail()
    cooldown_of(breaker, clock)
    breaker.begin()
    assert breaker.is_open, "for all others"
    breaker.succeed()
    assert not breaker.is_open
    breaker.begin()
    assert not breaker.is_open


def test_a_trial_without_a_result_is_followed_by_another(breaker, clock):
    breaker.fail()
    cooldown_of(breaker, clock)
    breaker.begin()
    assert cooldown_of(breaker, clock) == pytest.approx(FIRST_COOLDOWN_SECONDS, abs=0.2)


def test_a_node_that_was_well_for_long_begins_anew(breaker, clock):
    for _ in range(5):
        breaker.begin()
        breaker.fail()
        cooldown_of(breaker, clock)
    breaker.begin()
    breaker.succeed()
    clock.advance(FORGET_SECONDS + 1.0)
    breaker.fail()
    assert cooldown_of(breaker, clock) == pytest.approx(FIRST_COOLDOWN_SECONDS, abs=0.2)


async def test_a_sick_decode_node_draws_no_requests_from_a_healthy_one(node_pair):
    await node_pair.serve()
    sick, healthy = node_pair.decodes
    sick.gives_up_opens = True
    node_pair.pace(0.01)
    prompt = "the same long prompt " * 20
    busy = [asyncio.ensure_future(node_pair.generate(text=prompt, max_tokens=60)) for _ in range(2)]
    await node_pair.eventually(lambda: healthy.groups)
    for _ in range(8):
        answer = await node_pair.generate(text=prompt, max_tokens=2)
        assert len(answer.token_ids()) == 2
    await asyncio.gather(*busy)
    assert len(sick.opened) <= 4, "the first requests and a trial"


async def test_where_no_other_serves_a_sick_node_is_asked_all_the_same(cluster):
    await cluster.serve()
    link = cluster.service.nodes.decode_nodes[0]
    link.breaker.fail()
    cluster.service.nodes.prefill_nodes[0].breaker.fail()
    assert link.breaker.is_open
    assert (await cluster.generate()).token_ids()
    assert not link.breaker.is_open


async def test_a_sick_prefill_node_draws_no_prompts_from_a_healthy_one(node_pair):
    await node_pair.serve()
    sick, healthy = node_pair.prefills
    sick.fails_with = grpc.StatusCode.INTERNAL
    for nth in range(10):
        await node_pair.generate(text=f"{nth} prompt", max_tokens=2)
    assert len(sick.requests) <= 2
    assert len(healthy.requests) >= 10
