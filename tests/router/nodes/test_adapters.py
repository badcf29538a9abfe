"""Adapters (LoRA) in a cluster: requests name them, and nodes that have them compute."""

from __future__ import annotations

import grpc

from outrider.request import Adapter
from outrider.v1 import router_pb2
from tests.router.adapter_calls import LAW, SQL
from tests.router.conftest import PATIENCE_SECONDS
from tests.support.adapters import ScriptedAdapters
from tests.support.router_fakes import FakeDecodeNode


async def model_of(cluster):
    return await cluster.stub.GetModel(router_pb2.GetModelRequest(), timeout=PATIENCE_SECONDS)


async def test_a_request_names_an_adapter_and_every_node_gets_it(cluster):
    for node in cluster.nodes:
        node.adapters = ScriptedAdapters(SQL, LAW)
    await cluster.serve()
    model = await model_of(cluster)
    assert [Adapter(each.name, each.fingerprint) for each in model.adapters] == [LAW, SQL]
    answers = {name: await cluster.generate(model=name, max_tokens=5) for name in ("", model.name, "sql", "law")}
    assert [answer.started.model for answer in answers.values()] == [model.name, model.name, "sql", "law"]
    assert len({answer.text() for answer in answers.values()}) == 3
    assert [opened.options.adapter for opened in cluster.decode.opened] == [None, None, SQL, LAW]
    assert [each.options.adapter.name for each in cluster.prefill.requests] == ["", "", "sql", "law"]
    assert len({opened.options.kv_salt for opened in cluster.decode.opened}) == 3
    await cluster.is_empty()
    for name, number in (("requests", 1), ("generation_tokens", 5), ("draft_tokens", 0), ("accepted_tokens", 0)):
        labels = {"model_name": model.name, "adapter": "sql"}
        assert cluster.registry.get_sample_value(f"outrider:adapter_{name}_total", labels) == number


async def test_other_names_and_fingerprints_are_refused(cluster):
    cluster.decode.adapters = ScriptedAdapters(SQL)
    await cluster.serve()
    failure = await cluster.fail(model="tax")
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert "with the adapters 'sql'" in failure.message
    for name in ("", "sql"):
        failure = await cluster.fail(model=name, adapter_fingerprint=LAW.fingerprint)
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_MISMATCH")
    answer = await cluster.generate(model="sql", adapter_fingerprint=SQL.fingerprint)
    assert answer.token_ids()


async def test_only_nodes_with_the_adapter_compute(node_pair):
    """No prefill node has it: decode nodes compute the prompts themselves."""
    node_pair.decodes[1].adapters = ScriptedAdapters(SQL)
    await node_pair.serve()
    for _ in range(4):
        await node_pair.generate(model="sql", max_tokens=2)
    assert [len(node.opened) for node in node_pair.decodes] == [0, 4]
    assert not any(node.requests for node in node_pair.prefills)
    node_pair.prefills[1].adapters.load("sql", "")
    node_pair.prefills[1].adapters = ScriptedAdapters(SQL)
    await node_pair.eventually(lambda: node_pair.link_of(node_pair.prefills[1]).adapters == {SQL})
    await node_pair.generate(model="sql", max_tokens=2)
    assert [len(node.requests) for node in node_pair.prefills] == [0, 1]


async def test_a_lost_nodes_answer_goes_on_where_the_adapter_is(node_pair):
    third = FakeDecodeNode(name="decode-2")
    node_pair.use((*node_pair.decodes, third), node_pair.prefills)
    for node in (*node_pair.decodes[:2], *node_pair.prefills):
        node.adapters = ScriptedAdapters(SQL)
    await node_pair.serve()
    expected = (await node_pair.generate(model="sql", max_tokens=200)).token_ids()
    node_pair.pace(0.003)
    task, busy, _ = await node_pair.begin(200, model="sql")
    await busy.stop()
    answer = await node_pair.finish(task)
    assert answer.token_ids() == expected
    assert answer.summary.metrics.attempts == 2
    assert not third.opened


async def test_the_error_names_an_adapter_that_no_node_has_any_more(cluster):
    cluster.decode.adapters = ScriptedAdapters(SQL)
    await cluster.serve(no_node_timeout_seconds=0.3)
    await cluster.decode.stop()
    await cluster.eventually(lambda: not cluster.service.nodes.decode_nodes)
    failure = await cluster.fail(model="sql")
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_NODE")
    assert f"no decode node with the adapter {SQL}" in failure.message


async def test_a_node_that_has_just_unloaded_it_is_not_asked_again(node_pair):
    """The router has not read the report yet."""
    for node in node_pair.decodes:
        node.adapters = ScriptedAdapters(SQL)
        node.reported_adapters = (SQL,)
    await node_pair.serve()
    first, second = node_pair.decodes
    first.adapters.unload("sql")
    answer = await node_pair.generate(model="sql", max_tokens=2)
    assert answer.token_ids()
    assert len(first.opened) <= 1
    assert len(second.opened) == 1
    await node_pair.is_empty()
