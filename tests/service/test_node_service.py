from __future__ import annotations

import asyncio
import os

import grpc.aio
import pytest

from outrider.errors import AbortedError, MismatchError, NotFoundError, NotSupportedError, PeerLostError
from outrider.node import ModelInfo, NodeInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.rpc.tls import PLAINTEXT
from outrider.service.node_service import NodeServicer, default_node_name
from outrider.v1 import node_pb2_grpc, router_pb2
from router.nodes.transport import NodeTransport
from tests.support.adapters import MAX_LOAD_SECONDS, ScriptedAdapters
from tests.support.waiting import until

MODEL = ModelInfo(
    name="tiny", vocab_size=320, max_model_len=64, eos_token_ids=(2,), dtype="float32", fingerprint="f" * 64,
    vocabulary_fingerprint="v" * 64, revision="r", proposer="ngram", num_speculative_tokens=5, numerics="exact (amx)",
)  # fmt: skip
WAIT_SECONDS = 60.0
FILES = {"tokenizer.json": os.urandom(3_000_000), "empty.txt": b""}


class FakeNode:
    def __init__(self) -> None:
        self.incarnation = b"a" * 16
        self.step = 0
        self.files = dict(FILES)
        self.adapters = ScriptedAdapters()

    def info(self) -> NodeInfo:
        return NodeInfo(
            incarnation=self.incarnation,
            name="decode@x",
            role=NodeRole.DECODE,
            state=NodeState.SERVING,
            version="0.1.0",
            model=MODEL,
        )

    def report(self) -> NodeReport:
        self.step += 1
        load = NodeLoad(num_running=2, kv_blocks_total=10, kv_blocks_free=4, tokens_per_second=12.5)
        return NodeReport(
            state=NodeState.SERVING,
            incarnation=self.incarnation,
            mark=self.step,
            expected_step_seconds=0.02,
            load=load,
            adapters=() if self.adapters is None else self.adapters.adapters,
        )


@pytest.fixture
async def node_and_transport():
    node = FakeNode()
    server = grpc.aio.server()
    servicer = NodeServicer(node.info, node.report, lambda: node.files, adapters=lambda: node.adapters)
    node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport = NodeTransport(PLAINTEXT, address=f"127.0.0.1:{port}")
    yield node, transport, server
    await transport.close()
    await server.stop(0)


async def test_identity_and_tokenizer_arrive_whole(node_and_transport):
    node, transport, _ = node_and_transport
    assert await transport.identify(timeout_seconds=WAIT_SECONDS) == node.info()
    assert await transport.tokenizer_files() == FILES
    node.files = {}
    with pytest.raises(NotFoundError):
        await transport.tokenizer_files()


async def test_reports_come_until_another_process_answers(node_and_transport):
    node, transport, _ = node_and_transport
    reports = transport.reports(incarnation=b"a" * 16)
    first, second = await anext(reports), await anext(reports)
    assert second.mark > first.mark
    assert first.load.kv_blocks_free == 4
    node.incarnation = b"b" * 16
    with pytest.raises(PeerLostError, match="was restarted"):
        async for _ in reports:
            pass


async def test_adapters_are_in_the_first_report_and_in_those_after_a_change(node_and_transport):
    _, transport, _ = node_and_transport
    adapter = await transport.load_adapter("sql", "d")
    reports, others = (transport.reports(incarnation=b"a" * 16) for _ in range(2))
    assert [(await anext(reports)).adapters for _ in range(2)] == [(adapter,), None]
    assert (await anext(others)).adapters == (adapter,), "a stream that begins later has them, too"
    await transport.unload_adapter("sql")
    assert [(await anext(reports)).adapters for _ in range(2)] == [(), None]


async def test_a_stopped_server_is_a_lost_node(node_and_transport):
    _, transport, server = node_and_transport
    reports = transport.reports(incarnation=b"a" * 16)
    await anext(reports)
    await server.stop(0)
    with pytest.raises(PeerLostError) as lost:
        async for _ in reports:
            pass
    assert lost.value.node == transport._address


def test_a_node_is_named_by_role_and_address_unless_configured():
    assert default_node_name("decode_node", "127.0.0.1:5") == "decode@127.0.0.1:5"
    assert default_node_name("decode_node", "127.0.0.1:5", configured="d1") == "d1"


async def test_adapters_are_loaded_and_unloaded(node_and_transport):
    node, transport, _ = node_and_transport
    adapter = await transport.load_adapter("sql", "d")
    assert node.adapters.adapters == (adapter,)
    await transport.unload_adapter("sql")
    with pytest.raises(NotFoundError, match="no adapter 'sql'"):
        await transport.unload_adapter("sql")
    adapters, node.adapters = node.adapters, None
    with pytest.raises(PeerLostError, match="does not serve"):  # it still loads the model
        await transport.load_adapter("sql", "d")
    assert adapters.adapters == ()


async def test_only_the_adapter_of_a_fingerprint_is_loaded_and_unloaded(node_and_transport):
    node, transport, _ = node_and_transport
    adapter = await transport.load_adapter("sql", "d")
    with pytest.raises(MismatchError):
        await transport.load_adapter("law", "d", "0" * 64)
    with pytest.raises(NotFoundError):
        await transport.unload_adapter("sql", "0" * 64)
    assert node.adapters.adapters == (adapter,)
    await transport.unload_adapter("sql", adapter.fingerprint)
    assert node.adapters.adapters == ()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_load_whose_call_has_ended_has_no_effect(node_and_transport, monkeypatch, is_cancelled):
    node, transport, _ = node_and_transport
    node.adapters.proceeds.clear()
    monkeypatch.setattr("router.nodes.transport.ADAPTER_SECONDS", WAIT_SECONDS if is_cancelled else 0.2)
    call = asyncio.ensure_future(transport.load_adapter("sql", "d"))
    await until(lambda: node.adapters.num_loads)
    if is_cancelled:
        call.cancel()
    (failure,) = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(failure, asyncio.CancelledError if is_cancelled else AbortedError)
    await until(node.adapters.has_ended)
    node.adapters.proceeds.set()
    await until(lambda: node.adapters.num_loaded)
    assert node.adapters.adapters == ()


async def test_calls_that_wait_to_load_do_not_delay_an_unload():
    node = FakeNode()
    await asyncio.to_thread(node.adapters.load, "sql", "d")
    servicer = NodeServicer(node.info, node.report, adapters=lambda: node.adapters)
    node.adapters.proceeds.clear()
    requests = [router_pb2.LoadAdapterRequest(name=f"a{number}", directory="d") for number in range(40)]
    calls = [asyncio.ensure_future(servicer.LoadAdapter(request, None)) for request in requests]
    try:
        await until(lambda: node.adapters.num_loads == 2)
        async with asyncio.timeout(MAX_LOAD_SECONDS / 2):
            await servicer.UnloadAdapter(router_pb2.UnloadAdapterRequest(name="sql"), None)
        assert node.adapters.num_loads == 2, "only one adapter is loaded at a time"
        for call in calls[:-1]:
            call.cancel()
        await asyncio.gather(*calls[:-1], return_exceptions=True)
    finally:
        node.adapters.proceeds.set()
    await calls[-1]
    assert [adapter.name for adapter in node.adapters.adapters] == ["a39"]
    assert node.adapters.num_loads == 3, "calls that were cancelled while they waited load nothing"


async def test_a_node_that_does_not_compute_the_model_has_no_adapters():
    node = FakeNode()
    servicer = NodeServicer(node.info, node.report)
    with pytest.raises(NotSupportedError, match="no adapters"):
        servicer._desk()
