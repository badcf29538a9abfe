from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import ConfigError
from outrider.rpc.channels import channel_options, open_channel, server_options
from outrider.rpc.tls import PLAINTEXT, PeerSecurity, SecurityConfig, TlsConfig, client_credentials
from outrider.service.config import ServerConfig
from outrider.service.health import Health
from outrider.service.server import bind

WAIT_SECONDS = 60.0


class TellPeer(grpc.aio.ServerInterceptor):
    """An interceptor that names each call's connection in the call's initial metadata."""

    async def intercept_service(self, continuation, details):
        handler = await continuation(details)
        if handler.response_streaming:
            return handler

        async def answer(request, context):
            await context.send_initial_metadata((("peer", context.peer()),))
            return await handler.unary_unary(request, context)

        return handler._replace(unary_unary=answer)


async def serve(
    client_tls: TlsConfig | None = None, security: PeerSecurity = PLAINTEXT, **options: float
) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=server_options(**options), interceptors=(TellPeer(),))
    health = Health(())
    await health.add_to(server)
    address = bind(server, ServerConfig(port=0), security, role="router", client_tls=client_tls)
    await server.start()
    await health.set_serving(is_serving=True)
    return server, address


async def check(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)).status


async def refusal(channel: grpc.aio.Channel) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await check(channel)
    return refused.value.code()


async def test_a_connection_that_is_old_is_replaced_and_its_streams_go_on():
    server, address = await serve(max_connection_age_seconds=0.2)
    peers = set()
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
        await watch.read()
        async with asyncio.timeout(WAIT_SECONDS):
            while len(peers) < 3:
                call = stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
                assert (await call).status == health_pb2.HealthCheckResponse.SERVING
                peers.add(dict(await call.initial_metadata())["peer"])
        assert not watch.done()
        watch.cancel()
    await server.stop(0)


async def test_a_flood_of_pings_ends_its_connection():
    server, address = await serve()
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            num_pings = 0
            while not reader.at_eof():
                writer.write(frame(PING, bytes(8)))
                await writer.drain()
                await reader.read(4096)
                num_pings += 1
    except ConnectionError:
        pass
    assert num_pings > 50, "who pings a little too often is forgiven"
    writer.close()
    await server.stop(0)


SETTINGS, PING = 4, 6


def frame(kind: int, payload: bytes = b"") -> bytes:
    """Returns an HTTP/2 frame for the whole connection, without flags."""
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + payload


async def test_a_proxy_variable_captures_no_channel(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    server, address = await serve()
    async with open_channel(address) as channel:
        assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


async def test_a_router_asks_its_clients_for_certificates_where_it_has_an_authority(tls_folder, certificate):
    trusting = TlsConfig(authority=tls_folder / "ca.pem")
    client = replace(trusting, certificate=tls_folder / "client.pem", private_key=tls_folder / "client-key.pem")
    server, address = await serve(replace(certificate, authority=trusting.authority))
    async with open_channel(address, credentials=client_credentials(client, None)) as channel:
        assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
    for stranger in (None, trusting):
        async with open_channel(address, credentials=client_credentials(stranger, None)) as channel:
            assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


async def test_a_router_may_show_its_clients_another_certificate_than_its_nodes(tls_folder, certificate):
    security = PeerSecurity(SecurityConfig(tls=replace(certificate, authority=tls_folder / "ca.pem")))
    server, address = await serve(certificate, security)
    credentials = client_credentials(TlsConfig(authority=tls_folder / "ca.pem"), None)
    async with open_channel(address, credentials=credentials) as channel:  # the server asks for no client certificate
        assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


async def test_another_name_than_the_address_can_be_asked_for(tls_folder, certificate):
    server, address = await serve(certificate)
    credentials = client_credentials(TlsConfig(authority=tls_folder / "ca.pem"), None)
    async with open_channel(address, credentials=credentials, server_name="outrider-node") as channel:
        assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
    async with open_channel(address, credentials=credentials, server_name="elsewhere.test") as channel:
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


async def test_an_authority_without_a_certificate_is_an_error_and_no_plaintext(tls_folder):
    with pytest.raises(ConfigError, match="a server needs a certificate and its private key"):
        await serve(TlsConfig(authority=tls_folder / "ca.pem"))


def test_bulk_channels_have_connections_of_their_own():
    assert channel_options(bulk=True) != channel_options(bulk=True)
    assert channel_options() == channel_options()


def test_half_a_key_pair_is_refused(tmp_path):
    with pytest.raises(ValueError, match="go together"):
        TlsConfig(certificate=tmp_path)
