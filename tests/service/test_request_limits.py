"""Services accept only each other, not other holders of the authority's certificates; and calls are limited."""

from __future__ import annotations

import asyncio
import functools
import os
from dataclasses import replace

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.config.resolve import load_config
from outrider.errors import CapacityError, ConfigError
from outrider.kv_transfer.frames import MAX_MESSAGE_BYTES, METHOD
from outrider.kv_transfer.receiver import KvReceiver
from outrider.rpc.channels import open_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.tls import PLAINTEXT, PeerSecurity, SecurityConfig, TlsConfig, client_credentials
from outrider.service.config import ServerConfig
from outrider.service.health import Health
from outrider.service.node_service import NodeServicer
from outrider.service.open_calls import OpenCalls
from outrider.service.server import bind, make_server
from outrider.v1 import (
    node_pb2,
    node_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from tests.service.conftest import INFO, REPORT
from tests.support.kv_messages import encode_hello

authority = pytest.importorskip("outrider.cluster.authority", reason="needs cryptography")

WAIT_SECONDS = 60.0
DENIED, UNAVAILABLE = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE


class Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    async def Prefill(self, request, context):
        return prefill_pb2.PrefillResponse(num_computed_tokens=7)


class Sessions(session_pb2_grpc.DecodeServiceServicer):
    async def Session(self, request_iterator, context):
        await context.write(session_pb2.SessionReport())


@pytest.fixture(scope="module")
def security(tls_folder):
    return PeerSecurity(SecurityConfig(tls=tls_of(tls_folder, "node")))


def tls_of(folder, name):
    return TlsConfig(
        authority=folder / "ca.pem", certificate=folder / f"{name}.pem", private_key=folder / f"{name}-key.pem"
    )


@pytest.fixture
async def address(security):
    """The address of a node with all services, which requires certificates."""
    server = make_server(ServerConfig(), security)
    node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(lambda: INFO, lambda: REPORT), server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Prefill(), server)
    session_pb2_grpc.add_DecodeServiceServicer_to_server(Sessions(), server)
    await Health(()).add_to(server)
    address = bind(server, ServerConfig(), security, role="decode_node")
    await server.start()
    yield address
    await server.stop(0)


async def health(channel):
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)


async def get_node(channel):
    await node_pb2_grpc.NodeServiceStub(channel).GetNode(node_pb2.GetNodeRequest(), timeout=WAIT_SECONDS)


async def watch(channel):
    call = node_pb2_grpc.NodeServiceStub(channel).Watch(node_pb2.WatchNodeRequest(), timeout=WAIT_SECONDS)
    try:
        await anext(aiter(call))
    finally:
        call.cancel()


async def prefill(channel):
    await prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest(), timeout=WAIT_SECONDS)


async def session(channel):
    await anext(aiter(session_pb2_grpc.DecodeServiceStub(channel).Session(timeout=WAIT_SECONDS)))


CALLS = (health, get_node, watch, prefill, session)


async def outcome(call, channel):
    """Returns the status code of a call; None if it was answered."""
    try:
        await call(channel)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_a_service_may_call_everything(address, security):
    async with security.open_channel(address) as channel:
        assert [await outcome(call, channel) for call in CALLS] == [None] * len(CALLS)


async def test_an_operator_looks_into_nodes_and_opens_no_work(address, tls_folder):
    async with dial(address, tls_of(tls_folder, "client")) as channel:
        found = {call: await outcome(call, channel) for call in CALLS}
    assert found == {health: None, get_node: None, watch: None, prefill: DENIED, session: DENIED}


async def test_another_certificate_of_the_authority_sees_health_only(tmp_path):
    issuing = authority.Authority()
    issuing.write(tmp_path)
    config = SecurityConfig(tls=issuing.issue(tmp_path, "node", "outrider-node", "127.0.0.1"))
    own = PeerSecurity(config)
    server = make_server(ServerConfig(), own)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Prefill(), server)
    await Health(()).add_to(server)
    address = bind(server, ServerConfig(), own, role="prefill_node")
    await server.start()
    async with dial(address, issuing.issue(tmp_path, "client", "somebody")) as channel:
        assert [await outcome(call, channel) for call in (health, prefill)] == [None, DENIED]
    # A server with such a certificate is not accepted as a service, either.
    async with PeerSecurity(replace(config, peer_name="somebody")).open_channel(address) as channel:
        assert await outcome(health, channel) is UNAVAILABLE
    await server.stop(0)


