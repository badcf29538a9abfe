from __future__ import annotations

import shutil
import subprocess

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.channels import channel_options, open_channel, server_options
from outrider.rpc.credentials import TlsConfig
from outrider.service.config import ServerConfig
from outrider.service.health import Health
from outrider.service.server import bind

WAIT_SECONDS = 10.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"), "subjectAltName=DNS:localhost,IP:127.0.0.1")


def make_certificate(directory, names: str) -> TlsConfig:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", names,
         "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=directory, check=True, capture_output=True, timeout=WAIT_SECONDS,
    )  # fmt: skip
    return TlsConfig(
        certificate=directory / "cert.pem", private_key=directory / "key.pem", authority=directory / "cert.pem"
    )


async def serve(config: ServerConfig) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=server_options(max_message_bytes=config.max_message_bytes))
    health = Health(())
    await health.add_to(server)
    address = bind(server, config, role="router")
    await server.start()
    await health.set_serving(is_serving=True)
    return server, address


async def check(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)).status


async def test_a_proxy_variable_captures_no_channel(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    server, address = await serve(ServerConfig())
    async with open_channel(address) as channel:
        assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


async def test_mutual_tls_lets_only_those_in_that_show_a_certificate(certificate):
    server, address = await serve(ServerConfig(tls=certificate))
    async with open_channel(address, tls=certificate) as channel:
        assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
    for stranger in (None, TlsConfig(authority=certificate.authority)):
        async with open_channel(address, tls=stranger) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


async def test_an_address_that_was_found_by_a_name_shows_a_certificate_for_that_name(tmp_path):
    certificate = make_certificate(tmp_path, "subjectAltName=DNS:decode.test")
    server, address = await serve(ServerConfig(tls=certificate))
    async with open_channel(address, tls=certificate, server_name="decode.test") as channel:
        assert await check(channel) == health_pb2.HealthCheckResponse.SERVING
    async with open_channel(address, tls=certificate) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check(channel)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


def test_bulk_channels_have_connections_of_their_own():
    assert channel_options(bulk=True) != channel_options(bulk=True)
    assert channel_options() == channel_options()


def test_half_a_key_pair_is_refused(tmp_path):
    with pytest.raises(ValueError, match="go together"):
        TlsConfig(certificate=tmp_path)
