"""Clients that begin requests and leave them: they are told to wait, and nobody else is."""

from __future__ import annotations

import pytest

from outrider.errors import CapacityError
from outrider.v1 import router_pb2
from router.departures import CREDITS_PER_SECOND, MAX_CLIENTS, Departures
from tests.router.test_overload_and_abort import EXHAUSTED, start_long


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def leave(departures, client, times=1):
    for _ in range(times):
        departures.begin(client)
        departures.end(client, was_left=True)


def test_a_client_that_only_leaves_may_begin_two_requests_a_second():
    clock = Clock()
    departures = Departures(8, clock=clock)
    leave(departures, "hostile", 8)
    for _ in range(3):
        with pytest.raises(CapacityError) as refused:
            departures.check("hostile")
        assert refused.value.reason == "LEFT_TOO_MANY"
        assert refused.value.retry_after_seconds == pytest.approx(1.0 / CREDITS_PER_SECOND)
        clock.now += 1.0 / CREDITS_PER_SECOND
        departures.check("hostile")
        departures.begin("hostile")
        with pytest.raises(CapacityError):  # one at a time
            departures.check("hostile")
        departures.end("hostile", was_left=True)
    departures.check("other")


def test_a_client_that_reads_as_many_answers_as_it_leaves_is_not_limited():
    departures = Departures(8, clock=Clock())
    for _ in range(100):
        departures.check("gateway")
        for _ in range(50):  # at a time
            departures.begin("gateway")
            departures.check("gateway")
        for number in range(50):
            departures.end("gateway", was_left=number % 2 == 0)


def test_who_has_left_hundreds_at_once_waits_for_one_credit_and_earns_the_others_by_reading():
    clock = Clock()
    departures = Departures(8, clock=clock)
    for _ in range(500):  # a gateway of many clients, which restarts
        departures.begin("gateway")
    for _ in range(500):
        departures.end("gateway", was_left=True)
    with pytest.raises(CapacityError):
        departures.check("gateway")
    clock.now += 1.0 / CREDITS_PER_SECOND
    for num_at_once in (1, 2, 4):
        for _ in range(num_at_once):
            departures.check("gateway")
            departures.begin("gateway")
        for _ in range(num_at_once):
            departures.end("gateway", was_left=False)
    for _ in range(100):
        departures.check("gateway")
        departures.begin("gateway")


def test_zero_limits_nobody():
    departures = Departures(0, clock=Clock())
    leave(departures, "anybody", 100)
    departures.check("anybody")


def test_names_that_clients_make_up_take_bounded_memory():
    departures = Departures(8, clock=Clock())
    leave(departures, "hostile", 20)
    departures.begin("running")
    for number in range(MAX_CLIENTS):
        leave(departures, f"name {number}")
    assert len(departures) <= MAX_CLIENTS
    with pytest.raises(CapacityError):  # who owes is remembered
        departures.check("hostile")
    departures.end("running", was_left=False)


@pytest.mark.parametrize("how", ["cancels", "aborts"])
async def test_who_leaves_again_and_again_is_told_to_wait(cluster, monkeypatch, how):
    monkeypatch.setattr("router.departures.CREDITS_PER_SECOND", 1e-3)  # whatever time it takes
    await cluster.serve(max_left_requests=4)
    cluster.decode.step_seconds = 0.01
    for number in range(4):
        call = await start_long(cluster, f"r{number}")
        if how == "cancels":
            call.cancel()
        else:
            await cluster.stub.Abort(router_pb2.AbortRequest(request_id=f"r{number}"))
        await cluster.is_empty()
    failure = await cluster.fail(sampling=cluster.sampling())
    assert (failure.code, failure.reason) == (EXHAUSTED, "LEFT_TOO_MANY")
    assert failure.retry_seconds > 0
    named = cluster.stub.Complete(
        cluster.request(sampling=cluster.sampling(max_tokens=2)), metadata=[("client_id", "b")]
    )
    assert (await named).completions[0].token_ids


async def test_who_leaves_the_queue_has_cost_nothing(cluster):
    cluster.decode.max_running = 0
    await cluster.serve(max_left_requests=2)
    for _ in range(4):
        call = cluster.stub.Generate(cluster.request(sampling=cluster.sampling()))
        await cluster.eventually(lambda: cluster.services.admission.num_waiting == 1, what="queue")
        call.cancel()
        await cluster.is_empty()
    cluster.decode.max_running = 8
    assert (await cluster.generate(sampling=cluster.sampling(max_tokens=2))).token_ids()
