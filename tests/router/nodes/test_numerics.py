"""Nodes that serve one model with different numerics."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import structlog

from outrider.engine.numerics import native_numerics, torch_numerics
from outrider.v1 import router_pb2
from tests.support.fake_resolver import FakeResolver
from tests.support.router_fakes import FakeDecodeNode, fake_model_info

EXACT = fake_model_info(numerics=str(native_numerics("amx")))
OTHER = fake_model_info(numerics=str(native_numerics("portable")))
UNKNOWN = fake_model_info(numerics="")


@pytest.fixture
def warnings():
    with structlog.testing.capture_logs() as logs:
        yield lambda: [entry for entry in logs if "numerics" in entry and entry["log_level"] == "warning"]


def num_mixed(cluster):
    return cluster.registry.get_sample_value("outrider:mixed_numerics_requests_total", {"model_name": EXACT.name})


@pytest.mark.parametrize(
    ("prefill", "is_local", "num_warnings", "counts"),
    [(EXACT, False, 0, False), (OTHER, False, 1, True), (OTHER, True, 1, False), (UNKNOWN, False, 0, False)],
    ids=["equal numerics", "others", "others, and the answer stays on one node", "a node that does not say"],
)
async def test_answers_that_move_between_numerics_are_counted_and_warned_of_once(
    cluster, warnings, prefill, is_local, num_warnings, counts
):
    """KV that both nodes have computed is not shared with requests that one node computes alone."""
    cluster.decode.model, cluster.prefill.model = EXACT, prefill
    cluster.decode.max_local_prefill_tokens = 1000 * is_local
    await cluster.serve()
    for _ in range(3):
        answer = await cluster.generate(max_tokens=2)
        assert len(answer.summary.metrics.nodes) == (1 if is_local else 2)
    assert num_mixed(cluster) == 3 * counts
    kinds = [warning["numerics"] for warning in warnings()]
    assert kinds == [{"decode-0": EXACT.numerics, "prefill-0": OTHER.numerics}] * num_warnings
    (salt,) = {opened.options.cache_salt for opened in cluster.decode.opened}
    assert (len(salt) == 32) is (prefill is OTHER)


async def test_a_third_kind_is_warned_of_again_and_the_same_kind_not(cluster, warnings):
    cluster.decode.model, cluster.prefill.model = EXACT, OTHER
    cluster.nodes += [
        FakeDecodeNode(name="decode-1", model=EXACT),
        FakeDecodeNode(name="decode-2", model=fake_model_info(numerics=str(torch_numerics("float32", "cpu")))),
    ]
    await cluster.serve()
    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 3)
    assert [len(warning["numerics"]) for warning in warnings()] == [2, 3]


async def test_a_reservation_is_filled_by_nodes_of_one_kind_only(node_pair):
    """The hashes of a reservation's KV blocks depend on the numerics."""
    node_pair.prefills[0].model, node_pair.prefills[1].model = EXACT, OTHER
    for node in node_pair.decodes:
        node.model = EXACT
    await node_pair.serve()
    for prefill in node_pair.prefills:
        prefill.prefill_seconds = 30.0
    answer = asyncio.ensure_future(node_pair.generate(max_tokens=2))
    await node_pair.eventually(lambda: any(prefill.requests for prefill in node_pair.prefills))
    busy = next(prefill for prefill in node_pair.prefills if prefill.requests)
    free = next(prefill for prefill in node_pair.prefills if prefill is not busy)
    await busy.stop()
    assert len((await answer).token_ids()) == 2
    assert free.requests == []
    retargets = [retarget for node in node_pair.decodes for retarget in node.retargeted]
    assert [retarget.transfer_id for retarget in retargets] == [b""]


async def test_the_shortest_window_of_all_nodes_is_served(cluster):
    """An answer may continue on any node."""
    cluster.nodes += [FakeDecodeNode(name="decode-1", model=fake_model_info(max_model_len=100))]
    cluster.nodes += [FakeDecodeNode(name="decode-2", model=fake_model_info(max_model_len=300))]
    await cluster.serve()
    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 3)
    assert (await cluster.stub.GetModel(router_pb2.GetModelRequest())).max_model_len == 100
    with pytest.raises(grpc.aio.AioRpcError, match="window of 100"):
        await cluster.generate(max_tokens=200)


async def test_a_window_is_longer_again_once_no_node_has_a_shorter_one(cluster):
    """A node that restarts still counts while it is away."""
    small, other = FakeDecodeNode(name="decode-1", model=fake_model_info(max_model_len=100)), FakeDecodeNode()
    cluster.nodes += [small, other]
    await cluster.serve()

    def window():
        return cluster.service.nodes.model().info.max_model_len

    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 3)
    assert window() == 100
    await small.stop()
    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 2)
    assert window() == 100
    larger = FakeDecodeNode(name="decode-1", model=fake_model_info(max_model_len=300))
    await larger.start(small.address)
    cluster.stack.push_async_callback(larger.stop)
    await cluster.eventually(lambda: len(cluster.service.nodes.decode_nodes) == 3)
    assert window() == 300


async def test_a_window_is_not_that_of_a_node_whose_address_is_gone(cluster):
    small = FakeDecodeNode(name="decode-1", model=fake_model_info(max_model_len=100))
    for node in (*cluster.nodes, small):
        await node.start()
    cluster.stack.push_async_callback(small.stop)
    prefill, decode = cluster.prefill.address, cluster.decode.address
    resolver = FakeResolver({"decode.test:1": [decode, small.address], prefill: [prefill]})
    await cluster.serve(resolver=resolver, decode_targets=("decode.test:1",), resolve_interval_seconds=0.1)
    await cluster.eventually(lambda: cluster.service.nodes.model().info.max_model_len == 100)
    resolver.set("decode.test:1", decode)
    await small.stop()
    await cluster.eventually(lambda: cluster.service.nodes.model().info.max_model_len == 512)
