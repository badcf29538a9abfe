"""Clients that begin requests and leave them: they are told to wait, and nobody else is."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from outrider.errors import CapacityError
from outrider.v1 import router_pb2
from router.departures import CREDITS_PER_SECOND, MAX_CLIENTS, Departures
from router.intake import read_request
from tests.router.conftest import PATIENCE_SECONDS, told
from tests.router.test_overload_and_abort import EXHAUSTED, LONG, start_long


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def end(departures, client, *, was_left):
    departures.settle(client, was_left=was_left)
    departures.end(client)


def leave(departures, client, times=1):
    for _ in range(times):
        departures.begin(client)
        end(departures, client, was_left=True)


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
        end(departures, "hostile", was_left=True)
    departures.check("other")


def test_a_client_that_reads_as_many_answers_as_it_leaves_is_not_limited():
    departures = Departures(8, clock=Clock())
    for _ in range(100):
        departures.check("gateway")
        for _ in range(50):  # at a time
            departures.begin("gateway")
            departures.check("gateway")
        for number in range(50):
            end(departures, "gateway", was_left=number % 2 == 0)


def test_who_has_left_hundreds_at_once_waits_for_one_credit_and_earns_the_others_by_reading():
    clock = Clock()
    departures = Departures(8, clock=clock)
    for _ in range(500):  # a gateway of many clients, which restarts
        departures.begin("gateway")
    for _ in range(500):
        end(departures, "gateway", was_left=True)
    with pytest.raises(CapacityError):
        departures.check("gateway")
    clock.now += 1.0 / CREDITS_PER_SECOND
    for num_at_once in (1, 2, 4):
        for _ in range(num_at_once):
            departures.check("gateway")
            departures.begin("gateway")
        for _ in range(num_at_once):
            end(departures, "gateway", was_left=False)
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
    with pytest.raises(CapacityError):  # who has no credits is remembered
        departures.check("hostile")
    end(departures, "running", was_left=False)


def test_names_are_forgotten_once_they_have_credits_again():
    clock = Clock()
    departures = Departures(1, clock=clock)
    for number in range(2 * MAX_CLIENTS):
        clock.now += 1e-3
        leave(departures, f"name {number}")
    assert len(departures) <= MAX_CLIENTS


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


@pytest.fixture
async def with_one_credit(cluster, monkeypatch):
    """The client has left three of four requests: it may have one at a time."""
    monkeypatch.setattr("router.departures.CREDITS_PER_SECOND", 1e-6)
    await cluster.serve(max_left_requests=4)
    cluster.decode.step_seconds = 0.01
    for number in range(3):
        (await start_long(cluster, f"r{number}")).cancel()
        await cluster.is_empty()
    return cluster


async def until_waiting(cluster):
    """A request that no node is asked for."""
    call = cluster.stub.Generate(cluster.request(sampling=cluster.sampling()))
    await cluster.eventually(lambda: cluster.services.admission.num_waiting == 1, what="queue")
    return call


async def test_who_leaves_the_queue_has_earned_nothing(with_one_credit):
    cluster = with_one_credit
    cluster.decode.max_running = 0
    for _ in range(4):
        (await until_waiting(cluster)).cancel()
        await cluster.is_empty()
    last = await until_waiting(cluster)
    assert (await cluster.fail(sampling=cluster.sampling())).reason == "LEFT_TOO_MANY"
    last.cancel()
    await cluster.is_empty()


async def test_a_request_counts_while_its_text_is_encoded(with_one_credit, monkeypatch):
    cluster = with_one_credit
    is_encoding, may_go_on = asyncio.Event(), asyncio.Event()

    async def hold_first(*arguments, **options):
        if not is_encoding.is_set():
            is_encoding.set()
            await may_go_on.wait()
        return await read_request(*arguments, **options)

    monkeypatch.setattr("router.request_desk.read_request", hold_first)
    first = asyncio.ensure_future(cluster.generate(sampling=cluster.sampling(max_tokens=2)))
    await asyncio.wait_for(is_encoding.wait(), PATIENCE_SECONDS)
    assert (await cluster.fail(sampling=cluster.sampling())).reason == "LEFT_TOO_MANY"
    may_go_on.set()
    assert (await first).token_ids()


async def test_a_request_that_is_refused_runs_no_more(with_one_credit):
    cluster = with_one_credit
    for _ in range(3):
        assert (
            await cluster.fail("too long " * 1000, sampling=cluster.sampling())
        ).code is grpc.StatusCode.INVALID_ARGUMENT
    assert (await cluster.generate(sampling=cluster.sampling(max_tokens=2))).token_ids()


async def test_who_calls_itself_by_the_address_of_another_client_is_not_taken_for_it(cluster, monkeypatch):
    monkeypatch.setattr("router.departures.CREDITS_PER_SECOND", 1e-6)
    await cluster.serve(max_left_requests=1)
    cluster.decode.step_seconds = 0.01
    for name in ("ipv4:127.0.0.1", "ipv6:%5B::1%5D"):
        request = cluster.request(sampling=cluster.sampling(max_tokens=LONG))
        call = cluster.stub.Generate(request, metadata=[("client_id", name)])
        assert (await call.read()).HasField("started")
        call.cancel()
        await cluster.is_empty()
    assert (await cluster.generate(sampling=cluster.sampling(max_tokens=2))).token_ids()


async def test_what_the_store_or_another_router_ends_its_client_has_not_left(router_pair, monkeypatch):
    monkeypatch.setattr("router.departures.CREDITS_PER_SECOND", 1e-6)
    pair = router_pair
    await pair.serve(max_left_requests=1)
    pair.first.decode.tokens_per_step = 0  # nothing ends by itself
    create = type(pair.stores[0]).create

    async def lose(store, stored):
        """The store does not answer, and says so when the request runs."""
        running = pair.first.service.desk.running.find_resumable("r")
        await pair.first.eventually(lambda: running.answer.started is not None)
        store.is_lost = True
        try:
            await create(store, stored)
        finally:
            store.is_lost = False

    with monkeypatch.context() as patch:
        patch.setattr(type(pair.stores[0]), "create", lose)
        assert (await pair.first.fail(pair.request())).reason == "STORE_LOST"
    await pair.first.is_empty()
    await pair.begin(num_deltas=0)
    resumed = asyncio.ensure_future(pair.resume())
    await pair.first.eventually(lambda: not pair.first.service.desk.running.has("r"))
    pair.first.decode.tokens_per_step = 50
    assert told(await resumed)
    assert (await pair.first.generate(sampling=pair.first.sampling(max_tokens=2))).token_ids()
