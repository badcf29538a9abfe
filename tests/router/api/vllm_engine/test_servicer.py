"""The engine service over gRPC: what an OpenAI gateway receives from a router."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile

import grpc
import grpc.aio
import pytest
import structlog.testing
from smg_grpc_proto import vllm_engine_pb2 as engine_pb2
from smg_grpc_proto import vllm_engine_pb2_grpc as engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from outrider.request import Adapter
from outrider.v1 import router_pb2
from router.api.clients import TokenFile
from router.api.vllm_engine.servicer import files_for_gateway
from tests.router.api.test_token_file import line, shown
from tests.router.conftest import PATIENCE_SECONDS, read_rest, refused
from tests.support.adapters import ScriptedAdapters
from tests.support.router_fakes.model import files_for_gateways

PROMPT = list(b"a prompt")


def request_of(*, request_id="r", stream=True, token_ids=PROMPT, **sampling):
    return engine_pb2.GenerateRequest(
        request_id=request_id,
        tokenized=engine_pb2.TokenizedInput(input_ids=token_ids),
        sampling_params=engine_pb2.SamplingParams(**{"seed": 3, "max_tokens": 8} | sampling),
        stream=stream,
    )


def engine_of(cluster):
    return engine_pb2_grpc.VllmEngineStub(cluster.channel)


async def ask(cluster, *, metadata=None, **fields):
    """Returns (the chunks, the Completes by index)."""
    call = engine_of(cluster).Generate(request_of(**fields), timeout=2 * PATIENCE_SECONDS, metadata=metadata)
    messages = await read_rest(call)
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    completes = [message.complete for message in messages if message.HasField("complete")]
    assert [complete.index for complete in completes] == list(range(len(completes)))
    assert not any(message.HasField("chunk") for message in messages[len(chunks) :]), "Completes are the last"
    return chunks, completes


async def fail(cluster, request=None, metadata=None, **fields):
    call = engine_of(cluster).Generate(request or request_of(**fields), timeout=PATIENCE_SECONDS, metadata=metadata)
    return await refused(call)


def ids_of(chunks, index=0):
    return [token_id for chunk in chunks if chunk.index == index for token_id in chunk.token_ids]


# ---------------------------------------------------------------- answers


async def test_a_stream_has_deltas_and_then_a_complete(cluster):
    cluster.decode.tokens_per_step = 3
    cluster.decode.num_accepted_per_step = 1
    cluster.prefill.num_cached_tokens = 4
    await cluster.serve()
    chunks, (complete,) = await ask(cluster)
    assert len(chunks) > 1
    assert {chunk.prompt_tokens for chunk in chunks} == {len(PROMPT)}
    assert [chunk.completion_tokens for chunk in chunks] == [len(chunk.token_ids) for chunk in chunks]
    assert len(ids_of(chunks)) == complete.completion_tokens == 8
    assert (complete.finish_reason, complete.prompt_tokens, complete.cached_tokens) == ("length", len(PROMPT), 4)
    assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (12, 3)
    assert complete.WhichOneof("matched_stop") is None
    await cluster.is_empty()


async def test_the_metadata_name_an_adapter(cluster):
    sql = Adapter("sql", "a1" * 32)
    for node in cluster.nodes:
        node.adapters = ScriptedAdapters(sql)
    await cluster.serve()
    for name in (None, b"sql", b"fake-model"):
        chunks, _ = await ask(cluster, metadata=None if name is None else (("model-bin", name),))
        assert chunks
    assert [opened.options.adapter for opened in cluster.decode.opened] == [None, sql, None]
    for name in (b"tax", b"\xff"):
        failure = await fail(cluster, metadata=(("model-bin", name),))
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_are_those_of_our_own_service(cluster, temperature):
    cluster.decode.tokens_per_step = 3
    cluster.decode.num_accepted_per_step = 2
    cluster.prefill.num_cached_tokens = 3
    await cluster.serve()
    own = await cluster.generate(token_ids={"ids": PROMPT}, seed=3, n=3, text=None, temperature=temperature)
    chunks, _ = await ask(cluster, n=3, temperature=temperature)
    nothing, completes = await ask(cluster, n=3, temperature=temperature, stream=False)
    assert nothing == []
    expected = [own.token_ids(index) for index in range(3)]
    assert [ids_of(chunks, index) for index in range(3)] == expected
    assert [list(complete.output_ids) for complete in completes] == expected
    assert [complete.completion_tokens for complete in completes] == [8, 8, 8]
    speculation = own.summary.metrics.speculative_decoding
    assert sum(complete.spec_draft_tokens for complete in completes) == speculation.num_draft_tokens
    assert sum(complete.spec_accepted_tokens for complete in completes) == speculation.num_accepted_draft_tokens
    assert sum(complete.cached_tokens for complete in completes) == own.summary.usage.num_cached_tokens
    assert cluster.decode.opened[0].options == cluster.decode.opened[1].options == cluster.decode.opened[2].options


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("sampling", "token_ids", "matched"),
    [
        ({}, [*b"one.END two", 256], None),
        ({"stop": ["nothing", ".END"]}, list(b"one.END"), ("matched_stop_str", ".END")),
        ({"stop_token_ids": [ord("."), 5]}, list(b"one."), ("matched_token_id", ord("."))),
        ({"stop_token_ids": [256]}, [*b"one.END two", 256], ("matched_token_id", 256)),
        ({"ignore_eos": True, "max_tokens": 12}, [*b"one.END two", 256], None),
    ],
)
async def test_stops_are_found_by_the_router(cluster, stream, sampling, token_ids, matched):
    cluster.decode.script = cluster.says("one.END two")
    cluster.decode.tokens_per_step = 5
    await cluster.serve()
    chunks, (complete,) = await ask(cluster, stream=stream, **{"max_tokens": 100} | sampling)
    assert (ids_of(chunks) if stream else list(complete.output_ids)) == token_ids
    assert complete.finish_reason == ("length" if "ignore_eos" in sampling else "stop")
    kind = complete.WhichOneof("matched_stop")
    assert (kind and (kind, getattr(complete, kind))) == matched


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_come_with_their_tokens(cluster, stream):
    await cluster.serve()
    chunks, (complete,) = await ask(cluster, stream=stream, logprobs=2)
    parts = [chunk.output_logprobs for chunk in chunks] if stream else [complete.output_logprobs]
    token_ids = ids_of(chunks) if stream else list(complete.output_ids)
    assert [token_id for part in parts for token_id in part.token_ids] == token_ids
    assert [value for part in parts for value in part.token_logprobs] == [-token_id / 8 for token_id in token_ids]
    tops = [top for part in parts for top in part.top_logprobs]
    assert [(list(top.token_ids), list(top.values)) for top in tops] == [([0, 1], [-1.0, -2.0])] * 8


async def test_a_seed_that_was_not_sent_is_drawn_and_logged(cluster):
    await cluster.serve()
    request = request_of()
    request.sampling_params.ClearField("seed")
    with structlog.testing.capture_logs() as log:
        for _ in range(2):
            await read_rest(engine_of(cluster).Generate(request, timeout=PATIENCE_SECONDS))
    seeds = [opened.options.sampling.seed for opened in cluster.decode.opened]
    assert seeds[0] != seeds[1]
    assert [entry["seed"] for entry in log if entry["event"] == "request admitted"] == seeds


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": 5000}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": [97] * 512}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": []}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": [100_000]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"temperature": -1.0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"logprobs": -1}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"logit_bias": {-1: 1.0}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"stop": ["a"] * 17}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"choice": {"choices": ["a"] * 1025}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"stop": ["a" * 300]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"json_schema": "{"}, grpc.StatusCode.INVALID_ARGUMENT),
        *(
            (field, grpc.StatusCode.UNIMPLEMENTED)
            for field in ({"structural_tag": "{}"}, {"truncate_prompt_tokens": 4}, {"prompt_logprobs": 1})
        ),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_cannot_be_served_is_refused_before_any_node_is_asked(cluster, fields, code):
    await cluster.serve()
    assert (await fail(cluster, **fields)).code is code
    assert cluster.decode.opened == []


async def test_pictures_and_other_engines_kv_are_not_supported(serving):
    for name, value in (("mm_inputs", {"im_token_id": 1}), ("kv_transfer_params_json", "{}")):
        request = request_of()
        request.MergeFrom(engine_pb2.GenerateRequest(**{name: value}))
        failure = await fail(serving, request)
        assert (failure.code, failure.field) == (grpc.StatusCode.UNIMPLEMENTED, name)


async def test_a_request_that_ends_nodes_is_not_sent_again(node_pair, monkeypatch):
    monkeypatch.setattr("router.requests.states.MAX_LOST_NODES", 1)
    for node in node_pair.decodes:
        node.fails_opens = True
    await node_pair.serve()
    failure = await fail(node_pair)
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "REQUEST_LOSES_NODES")
    assert failure.retry_seconds is None


async def test_an_answer_that_fits_no_message_is_not_computed_to_its_end(cluster, monkeypatch):
    monkeypatch.setattr("router.api.vllm_engine.messages.MAX_COMPLETE_BYTES", 200)
    await cluster.serve()
    failure = await fail(cluster, max_tokens=100, stream=False)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "ANSWER_TOO_LARGE")
    chunks, _ = await ask(cluster, max_tokens=100)
    assert len(ids_of(chunks)) == 100
    await cluster.is_empty()


# ---------------------------------------------------------------- clients


@pytest.fixture
def clients(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"{line('alice', 'a-secret')}\n{line('bob', 'b-secret')}\n", encoding="utf-8")
    return TokenFile(path)


async def test_no_call_answers_strangers(cluster, clients):
    await cluster.serve(clients=clients)
    stub, service = engine_of(cluster), engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    for method in service.methods:
        call = getattr(stub, method.name)(method.input_type._concrete_class(), timeout=PATIENCE_SECONDS)
        assert (await refused(call)).code is grpc.StatusCode.UNAUTHENTICATED, method.name


async def test_requests_belong_to_the_tenant_that_made_them(cluster, clients):
    cluster.decode.step_seconds = 0.05
    await cluster.serve(clients=clients)
    alice, bob = shown("a-secret"), shown("b-secret")
    call = engine_of(cluster).Generate(request_of(max_tokens=400), metadata=alice, timeout=2 * PATIENCE_SECONDS)
    await call.read()
    abort = engine_pb2.AbortRequest(request_ids=["r"])
    await engine_of(cluster).Abort(abort, metadata=bob)
    _, (others,) = await ask(cluster, max_tokens=2, metadata=bob)
    assert others.finish_reason == "length"
    assert [opened.options.cache_salt for opened in cluster.decode.opened] == [b"alice", b"bob"]
    await engine_of(cluster).Abort(abort, metadata=alice)
    assert (await read_rest(call))[-1].complete.finish_reason == "abort"


# ---------------------------------------------------------------- the engine itself


async def test_the_tokenizer_is_a_zip_with_its_hash(serving):
    call = engine_of(serving).GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=PATIENCE_SECONDS)
    chunks = await read_rest(call)
    data = b"".join(chunk.data for chunk in chunks)
    assert all(len(chunk.data) == 64 << 10 for chunk in chunks[:-1])
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
        assert found == files_for_gateway(files_for_gateways())


async def test_model_server_and_load_are_those_of_the_cluster(cluster):
    cluster.decode.step_seconds = 0.05
    await cluster.serve()
    stub = engine_of(cluster)
    info = await stub.GetModelInfo(engine_pb2.GetModelInfoRequest())
    own = await cluster.stub.GetModel(router_pb2.GetModelRequest())
    assert info.served_model_name == own.name
    assert (info.max_context_length, info.vocab_size, info.is_generation) == (own.max_model_len, own.vocab_size, True)
    assert list(info.eos_token_ids) == list(own.eos_token_ids)
    call = stub.Generate(request_of(max_tokens=400))
    await call.read()
    await cluster.eventually(lambda: any(n.load.kv_blocks_free < 1024 for n in cluster.service.nodes.statuses()[1:]))
    (load,) = (await stub.GetLoads(engine_pb2.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 0, 1)
    assert 0 < load.token_usage < 1
    assert (await stub.GetServerInfo(engine_pb2.GetServerInfoRequest())).active_requests == 1
    call.cancel()


async def test_it_is_healthy_from_the_first_node_to_the_drain(cluster):
    await cluster.start()
    stub, ask_health = engine_of(cluster), engine_pb2.HealthCheckRequest()
    for call in (stub.HealthCheck(ask_health), stub.GetModelInfo(engine_pb2.GetModelInfoRequest())):
        assert (await refused(call)).code is grpc.StatusCode.UNAVAILABLE
    await cluster.service.start(cluster.address)
    assert (await stub.HealthCheck(ask_health)).healthy
    await cluster.decode.stop()
    await cluster.eventually(lambda: not cluster.service.nodes.decode_nodes)
    assert (await stub.HealthCheck(ask_health)).healthy, "requests wait for the node"
    waiting = asyncio.ensure_future(ask(cluster))
    await cluster.eventually(lambda: cluster.context.queue.num_waiting == 1)
    await cluster.decode.start()
    assert (await waiting)[1][0].finish_reason == "length"


async def test_a_gateway_is_told_that_the_router_stops_while_that_still_takes_its_requests(serving):
    stub, ask_health = engine_of(serving), engine_pb2.HealthCheckRequest()
    assert (await stub.HealthCheck(ask_health)).healthy
    draining = asyncio.ensure_future(serving.service.drain(2 * PATIENCE_SECONDS))
    await serving.eventually(lambda: serving.service.requests.is_handing_over)
    health = await stub.HealthCheck(ask_health)
    assert (health.healthy, health.message) == (False, "the router is stopping")
    _, (complete,) = await ask(serving)
    assert complete.finish_reason == "length"
    assert not draining.done()
    draining.cancel()


@pytest.mark.parametrize("is_watched", [True, False])
async def test_a_gateway_that_watches_a_router_has_longer_to_leave_it(serving, monkeypatch, is_watched):
    handovers = {True: "GATEWAY_HANDOVER_SECONDS", False: "HANDOVER_SECONDS"}
    monkeypatch.setattr(f"router.router.{handovers[is_watched]}", 0.0)
    monkeypatch.setattr(f"router.router.{handovers[not is_watched]}", 100 * PATIENCE_SECONDS)
    if is_watched:
        assert (await engine_of(serving).HealthCheck(engine_pb2.HealthCheckRequest())).healthy
    async with asyncio.timeout(PATIENCE_SECONDS):
        await serving.service.drain(1000 * PATIENCE_SECONDS)


async def test_calls_that_it_does_not_have_say_so(serving):
    stub = engine_of(serving)
    for call in (
        stub.Embed(engine_pb2.EmbedRequest()),
        stub.FlushCache(common_pb2.FlushCacheRequest()),
        stub.StartProfile(common_pb2.StartProfileRequest()),
        stub.StopProfile(common_pb2.StopProfileRequest()),
        stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
    ):
        assert (await refused(call)).code is grpc.StatusCode.UNIMPLEMENTED
