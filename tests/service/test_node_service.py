from __future__ import annotations

import asyncio
import os

import grpc.aio
import pytest

from outrider.errors import NotFoundError, PeerLostError
from outrider.node import ModelInfo, NodeInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.rpc.channels import open_channel
from outrider.service.node_service import NodeServicer, NodeWatcher, default_node_name
from outrider.v1 import node_pb2_grpc

MODEL = ModelInfo(
    name="tiny", vocab_size=320, max_model_len=64, eos_token_ids=(2,), dtype="float32", fingerprint="f" * 64,
    vocabulary_fingerprint="v" * 64, revision="r", proposer="ngram", num_speculative_tokens=5, numerics="exact (amx)",
)  # fmt: skip
FILES = {"tokenizer.json": os.urandom(3_000_000), "empty.txt": b""}


class FakeNode:
    def __init__(self) -> None:
        self.incarnation = b"a" * 16
        self.step = 0
        self.files = dict(FILES)

    def info(self) -> NodeInfo:
        return NodeInfo(
            incarnation=self.incarnation, name="decode@x", role=NodeRole.DECODE,
            state=NodeState.SERVING, version="0.1.0", model=MODEL,
        )  # fmt: skip

    def report(self) -> NodeReport:
        self.step += 1
        load = NodeLoad(num_running=2, kv_blocks_total=10, kv_blocks_free=4, tokens_per_second=12.5)
        return NodeReport(
            state=NodeState.SERVING, incarnation=self.incarnation, step=self.step, expected_step_seconds=0.02, load=load
        )


@pytest.fixture
async def node_and_watcher():
    node = FakeNode()
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(node.info, node.report, lambda: node.files), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    yield node, NodeWatcher(channel, target="node-1", interval_seconds=0.05, grace_seconds=60.0), server
    await channel.close()
    await server.stop(0)


async def test_identity_and_tokenizer_arrive_whole(node_and_watcher):
    node, watcher, _ = node_and_watcher
    assert await watcher.get_node() == node.info()
    assert await watcher.get_tokenizer() == FILES
    node.files = {}
    with pytest.raises(NotFoundError):
        await watcher.get_tokenizer()


async def test_reports_come_until_another_process_answers(node_and_watcher):
    node, watcher, _ = node_and_watcher
    reports = watcher.reports(incarnation=b"a" * 16)
    first, second = await anext(reports), await anext(reports)
    assert second.step > first.step
    assert first.load.kv_blocks_free == 4
    node.incarnation = b"b" * 16
    with pytest.raises(PeerLostError, match="was restarted"):
        async for _ in reports:
            pass


async def test_a_stopped_server_is_a_lost_node(node_and_watcher):
    _, watcher, server = node_and_watcher
    reports = watcher.reports()
    await anext(reports)
    await server.stop(0)
    with pytest.raises(PeerLostError) as lost:
        async for _ in reports:
            pass
    assert lost.value.node == "node-1"


class FrozenServicer(NodeServicer):
    """Sends one report and then holds its breath, as a process does under SIGSTOP."""

    async def Watch(self, request, context):
        async for report in super().Watch(request, context):
            yield report
            await asyncio.Event().wait()


async def test_a_node_that_falls_silent_is_lost_though_its_connection_stands():
    node = FakeNode()
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServiceServicer_to_server(FrozenServicer(node.info, node.report), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    now = 0.0
    async with open_channel(f"127.0.0.1:{port}") as channel:
        reports = NodeWatcher(channel, target="node-1", grace_seconds=1.0, clock=lambda: now).reports()
        await anext(reports)
        now = 2.0
        with pytest.raises(PeerLostError, match="makes no progress"):
            await anext(reports)
    await server.stop(0)


def test_a_node_is_named_by_role_and_address_unless_configured():
    assert default_node_name("decode_node", "127.0.0.1:5") == "decode@127.0.0.1:5"
    assert default_node_name("decode_node", "127.0.0.1:5", configured="d1") == "d1"
