"""TLS and tokens of a client."""

from __future__ import annotations

import pytest

from outrider.client import AsyncClient, Client, TlsConfig
from outrider.errors import ConfigError, PeerLostError
from outrider.rpc.tls import TlsFiles
from outrider.v1 import router_pb2, router_pb2_grpc
from tests.client.answering_router import Serving


class GuardedRouter(router_pb2_grpc.RouterServiceServicer):
    """Returns the authorization of a call as the model's name."""

    def GetModel(self, request, context):
        metadata = dict(context.invocation_metadata())
        return router_pb2.GetModelResponse(name=metadata.get("authorization", "nobody"))


@pytest.fixture(scope="module")
def address(certificate):
    serving = Serving(GuardedRouter(), credentials=TlsFiles(certificate).server_credentials())
    yield serving.address
    serving.stop()


@pytest.fixture
def trusting(tls_folder):
    return TlsConfig(authority=tls_folder / "ca.pem")


async def test_a_token_goes_with_every_call(address, trusting):
    with Client(address, tls=trusting, token="s3cret") as client:
        assert client.model().name == "Bearer s3cret"
    with Client(address, tls=trusting) as client:
        assert client.model().name == "nobody"
    async with AsyncClient(address, tls=trusting, token="s3cret") as client:
        assert (await client.model()).name == "Bearer s3cret"


def test_a_router_that_nobody_vouches_for_is_not_spoken_to(address):
    with Client(address, tls=TlsConfig()) as client, pytest.raises(PeerLostError, match="cannot be reached"):
        client.model()
    with Client(address) as client, pytest.raises(PeerLostError):  # plaintext to a TLS port
        client.model()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_token_never_travels_in_plaintext(kind):
    with pytest.raises(ConfigError, match="a token needs tls=TlsConfig"):
        kind("127.0.0.1:1", token="s3cret")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tls: .*nowhere\.pem: No such file"):
        Client("127.0.0.1:1", tls=TlsConfig(authority=tmp_path / "nowhere.pem"))
