"""Renewed certificates on real connections, and the warning about a port without authentication."""

from __future__ import annotations

from contextlib import asynccontextmanager

import grpc.aio
import pytest

from outrider.errors import AbortedError
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.receiver import KvReceiver
from outrider.rpc.tls import PeerSecurity, SecurityConfig
from outrider.service import security as security_module
from outrider.service.config import ServerConfig
from outrider.service.node_service import NodeServicer
from outrider.service.server import bind, make_server
from outrider.v1 import node_pb2, node_pb2_grpc
from router.nodes.transport import NodeTransport
from tests.service.conftest import INFO, REPORT
from tests.support.waiting import PATIENCE_SECONDS

Authority = pytest.importorskip("outrider.cluster.authority", reason="needs cryptography").Authority


def issue(folder):
    """Replaces the files by a new authority and its certificate."""
    for old in folder.glob("*.pem"):
        old.unlink()
    authority = Authority()
    authority.write(folder)
    return authority.issue(folder, "node", "outrider-node")


@pytest.fixture
def security(tmp_path):
    return PeerSecurity(SecurityConfig(tls=issue(tmp_path)))


@asynccontextmanager
async def node(security, port=0):
    server = make_server(ServerConfig(), security)
    node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(lambda: INFO, lambda: REPORT), server)
    address = bind(server, ServerConfig(port=port), security, role="decode_node")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def test_a_node_takes_renewed_certificates_without_a_restart(security, tmp_path):
    async with node(security) as address:
        stale = security.open_channel(address)  # which dials later
        issue(tmp_path)
        for channel, code in ((stale, grpc.StatusCode.UNAVAILABLE), (security.open_channel(address), None)):
            async with channel:
                try:
                    await node_pb2_grpc.NodeServiceStub(channel).GetNode(
                        node_pb2.GetNodeRequest(), timeout=PATIENCE_SECONDS
                    )
                    found = None
                except grpc.aio.AioRpcError as error:
                    found = error.code()
                assert found is code


async def test_a_router_that_connects_again_shows_renewed_certificates(security, tmp_path):
    async with node(security) as address:
        transport = NodeTransport(security, address=address)
        assert (await transport.identify(timeout_seconds=PATIENCE_SECONDS)).name == "node"
    issue(tmp_path)
    async with node(security, port=int(address.rpartition(":")[2])):
        assert (await transport.identify(timeout_seconds=PATIENCE_SECONDS)).name == "node"
        await transport.close()


def test_pushes_show_renewed_certificates(security, tmp_path):
    port = 0
    connector = Connector(KvTransferConfig(connector="grpc", connect_seconds=PATIENCE_SECONDS), security)
    spec = TransferSpec(transfer_id=b"t" * 16, incarnation=INFO.incarnation, start_token=0, end_token=1, planes=())
    for _ in range(2):
        receiver = KvReceiver(
            incarnation=INFO.incarnation,
            host="127.0.0.1",
            port=port,
            on_complete=lambda *_: None,
            on_failed=lambda *_: None,
            security=security,
        )
        port = receiver.start()
        with pytest.raises(AbortedError):  # this is an answer: the receiver knows no such transfer
            connector.connect(f"127.0.0.1:{port}", spec)
        receiver.stop()
        issue(tmp_path)
    connector.close()


@pytest.mark.parametrize(
    ("host", "is_protected", "warns"),
    [
        ("127.0.0.1", False, False),
        ("localhost", False, False),
        ("::1", False, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("10.0.0.7", False, True),
        ("node.internal", False, True),
        ("0.0.0.0", True, False),
    ],
)
def test_a_port_beyond_this_machine_that_asks_nobody_is_warned_of(monkeypatch, host, is_protected, warns):
    said = []
    monkeypatch.setattr(security_module._log, "warning", lambda message, **_: said.append(message), raising=False)
    security_module.warn_if_unauthenticated(host, what="this router", is_protected=is_protected, fix="docs/security.md")
    assert bool(said) is warns
    assert not said or said == ["ANYBODY who reaches this machine can use this router; docs/security.md"]
