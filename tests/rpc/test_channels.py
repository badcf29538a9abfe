from __future__ import annotations

from dataclasses import replace

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import ConfigError
from outrider.rpc.channels import channel_options, open_channel, server_options
from outrider.rpc.credentials import TlsConfig, client_credentials
from outrider.rpc.peer_security import PLAINTEXT, PeerSecurity, SecurityConfig
from outrider.service.config import ServerConfig
from outrider.service.health import Health
from outrider.service.server import bind

WAIT_SECONDS = 60.0


async def serve(client_tls: TlsConfig | None = None, security: PeerSecurity = PLAINTEXT) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=server_options())
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
    async with open_channel(address, credentials=credentials) as channel:  # which is not asked for one
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
