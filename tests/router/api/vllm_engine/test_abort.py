"""The engine service's Abort."""

from __future__ import annotations

import grpc
from smg_grpc_proto import vllm_engine_pb2 as engine_pb2

from router.api.clients import TokenFile
from tests.router.api.test_token_file import line, shown
from tests.router.api.vllm_engine.test_servicer import engine_of, request_of
from tests.router.conftest import PATIENCE_SECONDS, read_rest, refused


async def test_an_abort_frees_at_once_though_nobody_reads_the_stream(cluster):
    cluster.decode.step_seconds = 0.05
    await cluster.serve()
    call = engine_of(cluster).Generate(request_of(max_tokens=400, n=2), timeout=2 * PATIENCE_SECONDS)
    await cluster.eventually(lambda: cluster.decode.max_sent > 2)
    await engine_of(cluster).Abort(engine_pb2.AbortRequest(request_ids=["unknown", "r"]))
    await cluster.eventually(lambda: not cluster.decode.groups)
    messages = await read_rest(call)
    assert [message.complete.finish_reason for message in messages if message.HasField("complete")] == ["abort"] * 2
    await cluster.is_empty()


async def test_an_abort_reaches_a_request_beside_one_that_it_is_charged_for(cluster, tmp_path):
    """Running requests are aborted even if the call also names unknown ones, for which it is refused."""
    path = tmp_path / "tokens"
    path.write_text(line("alice", "a-secret", "rate=1") + "\n", encoding="utf-8")
    cluster.decode.step_seconds = 0.05
    await cluster.serve(clients=TokenFile(path))
    alice = shown("a-secret")
    call = engine_of(cluster).Generate(request_of(max_tokens=400), metadata=alice, timeout=2 * PATIENCE_SECONDS)
    await call.read()
    abort = engine_pb2.AbortRequest(request_ids=["unknown", "r"])
    failure = await refused(engine_of(cluster).Abort(abort, metadata=alice, timeout=PATIENCE_SECONDS))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await read_rest(call))[-1].complete.finish_reason == "abort"


async def test_only_few_requests_are_aborted_at_once(serving):
    call = engine_of(serving).Abort(engine_pb2.AbortRequest(request_ids=["r"] * 257))
    assert (await refused(call)).code is grpc.StatusCode.INVALID_ARGUMENT
