"""Nodes whose adapters (LoRA) differ: while one is loaded, by their settings, by their versions, after restarts."""

from __future__ import annotations

import grpc

from outrider.request import Adapter
from tests.router.adapter_calls import SQL_OF_D, load
from tests.router.conftest import refused
from tests.support.adapters import ScriptedAdapters

BIG = Adapter("sql", "ff" * 32)


async def reported(pair, adapter, nodes):
    """Waits until the router has read that these nodes have the adapter."""
    await pair.eventually(lambda: all(adapter in pair.link_of(node).adapters for node in nodes))


async def test_a_name_keeps_its_adapter_until_a_load_has_ended(node_pair):
    """Another one of the name, by the first node's settings, is loaded elsewhere, and refused in the end."""
    node_pair.decodes[0].adapters = ScriptedAdapters(BIG, fixed=("sql",))
    await node_pair.serve()
    for node in node_pair.prefills:
        node.adapters.proceeds.clear()
    call = load(node_pair)
    await reported(node_pair, SQL_OF_D, node_pair.decodes[1:])
    answers = [await node_pair.generate(model="sql", max_tokens=2) for _ in range(4)]
    assert {answer.started.adapter_fingerprint for answer in answers} == {BIG.fingerprint}
    for node in node_pair.prefills:
        node.adapters.proceeds.set()
    assert (await refused(call)).reason == "ADAPTER_EXISTS"
    assert node_pair.service.nodes.adapters.by_name == {"sql": BIG}


async def test_an_adapter_has_no_requests_until_its_load_has_ended(node_pair):
    await node_pair.serve()
    last = node_pair.decodes[1]
    last.adapters.salt = "other"
    last.adapters.proceeds.clear()
    call = load(node_pair)
    await reported(node_pair, SQL_OF_D, [*node_pair.decodes[:1], *node_pair.prefills])
    assert (await node_pair.fail(model="sql")).reason == "MODEL_NOT_FOUND"
    last.adapters.proceeds.set()
    assert (await refused(call)).code is grpc.StatusCode.FAILED_PRECONDITION
    assert (await node_pair.fail(model="sql")).reason == "MODEL_NOT_FOUND"
    last.adapters.salt = ""
    await load(node_pair)
    assert (await node_pair.generate(model="sql", max_tokens=2)).started.adapter_fingerprint == SQL_OF_D.fingerprint
