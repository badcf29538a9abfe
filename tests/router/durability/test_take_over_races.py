"""Races of the store, replication and Resume."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from outrider.errors import AbortedError, PeerLostError
from outrider.v1 import router_pb2
from router.api.clients import Caller
from router.requests.events import Timer
from tests.router.conftest import PATIENCE_SECONDS, read_rest, refused, told
from tests.router.take_over import gated, request, run_ahead_of_the_store, serve, watched
from tests.support.router_fakes import fake_model_info
from tests.support.router_fakes.decode_node import letters

BATCH_DEPENDENT = "batch-dependent (torch bfloat16)"


@pytest.fixture
def pair(router_pair):
    return router_pair


async def test_a_reader_is_told_when_the_call_that_began_its_request_leaves_before_it_is_stored(cluster):
    store, _ = await serve(cluster)
    gate = gated(store, "create")
    call = cluster.stub.Generate(request(cluster, 100))
    await gate.until_entered()
    resumed = cluster.resume_call()
    assert (await resumed.read()).HasField("started")
    call.cancel()
    failure = await refused(resumed)
    assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "DROPPED")
    await cluster.is_empty()


async def test_the_window_runs_for_a_request_whose_resume_was_cancelled_while_it_was_claimed(pair):
    await pair.serve()
    await pair.begin()
    await pair.kill_first()
    keeper, running = pair.second.service.requests.keeper, pair.second.service.requests
    gate, resume = gated(pair.stores[1], "claim"), watched(keeper, "resume")
    resumed = pair.second.resume_call()
    read = asyncio.ensure_future(resumed.read())
    await gate.until_entered()
    resumed.cancel()
    await resume.until_left()
    gate.open()
    await pair.second.eventually(lambda: len(running) == 1 and not keeper._claims)
    (taken,) = running._by_key.values()
    await pair.second.eventually(lambda: Timer.WINDOW in taken._request._timers, what="a resume window")
    await asyncio.wait((read,), timeout=PATIENCE_SECONDS)


async def test_a_second_resume_waits_while_the_first_one_restores(pair):
    await pair.serve()
    await pair.begin(output=router_pb2.OutputOptions(echo=True))
    await pair.kill_first()
    gate = gated(pair.second.service.nodes.served.tokenizer, "decode")
    first = asyncio.ensure_future(pair.second.resume_call().read())
    await gate.until_entered()
    find = watched(pair.second.service.requests, "_find")
    second = pair.second.resume_call()
    started = asyncio.ensure_future(second.read())
    await find.until_entered()
    gate.open()
    assert (await asyncio.wait_for(started, PATIENCE_SECONDS)).HasField("started")
    await asyncio.wait((first,), timeout=PATIENCE_SECONDS)


# ---------------------------------------------------------------- take-overs


async def test_a_request_that_is_taken_over_is_not_refused_by_a_full_queue(pair):
    await pair.serve(max_waiting=0)
    await pair.begin()
    await pair.kill_first()
    placement = pair.second.context.placement
    place, asked = placement.place, asyncio.Event()

    def no_room(*_args, **_fields):
        asked.set()

    placement.place = no_room
    messages = asyncio.ensure_future(pair.resume())
    await asyncio.wait_for(asked.wait(), PATIENCE_SECONDS)
    placement.place = place
    pair.first.decode.step_seconds = 0.0
    assert told(await asyncio.wait_for(messages, PATIENCE_SECONDS)) == letters(pair.first.decode.opened[0], 0)


async def test_an_aborted_request_is_resumed_behind_what_the_store_knows(pair):
    await pair.serve()
    position = await run_ahead_of_the_store(pair)
    assert (await pair.second.stub.Abort(router_pb2.AbortRequest(request_id="r"))).aborted
    messages = await pair.resume({0: position})
    (finished,) = [message.finished for message in messages if message.HasField("finished")]
    assert finished.reason == router_pb2.FINISH_REASON_ABORTED
    assert messages[-1].HasField("summary")
    assert told(messages) == []


@pytest.mark.parametrize("reason", ["numerics", "drafts"])
async def test_tokens_that_could_differ_are_not_put_behind_those_that_a_client_has(pair, reason):
    fields = {}
    if reason == "numerics":
        pair.first.decode.model = fake_model_info(numerics=BATCH_DEPENDENT)
    else:
        method = router_pb2.VERIFICATION_METHOD_REJECTION
        fields = {"temperature": 1.0, "speculation": router_pb2.SpeculationOptions(method=method)}
    await pair.serve()
    position = await run_ahead_of_the_store(pair, **fields)
    pair.first.decode.script = lambda opened, _sample: [65] * opened.options.sampling.max_tokens
    failure = await refused(pair.second.resume_call({0: position}))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "NOT_REPRODUCIBLE")
    await pair.second.eventually(lambda: len(pair.second.service.requests) == 0)


async def test_a_client_that_goes_to_another_router_and_back_keeps_its_stream(pair):
    await pair.serve()
    pair.first.decode.step_seconds = 0.05
    await pair.begin(num_deltas=2)
    renewal = gated(pair.stores[0], "renew")  # a renewal would reveal the take-over to the first router
    await renewal.until_entered()
    resumed = pair.second.resume_call()
    assert (await resumed.read()).HasField("started")
    assert "r" in pair.first.service.requests
    back = pair.first.resume_call()
    assert (await back.read()).HasField("started")
    renewal.open()
    await pair.second.eventually(lambda: "r" not in pair.second.service.requests, what="the second router has heard")
    pair.first.decode.step_seconds = 0.0
    assert told(await read_rest(back)) == letters(pair.first.decode.opened[0], 0)


async def test_a_resume_that_hears_late_of_a_take_over_leaves_the_request_that_came_back(pair, monkeypatch):
    await pair.serve()
    pair.first.decode.step_seconds = 0.05
    await pair.begin(num_deltas=2)
    renewal = gated(pair.stores[0], "renew")
    await renewal.until_entered()
    assert (await pair.second.resume_call().read()).HasField("started")
    read, has_read, may_return = pair.stores[0].read, asyncio.Event(), asyncio.Event()

    async def read_slowly(key):
        stored = await read(key)
        has_read.set()
        await may_return.wait()
        return stored

    with monkeypatch.context() as patch:
        patch.setattr(pair.stores[0], "read", read_slowly)
        late = pair.first.resume_call()
        await asyncio.wait_for(has_read.wait(), PATIENCE_SECONDS)
    assert (await pair.first.resume_call().read()).HasField("started")
    may_return.set()
    assert (await late.read()).HasField("started")
    renewal.open()
    pair.first.decode.step_seconds = 0.0
    assert told(await read_rest(late)) == letters(pair.first.decode.opened[0], 0)


async def test_an_abort_at_the_router_that_has_lost_the_request_reaches_the_one_that_has_it(pair):
    await pair.serve()
    pair.first.decode.step_seconds = 0.1
    await pair.begin(num_deltas=2)
    renewal = gated(pair.stores[0], "renew")  # a renewal would reveal the take-over to the first router
    await renewal.until_entered()
    resumed = pair.second.resume_call()
    assert (await resumed.read()).HasField("started")
    assert "r" in pair.first.service.requests, "it has not heard of the take-over"
    assert (await pair.first.stub.Abort(router_pb2.AbortRequest(request_id="r"))).aborted
    (finished,) = [message.finished for message in await read_rest(resumed) if message.HasField("finished")]
    assert finished.reason == router_pb2.FINISH_REASON_ABORTED


# ---------------------------------------------------------------- the keeper


async def test_a_router_that_stops_ends_no_request_for_good_whatever_it_is_doing(pair, monkeypatch):
    """The test calls only `stop`, as happens after a drain that has taken too long."""
    monkeypatch.setattr("router.requests.machine.STATS_SECONDS", PATIENCE_SECONDS)
    await pair.serve(max_waiting=4)
    prefill, decode = pair.first.prefill, pair.first.decode
    prefill.answer_gate = asyncio.Event()
    decode.step_seconds = 0.0
    whole = pair.first.stub.Generate(pair.request(request_id="whole", max_tokens=2))
    while not (await whole.read()).HasField("finished"):
        pass  # from now on, only the prefill node's statistics are missing
    decode.step_seconds, decode.max_running = 0.01, 1
    calls = [pair.first.stub.Generate(pair.request(request_id=name)) for name in ("running", "waiting")]
    await pair.first.eventually(lambda: pair.first.context.queue.num_waiting == 1)
    await pair.first.service.stop()
    prefill.answer_gate.set()
    for call in (whole, *calls):
        failure = await refused(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert (await pair.first.fail(pair.request(request_id="new"))).reason == "DRAINING"


async def test_a_resume_whose_window_ends_while_the_store_is_asked_is_not_left_waiting(cluster):
    store, _ = await serve(cluster)
    call = cluster.stub.Generate(request(cluster, 400, seconds=0.3))
    for _ in range(3):
        await call.read()
    call.cancel()
    gate, requests = gated(store, "read"), cluster.service.requests
    resumed = asyncio.ensure_future(read_rest(cluster.resume_call()))
    await gate.until_entered()
    await cluster.eventually(lambda: not requests._by_key, what="the window's end")
    gate.open()
    outcome = (await asyncio.gather(resumed, return_exceptions=True))[0]
    if isinstance(outcome, grpc.aio.AioRpcError):
        assert outcome.code() is grpc.StatusCode.NOT_FOUND
    else:  # the store still had the request
        assert told(outcome)
    cluster.decode.step_seconds = 0.0


async def test_a_stream_of_a_request_that_was_dropped_meanwhile_ends(cluster):
    await serve(cluster)
    live = await cluster.service.requests.begin(request(cluster, 400), Caller())
    live.close()

    async def take(_event):
        pass

    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(AbortedError) as dropped:
            await live.write(take, lambda event: event)
    assert dropped.value.reason == "DROPPED"


async def test_a_client_that_leaves_while_its_request_is_stored_leaves_no_name(pair):
    await pair.serve()
    create, stored = pair.stores[0].create, asyncio.Event()

    async def create_slowly(request):
        await create(request)
        stored.set()
        await asyncio.Event().wait()  # the response never comes

    pair.stores[0].create = create_slowly
    call = pair.first.stub.Generate(pair.request())
    await asyncio.wait_for(stored.wait(), PATIENCE_SECONDS)
    call.cancel()
    await pair.first.eventually(lambda: pair.records.get("r") is None, what="a free name")
    assert len((await pair.second.generate(pair.request(max_tokens=5))).token_ids()) == 5


async def test_a_planned_drain_stores_the_last_tokens(pair):
    await pair.serve(store_append_seconds=0.3)
    call, _, deltas = await pair.begin(num_deltas=30)
    pair.first.service.requests.fail_all(PeerLostError("the router is stopping", reason="DRAINING"))
    num_known = sum(len(delta.token_ids) for delta in deltas)
    await pair.first.eventually(lambda: not pair.first.service.requests.keeper._kept, what="forgotten here")
    stored = await pair.stores[1].read("r")
    assert len(stored.token_ids[0]) >= num_known
    call.cancel()


@pytest.mark.parametrize("is_deleting", [False, True], ids=["alone", "while the store forgets another one"])
async def test_a_request_that_the_queue_refuses_leaves_its_name_free(pair, is_deleting):
    await pair.serve(max_waiting=0, store_append_seconds=0.05 if is_deleting else 30.0)
    keeper, create, gate = pair.first.service.requests.keeper, pair.stores[0].create, gated(pair.stores[0], "delete")
    if is_deleting:
        await pair.first.generate(request(pair.first, 2, seconds=0, request_id="other"))
        await gate.until_entered()
    pair.first.context.placement.place = lambda *_args, **_fields: None

    async def create_by_wire(stored):
        await create(stored)
        await asyncio.sleep(0.05)

    pair.stores[0].create = create_by_wire
    refused = asyncio.ensure_future(pair.first.fail(pair.request()))
    await pair.first.eventually(lambda: "r" in keeper._to_delete)
    gate.open()
    assert (await refused).reason == "QUEUE_FULL"
    assert pair.records.get("r") is None
    answer = await pair.second.generate(pair.request(max_tokens=5))
    assert len(answer.token_ids()) == 5