async def test_without_a_certificate_of_the_authority_nothing_is_answered(address, tls_folder, tmp_path):
    foreign = authority.Authority()
    foreign.write(tmp_path)
    for stranger in (
        None,
        TlsConfig(authority=tls_folder / "ca.pem"),
        replace(foreign.issue(tmp_path, "node", "outrider-node"), authority=tls_folder / "ca.pem"),
    ):
        async with dial(address, stranger) as channel:
            assert {await outcome(call, channel) for call in CALLS} == {UNAVAILABLE}, stranger


class Endless(router_pb2_grpc.RouterServiceServicer):
    """A service whose streams end only with their clients."""

    async def Generate(self, request, context):
        await context.write(router_pb2.GenerateResponse())
        await asyncio.Event().wait()

    async def WatchCluster(self, request, context):
        yield router_pb2.WatchClusterResponse()
        await asyncio.Event().wait()

    async def Abort(self, request, context):
        return router_pb2.AbortResponse(aborted=True)


@pytest.mark.parametrize("method", ["Generate", "WatchCluster"])
async def test_a_process_with_all_the_calls_that_it_may_have_answers_probes_and_frees(method):
    refusals = []
    server = make_server(ServerConfig(max_concurrent_rpcs=16), calls=OpenCalls(on_refused=refusals.append))
    router_pb2_grpc.add_RouterServiceServicer_to_server(Endless(), server)
    node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(lambda: INFO, lambda: REPORT), server)
    await Health(()).add_to(server)
    address = bind(server, ServerConfig(port=0), role="router")
    await server.start()
    async with open_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        open_call = functools.partial(getattr(stub, method), getattr(router_pb2, f"{method}Request")())
        calls = [open_call() for _ in range(16)]
        for call in calls:
            await call.read()
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await open_call().read()
            error = from_rpc_error(refused.value)
            assert isinstance(error, CapacityError)
            assert (error.reason, error.retry_after_seconds) == ("TOO_MANY_CALLS", 1.0)
        assert [refusal.reason for refusal in refusals] == ["TOO_MANY_CALLS"] * 3
        assert [await outcome(call, channel) for call in (health, get_node, watch)] == [None] * 3
        assert (await stub.Abort(router_pb2.AbortRequest(), timeout=WAIT_SECONDS)).aborted
        calls.pop().cancel()

        async def open_one(channel):
            await open_call().read()

        async with asyncio.timeout(WAIT_SECONDS):
            while (code := await outcome(open_one, channel)) is not None:  # until the server sees the cancellation
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
    await server.stop(0)


async def test_streams_that_watch_a_process_do_not_keep_its_probes_out():
    server = make_server(ServerConfig(max_concurrent_rpcs=16))
    await Health(()).add_to(server)
    address = bind(server, ServerConfig(port=0), role="router")
    await server.start()
    async with open_channel(address) as channel:
        watch_health = health_pb2_grpc.HealthStub(channel).Watch
        calls = [watch_health(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS) for _ in range(1100)]
        found = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        refused = [from_rpc_error(error) for error in found if isinstance(error, grpc.aio.AioRpcError)]
        assert len(found) - len(refused) == 16
        assert "TOO_MANY_CALLS" in {error.reason for error in refused}
        assert await outcome(health, channel) is None
        for call in calls:
            call.cancel()
    await server.stop(0)


def dial(address, tls):
    """Opens a channel to the address as Outrider's clients do."""
    return open_channel(address, credentials=client_credentials(tls, None))


def test_kv_is_taken_from_services_only(security, tls_folder):
    ignore = {"on_complete": lambda *_: None, "on_failed": lambda *_: None}
    receiver = KvReceiver(incarnation=INFO.incarnation, host="127.0.0.1", security=security, **ignore)
    address = f"127.0.0.1:{receiver.start()}"
    operator = PeerSecurity(SecurityConfig(tls=tls_of(tls_folder, "client")))
    hello = encode_hello(os.urandom(16), INFO.incarnation)
    codes = []
    for caller in (security, operator, PLAINTEXT):
        with caller.open_bulk_channel(address, max_message_bytes=MAX_MESSAGE_BYTES) as channel:
            call = channel.stream_stream(METHOD)(iter([hello]), timeout=WAIT_SECONDS)
            try:
                next(call)
                codes.append(None)
            except grpc.RpcError as error:
                codes.append(error.code())
    assert codes == [None, DENIED, UNAVAILABLE]
    receiver.stop()


@pytest.mark.parametrize("given", [("authority",), ("certificate", "private_key")])
def test_half_of_mutual_tls_is_an_error_of_the_settings(given):
    overrides = [f"security.tls.{name}=/some/{name}.pem" for name in given]
    with pytest.raises(ConfigError, match=r"security: tls: certificate, private_key and authority go together"):
        load_config({"security": SecurityConfig}, file=None, environ={}, overrides=overrides)
