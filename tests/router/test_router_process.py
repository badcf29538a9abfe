"""The router as a process, with fake nodes or none: how it starts and ends, and how it is killed or frozen in a stream.

tests/faults/test_lost_routers.py kills a router that has a shared store and real nodes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
import urllib.request

import grpc
import grpc.aio
import pytest

from outrider.client import AsyncClient
from outrider.rpc.channels import channel_options, open_channel
from outrider.service.health import LIVENESS
from outrider.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import refused
from tests.support.processes import NOT_SERVING, SERVING, WAIT_SECONDS, RoleProcess, check_health
from tests.support.router_fakes import FakeDecodeNode, FakePrefillNode
from tests.support.store_server import PATIENT_STORE_SETTING
from tests.support.traces import TRACEPARENT, Collector

PATIENCE_OPTIONS = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
NUM_CLIENTS = 16
ROUTER_SERVICE = "outrider.v1.RouterService"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SILENCE_SECONDS = 5.0
"""Seconds after which a client gives up a router that does not answer pings. A reset connection is noticed at once."""
NUM_TOKENS = 200


@pytest.fixture
async def nodes():
    """A serving decode node and a serving prefill node."""
    decode = FakeDecodeNode()
    prefill = FakePrefillNode()
    for node in (decode, prefill):
        await node.start()
    yield decode, prefill
    for node in (decode, prefill):
        await node.stop()


@pytest.fixture
async def router(nodes):
    """start(*settings) starts a router, and returns (process, stub) when it serves."""
    decode, prefill = nodes
    channels, processes = [], []

    async def start(*settings: str):
        process = RoleProcess(
            "router",
            "server.port=0",
            f"router.decode_targets={decode.address}",
            f"router.prefill_targets={prefill.address}",
            *settings,
        )
        processes.append(process)
        channels.append(open_channel(await asyncio.to_thread(process.serving)))
        return process, router_pb2_grpc.RouterServiceStub(channels[-1])

    yield start
    for channel in channels:
        await channel.close()
    for process in processes:
        await asyncio.to_thread(process.__exit__)


def request(max_tokens: int) -> router_pb2.GenerateRequest:
    sampling = router_pb2.SamplingParams(seed=0, max_tokens=max_tokens)
    return router_pb2.GenerateRequest(text="a prompt", sampling=sampling)


class Stream:
    """A Generate call that is read in the background."""

    def __init__(self, stub, *, max_tokens: int) -> None:
        self.has_begun = asyncio.Event()
        self.num_tokens = 0
        self.has_summary = False
        self._call = stub.Generate(request(max_tokens))
        self.task = asyncio.ensure_future(self._read())
        self.task.add_done_callback(lambda _: self.has_begun.set())

    async def _read(self) -> None:
        async for message in self._call:
            self.num_tokens += len(message.delta.token_ids)
            self.has_summary = message.HasField("summary")
            if self.num_tokens:
                self.has_begun.set()


def read_page(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=WAIT_SECONDS) as answer:
        return answer.read()


@pytest.mark.full
async def test_a_collector_that_never_answers_delays_no_answer_and_no_end(nodes, router):
    with Collector() as collector:
        collector.answers.clear()
        process, stub = await router(f"telemetry.otlp_endpoint={collector.endpoint}", "server.drain_seconds=1")
        for _ in range(3):
            call = stub.Generate(request(8), metadata=(("traceparent", TRACEPARENT),), timeout=WAIT_SECONDS)
            assert [message async for message in call][-1].HasField("summary")
        status, log = await asyncio.to_thread(process.end)
        assert status == 0
        assert collector.num_calls > 0, "it tried"
        assert collector.spans == []
        assert not [line for line in log if "took too long" in line["event"]]


async def test_what_runs_at_sigterm_ends_and_then_the_router(nodes, router):
    nodes[0].step_seconds = 0.2  # the answer takes 30 s
    process, stub = await router("server.drain_seconds=60", "server.metrics_port=0", "telemetry.log_text=true")
    stream = Stream(stub, max_tokens=150)
    await stream.has_begun.wait()
    listening = await asyncio.to_thread(process.wait_for_log, "listening")
    pages = [
        await asyncio.to_thread(read_page, listening["metrics_address"], path) for path in ("/", "/api/requests/1")
    ]
    assert b"<title>Outrider" in pages[0]
    record = json.loads(pages[1])
    assert (record["state"], record["steps"][0]["tokens"]) == ("running", ["a"]), "and text may be shown"
    process.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait_for_log, "draining")
    assert len((await stub.Complete(request(1))).completions) == 1, "load balancers have not noticed yet"

    async def ask_again_and_again():
        while True:
            await stub.Complete(request(1))

    assert (await refused(ask_again_and_again())).code is UNAVAILABLE
    assert not stream.has_summary
    nodes[0].step_seconds = 0.0
    await stream.task
    assert (stream.num_tokens, stream.has_summary) == (150, True)
    status, _ = await asyncio.to_thread(process.wait)
    assert status == 0


async def test_what_still_runs_or_waits_at_the_deadline_is_told(nodes, router):
    nodes[0].step_seconds = 0.2  # the answer takes 80 s
    nodes[0].max_running = 1
    process, stub = await router("server.drain_seconds=0.3")
    running = Stream(stub, max_tokens=400)
    await running.has_begun.wait()
    waiting = [Stream(stub, max_tokens=400) for _ in range(3)]
    watch = stub.WatchCluster(router_pb2.WatchClusterRequest())
    while (await watch.read()).num_requests_waiting < len(waiting):
        pass
    process.process.send_signal(signal.SIGTERM)
    for stream in (running, *waiting):
        told = await refused(stream.task)
        assert (told.code, told.reason) == (UNAVAILABLE, "DRAINING")
        assert told.retry_seconds > 0
    assert running.num_tokens > 0
    status, log = await asyncio.to_thread(process.wait)
    assert status == 0
    assert [line["num_requests"] for line in log if line["event"] == "drain deadline passed"] == [4]
    assert (await refused(watch)).reason == "DRAINING"


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_no_call_is_called_cancelled_when_clients_ask_again_until_the_router_is_gone(nodes, router, method):
    nodes[0].step_seconds = 0.2
    nodes[0].max_running = NUM_CLIENTS
    process, stub = await router("server.drain_seconds=0.3")
    endings = [[] for _ in range(NUM_CLIENTS)]

    async def ask(ends):
        while process.process.poll() is None:
            ends.append(await refused(getattr(stub, method)(request(400), timeout=WAIT_SECONDS)))

    asking = [asyncio.ensure_future(ask(ends)) for ends in endings]
    watch = stub.WatchCluster(router_pb2.WatchClusterRequest())
    while (await watch.read()).num_requests_running < NUM_CLIENTS:
        pass
    process.process.send_signal(signal.SIGTERM)
    status, _ = await asyncio.to_thread(process.wait)
    await asyncio.gather(*asking)
    assert status == 0
    assert [ends[0].reason for ends in endings] == ["DRAINING"] * NUM_CLIENTS
    assert {end.code for ends in endings for end in ends} == {UNAVAILABLE}


@pytest.mark.slow
async def test_clients_of_a_frozen_router_are_told(nodes, router, is_full):
    """The connection has just carried tokens, so that gRPC's own ping may be in flight when the router freezes.

    A full run uses the client's own timeouts. Other runs use a fifth of them.
    """
    nodes[0].step_seconds = 0.01
    process, _ = await router()
    patience = 1 if is_full else 5
    options = [(name, value // patience if name in PATIENCE_OPTIONS else value) for name, value in channel_options()]
    async with grpc.aio.insecure_channel(process.log()[0]["address"], options=options) as channel:
        stream = Stream(router_pb2_grpc.RouterServiceStub(channel), max_tokens=400)
        await stream.has_begun.wait()
        process.process.send_signal(signal.SIGSTOP)
        assert (await asyncio.wait_for(refused(stream.task), WAIT_SECONDS)).code is UNAVAILABLE


async def test_a_router_alone_says_for_whom_it_waits_and_is_not_serving():
    with RoleProcess(
        "router",
        "server.port=0",
        "router.decode_targets=decode.invalid:1",
        "router.prefill_targets=127.0.0.1:1",
    ) as process:
        address = await asyncio.to_thread(lambda: process.announcement("address")["address"])
        waiting = await asyncio.to_thread(process.wait_for_log, "waiting for nodes")
        assert waiting["missing"] == ["a prefill node", "a decode node"]
        assert list(waiting["unresolved"]) == ["decode.invalid:1"]
        assert "cannot be reached" in waiting["unreachable"]["127.0.0.1:1"]
        unknown = [line for line in process.log() if line["event"] == "name is not resolved"]
        assert [line["target"] for line in unknown] == ["decode.invalid:1"]
        with grpc.insecure_channel(address) as channel:
            assert await asyncio.to_thread(check_health, channel) == NOT_SERVING
            assert await asyncio.to_thread(check_health, channel, LIVENESS) == SERVING
        async with open_channel(address) as channel:
            assert (await refused(router_pb2_grpc.RouterServiceStub(channel).Complete(request(1)))).code is UNAVAILABLE
        status, _ = await asyncio.to_thread(process.end)
        assert status == 0


async def test_health_is_serving_between_start_and_sigterm_while_nodes_serve(nodes, router):
    process, _ = await router()
    with grpc.insecure_channel(process.log()[0]["address"]) as channel:
        assert await asyncio.to_thread(check_health, channel, ROUTER_SERVICE) == SERVING

        async def until(state):
            async with asyncio.timeout(WAIT_SECONDS):
                while await asyncio.to_thread(check_health, channel) != state:
                    await asyncio.sleep(0.02)

        await nodes[0].stop()
        await until(NOT_SERVING)
        assert await asyncio.to_thread(check_health, channel, ROUTER_SERVICE) == NOT_SERVING
        assert await asyncio.to_thread(check_health, channel, LIVENESS) == SERVING
        await nodes[0].start()
        await until(SERVING)
    status, _ = await asyncio.to_thread(process.end)
    assert status == 0


# ---------------------------------------------------------------- the Python client continues at another router


async def stream_whole(targets, *, strike=None, **options):
    """Returns (each sample, the longest pause between two Deltas in seconds)."""
    arrivals = []
    options = {"seed": 4, "max_tokens": NUM_TOKENS, "stop": ["never said"], **options}
    async with (
        asyncio.timeout(WAIT_SECONDS),
        AsyncClient(targets) as client,
        client.generate("a prompt", **options) as stream,
    ):
        async for _ in stream:
            arrivals.append(time.monotonic())
            if len(arrivals) == 20 and strike is not None:
                strike()
    samples = range(options.get("n", 1))
    assert stream.summary.usage.num_generated_tokens == len(samples) * NUM_TOKENS
    answer = [(stream.text(sample), stream.token_ids(sample), stream.finished[sample]) for sample in samples]
    return answer, max(later - earlier for earlier, later in itertools.pairwise(arrivals))


async def strike_one_of_two(nodes, router, number, *settings, max_seconds, **options):
    """Sends a signal to one of two routers during a stream. Returns that router's process."""
    nodes[0].step_seconds = 0.01
    processes = [(await router(*settings))[0] for _ in range(2)]
    addresses = [process.log()[0]["address"] for process in processes]
    undisturbed, _ = await stream_whole(addresses[1], **options)
    strike = processes[0].process.send_signal
    answer, gap_seconds = await stream_whole(addresses, strike=lambda: strike(number), **options)
    print(f"{number.name} {options}: {gap_seconds:.2f} s")
    assert answer == undisturbed
    assert gap_seconds < max_seconds
    return processes[0]


async def test_a_frozen_router_of_a_store_costs_the_time_to_notice(nodes, router, store_server):
    settings = (f"router.store={store_server.url}", PATIENT_STORE_SETTING)
    frozen = await strike_one_of_two(nodes, router, signal.SIGSTOP, *settings, n=2, max_seconds=WAIT_SECONDS)
    # It continues, learns that it lost the request, and drops it.
    frozen.process.send_signal(signal.SIGCONT)
    await asyncio.to_thread(frozen.wait_for_log, "request failed", lambda line: line["reason"] == "RESUMED_ELSEWHERE")


async def test_without_a_common_store_one_sample_goes_on_as_well(nodes, router):
    await strike_one_of_two(nodes, router, signal.SIGKILL, max_seconds=SILENCE_SECONDS)
