"""A node that fails requests gets no more of them as long as another one serves."""

from __future__ import annotations

import grpc
import pytest

from router.nodes.breaker import FIRST_COOLDOWN_SECONDS, FORGET_SECONDS, MAX_COOLDOWN_SECONDS, Breaker
from tests.support.fake_clock import FakeClock


@pytest.fixture
def clock():
    return FakeClock(1000.0)


@pytest.fixture
def breaker(clock):
    return Breaker(clock)


def cooldown_of(breaker, clock):
    """Waits until the cooldown is over. Returns the seconds that it took."""
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


def test_a_trial_may_come_during_the_cooldown_once(breaker, clock):
    assert breaker.may_be_tried
    breaker.fail()
    assert breaker.is_open
    assert breaker.may_be_tried
    breaker.begin()
    assert not breaker.may_be_tried
    breaker.fail()
    clock.advance(FIRST_COOLDOWN_SECONDS + 0.1)
    assert breaker.is_open, "the trial counts"
    assert not breaker.may_be_tried
    cooldown_of(breaker, clock)
    assert breaker.may_be_tried


@pytest.mark.parametrize("others", [[], [None], ["another request"]])
def test_a_request_that_failed_by_its_own_fault_is_forgiven_and_nothing_else(breaker, clock, others):
    for _ in range(3):
        breaker.fail("a request")
    for other in others:
        breaker.fail(other)
    breaker.forgive("a third one")
    assert breaker.is_open
    breaker.forgive("a request")
    assert breaker.is_open is bool(others)
    breaker.succeed()
    breaker.fail(None)
    assert cooldown_of(breaker, clock) == pytest.approx(FIRST_COOLDOWN_SECONDS * (2 if others else 1), abs=0.2)


def test_several_requests_that_fail_by_their_own_fault_are_forgiven_at_once_and_one_after_the_other(breaker):
    for cause in ("one", "another"):
        breaker.fail(cause)
    breaker.forgive("one")
    assert breaker.is_open
    breaker.forgive("another")
    assert not breaker.is_open
    breaker.fail("a third one")
    breaker.forgive("a third one")
    assert not breaker.is_open
    for number in range(1000):
        breaker.fail(number)
    for number in range(1000):
        breaker.forgive(number)
    assert breaker.is_open, "so many without a success are the node's fault"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_that_fails_wherever_it_goes_opens_no_breaker(node_pair, role):
    await node_pair.serve()
    nodes = node_pair.prefills if role == "prefill" else node_pair.decodes
    links = [node_pair.link_of(node) for node in nodes]
    for node in nodes:
        node.fails_with, node.fails_opens = grpc.StatusCode.INTERNAL, True
    if role == "prefill":  # without a prefill node, the decode node computes the prompt
        assert (await node_pair.generate(max_tokens=2)).token_ids()
    else:
        assert (await node_pair.fail(max_tokens=2)).reason == "REQUEST_LOSES_NODES"
    assert not any(link.breaker.is_open for link in links)
    nodes[0].fails_with, nodes[0].fails_opens = None, False
    assert (await node_pair.generate(max_tokens=2)).token_ids()
    assert not links[0].breaker.is_open
    await node_pair.eventually(lambda: not node_pair.context.placement.num_placed)


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
