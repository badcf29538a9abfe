"""Nodes whose adapters (LoRA) differ: while one is loaded, by their settings, by their versions, after restarts."""

from __future__ import annotations

import grpc

from outrider.request import Adapter
from tests.router.adapter_calls import SQL, SQL_OF_D, load, unload
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


async def test_an_answer_is_continued_by_any_adapter_of_its_fingerprint(node_pair):
    """model.adapters changes from node to node; the name stands for the other adapter already."""
    (old, new), prefills = node_pair.decodes, node_pair.prefills
    for nodes, adapter in (((old, prefills[0]), SQL), ((new, prefills[1]), BIG)):
        for node in nodes:
            node.adapters = ScriptedAdapters(adapter)
    await node_pair.serve()
    assert (await node_pair.generate(model="sql", max_tokens=2)).started.adapter_fingerprint == SQL.fingerprint
    whole = await node_pair.generate(model="sql", adapter_fingerprint=BIG.fingerprint)
    begun = whole.token_ids()[:3]
    rest = await node_pair.generate(model="sql", adapter_fingerprint=BIG.fingerprint, generated_token_ids=begun)
    assert rest.started.adapter_fingerprint == BIG.fingerprint
    assert [*begun, *rest.token_ids()][: len(whole.token_ids())] == whole.token_ids()
    assert [len(node.opened) for node in node_pair.decodes] == [1, 2]
    failure = await node_pair.fail(model="sql", adapter_fingerprint=SQL_OF_D.fingerprint)
    assert failure.reason == "ADAPTER_MISMATCH"


async def test_an_adapter_that_is_being_unloaded_has_no_requests(node_pair):
    for node, adapter in zip(node_pair.decodes, (SQL, BIG), strict=True):
        node.adapters = ScriptedAdapters(adapter)
    await node_pair.serve()
    node_pair.decodes[1].reported_adapters = (BIG,)  # its reports are late
    await unload(node_pair)
    failure = await node_pair.fail(model="sql", adapter_fingerprint=BIG.fingerprint)
    assert failure.reason == "MODEL_NOT_FOUND"
