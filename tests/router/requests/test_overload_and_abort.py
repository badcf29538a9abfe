"""Queue, priority, overload, abort, cancellation and deadline. Everything is released afterwards."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc
import pytest

from outrider.errors import AlreadyRunningError, CapacityError
from outrider.v1 import router_pb2
from tests.router.conftest import PATIENCE_SECONDS, Answer, read_rest, refused
from tests.support.memory_store import MemoryAnswerStore

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
LONG = 400


async def start_long(cluster):
    """Starts a request that runs until it is stopped, since node steps are slow. Returns its call after Started."""
    call = cluster.stub.Generate(cluster.request(max_tokens=LONG))
    assert (await call.read()).HasField("started")
    return call


async def wait_for_queue(cluster, num_waiting):
    await cluster.eventually(lambda: cluster.context.queue.num_waiting == num_waiting, what="queue")


@pytest.fixture
async def full(cluster):
    """A cluster whose only decode node is filled by one request."""
    cluster.decode.max_running = 1
    cluster.decode.step_seconds = 0.1
    return cluster


@pytest.mark.parametrize(
    "limit", [{"max_waiting": 1}, {"min_waiting_tokens": 10, "tokens_per_waiting": 0}], ids=["requests", "tokens"]
)
async def test_what_a_full_queue_cannot_take_is_refused_at_once_with_retry_info(full, limit):
    await full.serve(**limit)
    running = await start_long(full)
    waiting = asyncio.ensure_future(full.generate(text="8 tokens", max_tokens=2))
    await wait_for_queue(full, 1)
    status = full.service.requests.cluster_status()
    assert status.num_waiting_tokens == 8
    assert status.oldest_wait_seconds > 0
    assert full.registry.get_sample_value("outrider:waiting_prompt_tokens", {"model_name": "fake-model"}) == 8
    assert full.registry.get_sample_value("outrider:oldest_wait_seconds", {"model_name": "fake-model"}) > 0
    failure = await full.fail(text="more", max_tokens=8)
    assert (failure.code, failure.reason) == (EXHAUSTED, "QUEUE_FULL")
    assert failure.retry_seconds > 0
    running.cancel()
    assert (await waiting).summary.metrics.queue_seconds > 0
    await full.is_empty()


async def test_every_request_that_fails_or_is_refused_is_counted_once_and_so_is_a_client_that_leaves(full):
    async def store(stored):
        raise AlreadyRunningError("on another router", reason="DUPLICATE_REQUEST_ID")

    memory = MemoryAnswerStore(owner=b"router", lease_seconds=1.0)
    await full.serve(max_waiting=0, answer_memory_bytes=1 << 17, store=memory)
    running = await start_long(full)
    expected = Counter()

    async def fails_with(reason, request):
        assert (await full.fail(request)).reason == reason
        expected[reason] += 1

    await fails_with("INVALID_REQUEST", full.request(top_p=7.0))
    await fails_with("PROMPT_TOO_LONG", full.request(text="p" * 1000))
    await fails_with("QUEUE_FULL", full.request())
    await fails_with("QUEUE_FULL", full.resumable())
    await fails_with("REQUEST_TOO_LARGE", full.request(text="p" * (3 << 20)))
    memory.create = store
    await fails_with("DUPLICATE_REQUEST_ID", full.resumable())
    full.service.requests._clients.charge = raising(CapacityError("too often", reason="RATE_LIMIT"))
    await fails_with("RATE_LIMIT", full.request())
    del full.service.requests._clients.charge
    full.service.requests.is_draining = True
    await fails_with("DRAINING", full.request())
    full.service.requests.is_draining = False
    running.cancel()
    expected["CLIENT_LEFT"] += 1
    await full.is_empty()

    def counted():
        values = {reason: full.registry.get_sample_value(FAILURES, LABEL | {"reason": reason}) for reason in expected}
        return values | {"all": sum(s.value for m in full.registry.collect() for s in m.samples if s.name == FAILURES)}

    await full.eventually(lambda: counted() == expected | {"all": expected.total()}, what="counts")


FAILURES, LABEL = "outrider:request_failures_total", {"model_name": "fake-model"}


def raising(error):
    def call(*_arguments):
        raise error

    return call


async def test_clients_that_name_themselves_share_a_full_queue(full):
    await full.serve(max_waiting=2)
    running = await start_long(full)

    def start(client_id):
        return full.stub.Complete(
            full.request(max_tokens=2),
            metadata=(("client_id", client_id),),
            timeout=PATIENCE_SECONDS,
        )

    flood = []
    for number in range(2):
        flood.append(start("flood"))
        await wait_for_queue(full, number + 1)
    other = start("other")
    failure = await refused(flood[1])
    assert (failure.code, failure.reason) == (EXHAUSTED, "QUEUE_FULL")
    assert failure.retry_seconds > 0
    running.cancel()
    await asyncio.gather(flood[0], other)
    await full.is_empty()


async def test_watches_are_bounded_and_a_place_is_free_again(cluster, monkeypatch):
    monkeypatch.setattr("router.api.servicer.MAX_WATCHES", 1)
    await cluster.serve()
    first = cluster.stub.WatchCluster(router_pb2.WatchClusterRequest(), timeout=PATIENCE_SECONDS)
    await first.read()
    second = cluster.stub.WatchCluster(router_pb2.WatchClusterRequest(), timeout=PATIENCE_SECONDS)
    assert (await refused(second)).reason == "TOO_MANY_WATCHES"
    first.cancel()
    await cluster.eventually(lambda: not cluster.service.servicer._watches)
    assert (await cluster.stub.WatchCluster(router_pb2.WatchClusterRequest(), timeout=PATIENCE_SECONDS).read()).nodes


async def test_higher_priority_goes_first_then_arrival(full):
    await full.serve()
    running = await start_long(full)
    order = []

    async def one(name, priority, num_tokens):
        await full.generate(text="x" * num_tokens, priority=priority, max_tokens=2)
        order.append(name)

    tasks = []
    entries = [("first", 0, 90), ("second", 0, 10), ("low", -5, 10), ("high", 9, 90)]  # short prompts overtake none
    for num_before, entry in enumerate(entries):
        tasks.append(asyncio.ensure_future(one(*entry)))
        await wait_for_queue(full, num_before + 1)
    running.cancel()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*tasks)
    assert order == ["high", "first", "second", "low"]
    await full.is_empty()


@pytest.mark.parametrize("says", [True, False], ids=["four of its chunks", "by default"])
async def test_a_prefill_node_is_given_no_more_than_its_share(cluster, says):
    cluster.prefill.prefill_seconds = 0.02
    cluster.prefill.max_rows_per_step = 16 * says
    await cluster.serve(prefill_outstanding_tokens=1024 if says else 64)
    answers = [cluster.generate(text=chr(97 + index) * 30, max_tokens=2) for index in range(10)]
    await asyncio.gather(*answers)
    assert 29 <= cluster.prefill.max_outstanding_tokens <= 64
    big = await cluster.generate(text="y" * 200, max_tokens=2)
    assert big.token_ids(), "a prompt beyond the share goes alone"
    await cluster.is_empty()


# ---------------------------------------------------------------- three times the load

CAPACITY = 8
"""Sequences that the decode node runs at a time."""
NUM_TOKENS = 40
NUM_REQUESTS = 48


class Load:
    """Clients that each send a request as soon as their previous one has ended or was rejected."""

    def __init__(self, cluster):
        self._cluster = cluster
        self._left = NUM_REQUESTS
        self.num_refused = 0

    async def run(self, num_clients):
        """Runs the clients. Returns the mean number of tokens per step of the node."""
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
        try:
            await self._cluster.stub.Complete(
                self._cluster.request(max_tokens=NUM_TOKENS), metadata=(("client_id", client),), timeout=50
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


# ---------------------------------------------------------------- abort


async def test_abort_ends_the_call_with_aborted_samples_and_ok(cluster):
    cluster.decode.script = lambda opened, sample: [97, 256] if sample == 0 else [98] * LONG
    await cluster.serve()
    cluster.decode.step_seconds = 0.1
    task = asyncio.ensure_future(cluster.generate(request_id="a", n=2, max_tokens=LONG))
    await cluster.eventually(lambda: any(0 not in group.tokens for group in cluster.decode.groups))
    assert (await cluster.stub.Abort(router_pb2.AbortRequest(request_id="a"))).aborted
    answer = await task
    assert answer.finished[0].reason == router_pb2.FINISH_REASON_STOP
    assert answer.finished[1].reason == router_pb2.FINISH_REASON_ABORTED
    assert answer.summary.usage.num_generated_tokens == len(answer.token_ids(0)) + len(answer.token_ids(1))
    assert not (await cluster.stub.Abort(router_pb2.AbortRequest(request_id="a"))).aborted, "it is unknown now"
    await cluster.is_empty()


# ---------------------------------------------------------------- cancel, deadline and abort, at any time


@pytest.mark.parametrize("phase", ["queue", "open", "prefill", "stream"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "abort"])
async def test_a_client_that_leaves_frees_everything_before_its_answer_would_have_ended(cluster, phase, how):
    cluster.decode.step_seconds = 0.1
    await cluster.serve()
    blocker = None
    if phase == "queue":
        cluster.decode.max_running = 1
        blocker = await start_long(cluster)
    elif phase == "open":
        cluster.decode.answers_opens = False
    elif phase == "prefill":
        cluster.prefill.prefill_seconds = 30.0
    timeout = 0.5 if how == "deadline" else None
    request = cluster.request(request_id="q", n=2, max_tokens=LONG)
    call = cluster.stub.Generate(request, timeout=timeout)
    reached = {
        "queue": lambda: cluster.context.queue.num_waiting == 1,
        "open": lambda: len(cluster.decode.opened) == 1,
        "prefill": lambda: len(cluster.prefill.requests) == 1,
        "stream": lambda: cluster.decode.step > 0,
    }[phase]
    await cluster.eventually(lambda: reached() or call.done())  # on a busy machine the deadline may come first
    if how == "abort":
        assert (await cluster.stub.Abort(router_pb2.AbortRequest(request_id="q"))).aborted
        answer = Answer(await read_rest(call))
        assert {finished.reason for finished in answer.finished.values()} == {router_pb2.FINISH_REASON_ABORTED}
    else:
        if how == "cancel":
            call.cancel()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)) as caught:
            await read_rest(call)
        if how == "deadline":
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    if blocker is not None:
        await wait_for_queue(cluster, 0)
        blocker.cancel()
    await cluster.is_empty(seconds=0.1 * LONG / 2)


async def test_two_hundred_requests_with_random_aborts_leave_nothing_behind(cluster):
    generator = random.Random(7)
    cluster.decode.max_running = 24
    cluster.decode.num_blocks = 120
    cluster.prefill.prefill_seconds = 0.001
    cluster.decode.tokens_per_step = 2
    await cluster.serve(max_waiting=300)
    outcomes: dict[str, int] = {}

    async def one(index: int) -> None:
        request = cluster.request(
            request_id=f"r{index}",
            text="x" * generator.randint(1, 60),
            seed=index,
            n=generator.choice((1, 1, 2)),
            max_tokens=generator.randint(1, 40),
            stop=router_pb2.StopConditions(strings=["q"]),
            priority=generator.randint(-1, 1),
        )
        fate = generator.choice(("finish", "finish", "cancel", "abort", "deadline"))
        delay = generator.random() * 0.3
        call = cluster.stub.Generate(request, timeout=delay if fate == "deadline" else 2 * PATIENCE_SECONDS)

        async def interfere() -> None:
            await asyncio.sleep(delay)
            if fate == "cancel":
                call.cancel()
            elif fate == "abort":
                await cluster.stub.Abort(router_pb2.AbortRequest(request_id=f"r{index}"))

        meddler = asyncio.ensure_future(interfere())
        try:
            messages = [message async for message in call]
            assert messages[-1].HasField("summary")
            outcomes["ok"] = outcomes.get("ok", 0) + 1
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            name = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "CANCELLED"
            outcomes[name] = outcomes.get(name, 0) + 1
        await meddler

    async with asyncio.timeout(3 * PATIENCE_SECONDS):
        await asyncio.gather(*(one(index) for index in range(200)))
    assert outcomes["ok"] > 60, outcomes
    assert set(outcomes) <= {"ok", "CANCELLED", "DEADLINE_EXCEEDED"}, outcomes
    await cluster.is_empty()
    answer = await cluster.generate(max_tokens=8)
    assert len(answer.token_ids()) == 8
