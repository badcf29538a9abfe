"""The node over gRPC, on a scripted engine."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from prometheus_client import REGISTRY

from outrider.engine.step_progress import StepSnapshot
from outrider.engine_node import EXIT_ENGINE_FAILED
from outrider.errors import InvalidRequestError, MismatchError
from outrider.node import ModelInfo, NodeRole, NodeState
from outrider.rpc.status import from_rpc_error
from outrider.service.telemetry.tracing import NO_TRACER
from outrider.v1 import node_pb2, node_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from outrider.wire.node import REPORT, info_from_proto
from outrider.wire.prefill import CALL
from prefill_node.node import PrefillNode, PrefillParts
from prefill_node.servicer import ServedModel, check_call
from tests.support.pool_integrity import check_pool
from tests.support.traces import CALLER_ID, TRACEPARENT, KeptSpans
from tests.support.waiting import PATIENCE_SECONDS, until

FINGERPRINT = "ab" * 32
MODEL = ModelInfo(
    name="scripted",
    vocab_size=1000,
    max_model_len=200,
    eos_token_ids=(2,),
    dtype="float32",
    fingerprint=FINGERPRINT,
    vocabulary_fingerprint="cd" * 32,
)
SERVED = ServedModel(node_name="prefill@test", info=MODEL, max_tokens=150)


class Serving:
    """One node behind a real server."""

    def __init__(self, rig, *, max_jobs=8, tracer=NO_TRACER):
        self.rig = rig
        self.exit_status = asyncio.get_running_loop().create_future()
        self.node = PrefillNode(
            build=self.build,
            configured_name="p",
            max_jobs=max_jobs,
            tracer=tracer,
            exit_process=self.exit_status.set_result,
        )
        self.server = grpc.aio.server()

    def build(self, emit):
        self.rig.loop._emit = emit
        return PrefillParts(
            engine=self.rig.engine,
            loop=self.rig.loop,
            connector=self.rig.loop._connector,
            model=MODEL,
            tokenizer_files={"tokenizer.json": b"{}"},
            adapters=self.rig.adapters,
            description={"model": "scripted"},
        )

    async def __aenter__(self):
        self.node.add_to(self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = prefill_pb2_grpc.PrefillServiceStub(self.channel)
        self.nodes = node_pb2_grpc.NodeServiceStub(self.channel)
        return self

    async def start(self):
        await self.node.start("127.0.0.1:1")
        return self

    async def __aexit__(self, *_error):
        self.rig.decode.gate.set()
        await self.channel.close()
        await self.server.stop(0)
        await self.node.stop()

    def request(self, tokens, *, held=0, to=None, **changes):
        """Makes a request. `to`: a decode side of the rig, by default the first."""
        side = to or self.rig.decode
        transfer_id, _ = side.expect(tokens, held=held)
        return prefill_pb2.PrefillRequest(
            **{
                "sequence_group_id": os.urandom(16),
                "transfer_id": transfer_id,
                "request_id": "r",
                "token_ids": tokens,
                "kv_address": side.address,
                "decode_incarnation": side.incarnation,
                "held_prefix_length": held,
                "fingerprint": FINGERPRINT,
                **changes,
            }
        )

    async def refusal(self, request):
        """Returns the error with which a prefill ends."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.stub.Prefill(request, timeout=PATIENCE_SECONDS)
        return caught.value

    async def report(self):
        call = self.nodes.Watch(node_pb2.WatchNodeRequest())
        try:
            return REPORT.from_proto(await call.read())
        finally:
            call.cancel()


@pytest.fixture
async def serving(make_rig):
    """A serving node."""
    async with Serving(make_rig()) as serving:
        yield await serving.start()


@pytest.fixture(autouse=True)
def fresh_metrics():
    """Removes a node's metrics after each test, since they live in one registry for each process."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


async def test_prefill_answers_with_its_metrics_once_the_transfer_is_committed(serving):
    tokens = list(range(100, 130))
    request = serving.request(tokens, held=4)
    response = await serving.stub.Prefill(request, timeout=PATIENCE_SECONDS)
    assert serving.rig.decode.completed[request.transfer_id].payload_bytes == response.kv_bytes == 26 * 20
    assert (response.num_cached_tokens, response.num_computed_tokens) == (0, 30)
    assert response.connector == "in_memory"
    assert response.compute_microseconds > 0
    assert response.exposed_microseconds <= response.transfer_microseconds
    assert sum(chunk.num_tokens for chunk in response.chunks) == 30
    assert sum(pushed.kv_bytes for pushed in response.pushed) == response.kv_bytes
    for parts in (response.chunks, response.pushed):
        times = [time for part in parts for time in (part.start_microseconds, part.end_microseconds)]
        assert times[::2] == sorted(times[::2])
        assert all(
            start <= end <= response.call_microseconds for start, end in zip(times[::2], times[1::2], strict=True)
        )
    assert response.chunks[0].start_microseconds <= response.pushed[0].start_microseconds
    assert len(response.chunks) > 1


async def test_a_call_of_a_traced_request_is_a_span_with_its_push_below_it(make_rig):
    tracer = KeptSpans()
    async with Serving(make_rig(), tracer=tracer) as serving:
        await serving.start()
        request, metadata = serving.request(list(range(100, 130)), held=4), (("traceparent", TRACEPARENT),)
        response = await serving.stub.Prefill(request, metadata=metadata, timeout=PATIENCE_SECONDS)
        await serving.stub.Prefill(serving.request([1, 2, 3]), timeout=PATIENCE_SECONDS)  # this call is not traced
        push, whole = tracer.spans
        assert (whole.name, whole.kind, whole.context.parent_id, whole.error) == ("prefill", "server", CALLER_ID, "")
        assert whole.attributes["outrider.num_computed_tokens"] == response.num_computed_tokens == 30
        assert sum(event.attributes["outrider.num_tokens"] for event in whole.events) == 30
        assert all(whole.started_at <= event.at <= whole.ended_at for event in whole.events)
        assert (push.name, push.kind, push.context.parent_id) == ("kv_push", "client", whole.context.span_id)
        assert push.attributes["outrider.kv_bytes"] == response.kv_bytes
        assert whole.started_at <= push.started_at <= push.ended_at == whole.ended_at
        serving.node._jobs.start_draining()
        with pytest.raises(grpc.aio.AioRpcError):
            await serving.stub.Prefill(serving.request([4]), metadata=metadata, timeout=PATIENCE_SECONDS)
        assert [(span.name, span.error) for span in tracer.spans[2:]] == [("prefill", "DRAINING")]


async def test_a_node_that_still_loads_says_so(make_rig):
    async with Serving(make_rig()) as serving:
        refused = await serving.refusal(serving.request([1, 2, 3]))
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert info_from_proto(await serving.nodes.GetNode(node_pb2.GetNodeRequest())).model is None


async def test_another_fingerprint_is_refused_by_naming_both(serving):
    refused = await serving.refusal(serving.request([1, 2], fingerprint="ff" * 32))
    assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert FINGERPRINT in refused.details()
    assert "ff" * 32 in refused.details()


async def test_cancelling_the_call_stops_the_job_and_frees_its_blocks(serving):
    serving.rig.decode.gate.clear()
    request = serving.request(list(range(40)))
    call = serving.stub.Prefill(request)
    await until(lambda: serving.rig.engine.pool.num_free_blocks < 64)
    call.cancel()
    await until(lambda: serving.node._jobs.num_jobs == 0)
    await serving.stub.Prefill(serving.request([1], to=serving.rig.other_decode))  # the loop has seen the cancellation
    serving.rig.decode.gate.set()
    await until(lambda: not serving.rig.loop._tasks)
    check_pool(serving.rig.engine.pool, [])
    assert request.transfer_id not in serving.rig.decode.completed


async def test_draining_refuses_new_jobs_and_lets_running_ones_end(serving, monkeypatch):
    monkeypatch.setattr("prefill_node.node.HANDOVER_SECONDS", 0.0)
    serving.rig.decode.gate.clear()
    running = serving.stub.Prefill(serving.request(list(range(12))))
    await until(lambda: serving.node._jobs.num_jobs == 1)
    draining = asyncio.create_task(serving.node.drain(4 * PATIENCE_SECONDS))
    await until(lambda: serving.node._jobs._is_draining)
    refused = await serving.refusal(serving.request([1, 2]))
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    assert from_rpc_error(refused).reason == "DRAINING"
    assert not draining.done()
    serving.rig.decode.gate.set()
    assert (await running).num_computed_tokens == 12
    await asyncio.wait_for(draining, PATIENCE_SECONDS)


async def test_a_job_that_a_router_sends_before_it_hears_of_the_drain_is_done(serving):
    draining = asyncio.create_task(serving.node.drain(4 * PATIENCE_SECONDS))
    await until(lambda: serving.node._state is NodeState.DRAINING)
    answer = await serving.stub.Prefill(serving.request(list(range(12))), timeout=PATIENCE_SECONDS)
    assert answer.num_computed_tokens == 12
    await asyncio.wait_for(draining, PATIENCE_SECONDS)


async def test_prompts_in_work_at_the_drains_deadline_are_told(serving):
    serving.rig.decode.gate.clear()
    running = serving.stub.Prefill(serving.request(list(range(12))))
    await until(lambda: serving.node._jobs.num_jobs == 1)
    await serving.node.drain(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running
    told = from_rpc_error(caught.value)
    assert (caught.value.code(), told.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert told.retry_after_seconds > 0
    assert serving.node._jobs.num_jobs == 0


async def test_a_full_queue_refuses_at_once(make_rig):
    async with Serving(make_rig(), max_jobs=1) as serving:
        await serving.start()
        serving.rig.decode.gate.clear()
        first = serving.stub.Prefill(serving.request(list(range(12))))
        await until(lambda: serving.node._jobs.num_jobs == 1)
        refused = await serving.refusal(serving.request([1, 2]))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(refused).retry_after_seconds > 0
        serving.rig.decode.gate.set()
        await first


async def test_the_report_counts_outstanding_tokens_and_steps(serving):
    await until(lambda: serving.rig.loop.progress.current_step == StepSnapshot(mark=1))  # the loop waits for work
    idle = await serving.report()
    assert (idle.state, idle.expected_step_seconds, idle.step_age_seconds) == (NodeState.SERVING, 0, 0)
    assert idle.load.kv_blocks_free == idle.load.kv_blocks_total == 64
    await serving.stub.Prefill(serving.request(list(range(20))), timeout=PATIENCE_SECONDS)
    busy = asyncio.Event()
    resume = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def before_layer(layer):
        if layer == 0 and not busy.is_set():
            loop.call_soon_threadsafe(busy.set)
            asyncio.run_coroutine_threadsafe(waited(resume), loop).result(PATIENCE_SECONDS)

    serving.rig.before_layer = before_layer
    running = serving.stub.Prefill(serving.request(list(range(500, 530))))
    await asyncio.wait_for(busy.wait(), PATIENCE_SECONDS)
    report = await serving.report()
    assert report.load.num_outstanding_tokens == 30
    assert report.load.num_running == 1
    assert report.mark > idle.mark
    assert report.expected_step_seconds > 0
    assert report.step_age_seconds > 0
    resume.set_result(None)
    await running
    done = await serving.report()
    assert done.load.num_outstanding_tokens == 0
    assert done.load.tokens_per_second > 0


async def test_the_node_says_who_it_is(serving):
    info = info_from_proto(await serving.nodes.GetNode(node_pb2.GetNodeRequest()))
    assert (info.name, info.role, info.state, info.model) == ("p", NodeRole.PREFILL, NodeState.SERVING, MODEL)


async def test_an_engine_failure_answers_internal_and_ends_the_process(serving):

    def break_down(layer):
        raise RuntimeError("the scripted engine breaks down")

    serving.rig.before_layer = break_down
    refused = await serving.refusal(serving.request([1, 2, 3]))
    assert refused.code() is grpc.StatusCode.INTERNAL
    assert await asyncio.wait_for(serving.exit_status, PATIENCE_SECONDS) == EXIT_ENGINE_FAILED
    refused = await serving.refusal(serving.request([1, 2, 3]))
    assert refused.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transfer_id", b"short"),
        ("decode_incarnation", b""),
        ("token_ids", []),
        ("token_ids", [1] * 151),
        ("token_ids", [1000]),
        ("kv_address", ""),
        ("kv_address", "host:port"),
        ("held_prefix_length", 4),
        ("scored_token_ids", [1] * 4),
        ("scored_token_ids", [1000]),
        ("prompt_logprobs", 21),
    ],
)
def test_bad_fields_are_named(field, value):
    good = {
        "transfer_id": b"t" * 16,
        "decode_incarnation": b"i" * 16,
        "token_ids": [1, 2, 3],
        "kv_address": "127.0.0.1:9",
        "fingerprint": FINGERPRINT,
    }
    check_call(CALL.from_proto(prefill_pb2.PrefillRequest(**good)), SERVED)
    changes = {"options": {"prompt_logprobs": value}} if field == "prompt_logprobs" else {field: value}
    with pytest.raises(InvalidRequestError) as caught:
        check_call(CALL.from_proto(prefill_pb2.PrefillRequest(**{**good, **changes})), SERVED)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"options": {"blend": {"piece_lengths": [1, 2], "recompute_share": float("nan")}}}, "blend.recompute_share"),
        ({"options": {"blend": {"piece_lengths": [1, 2]}}, "scored_token_ids": [2, 3]}, "blend"),
    ],
)
def test_pieces_that_cannot_be_blended_are_refused(changes, field):
    ids = {"transfer_id": b"t" * 16, "decode_incarnation": b"i" * 16}
    request = prefill_pb2.PrefillRequest(
        **ids, token_ids=[1, 2, 3], kv_address="127.0.0.1:9", fingerprint=FINGERPRINT, **changes
    )
    with pytest.raises(InvalidRequestError) as caught:
        check_call(CALL.from_proto(request), SERVED)
    assert caught.value.field == field


async def test_a_node_that_cannot_blend_computes_exactly(make_rig, monkeypatch):
    monkeypatch.setitem(globals(), "MODEL", replace(MODEL, can_blend=False))
    async with Serving(make_rig()) as serving:
        await serving.start()
        request = serving.request([*range(20, 60)], options={"blend": {"piece_lengths": [20, 20]}})
        answer = await serving.stub.Prefill(request, timeout=PATIENCE_SECONDS)
    assert (answer.num_computed_tokens, answer.num_blended_tokens, answer.num_recomputed_tokens) == (40, 0, 0)


def test_no_fingerprint_is_another_fingerprint():
    with pytest.raises(MismatchError):
        check_call(CALL.from_proto(prefill_pb2.PrefillRequest(token_ids=[1])), SERVED)


async def waited(future):
    await future
