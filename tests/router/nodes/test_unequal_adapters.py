"""Nodes whose adapters (LoRA) differ: while one is loaded, by their settings, by their versions, after restarts."""

from __future__ import annotations

import grpc

from outrider.errors import InvalidRequestError
from outrider.request import Adapter
from tests.router.adapter_calls import SQL, SQL_OF_D, load, lose, nodes_with, restart, unload
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
    named = {"model": "sql", "adapter_fingerprint": BIG.fingerprint, "seed": 1, "max_tokens": 8}
    whole = await node_pair.generate(**named)
    rest = await node_pair.generate(**named, generated_token_ids=whole.token_ids()[:3])
    assert rest.started.adapter_fingerprint == BIG.fingerprint
    assert rest.token_ids() == whole.token_ids()[3:]
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


async def test_without_nodes_only_the_router_that_loaded_an_adapter_unloads_it(router_pair):
    """The other one would not keep the nodes from getting it again."""
    await router_pair.serve()
    first, second = router_pair.first, router_pair.second
    await load(first)
    await second.eventually(lambda: second.service.nodes.adapters.by_name)
    for node in first.nodes:
        await node.stop()
    links = [router.service.nodes for router in (first, second)]
    await first.eventually(lambda: not any([*each.decode_nodes, *each.prefill_nodes] for each in links))
    failure = await refused(unload(second))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_NODE")
    assert "unload it again when one does" in failure.message
    await unload(first)
    for node in first.nodes:
        await node.start()
    await first.eventually(lambda: not any(node.adapters.adapters for node in first.nodes))


async def test_an_adapter_stays_only_where_settings_have_it(node_pair):
    fixed, *others = node_pair.nodes
    fixed.adapters = ScriptedAdapters(SQL, fixed=("sql",))
    for node in others:
        node.adapters = ScriptedAdapters(SQL)
    await node_pair.serve()
    failure = await refused(unload(node_pair))
    assert (failure.code, failure.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADAPTERS_ARE_FIXED")
    assert failure.message == f"'sql' is in model.adapters of {fixed.name}, where it stays; other nodes unload it"
    assert nodes_with(node_pair, SQL) == [fixed.name]
    assert (await node_pair.generate(model="sql", max_tokens=2)).started.adapter_fingerprint == SQL.fingerprint


async def test_nodes_of_an_earlier_version_are_named_by_a_load_and_hinder_no_unload(node_pair):
    *others, old = node_pair.nodes
    old.knows_adapters = False
    await node_pair.serve()
    failure = await refused(load(node_pair))
    assert failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert failure.message == f"{old.name}: this version of the node has no adapters: Method not found!"
    assert not nodes_with(node_pair, SQL_OF_D)
    for node in others:
        node.adapters = ScriptedAdapters(SQL)
    await reported(node_pair, SQL, others)
    await unload(node_pair)
    assert not nodes_with(node_pair, SQL)
    assert not any(node.unwanted for node in node_pair.service.nodes.adapters._serving)


async def test_a_node_that_cannot_load_is_asked_less_and_less(node_pair, monkeypatch):
    pauses = []
    await node_pair.serve()
    await load(node_pair)
    adapters, node = node_pair.service.nodes.adapters, node_pair.decodes[0]
    wait = adapters._wait

    def recorded(condition, seconds):
        pauses.append(seconds)
        return wait(condition, min(seconds, 0.01))

    monkeypatch.setattr(adapters, "_wait", recorded)
    await restart(node_pair, node, refusal=InvalidRequestError("no file", field="directory"))
    await node_pair.eventually(lambda: len(pauses) > 7)
    assert pauses[:7] == [5, 10, 20, 40, 60, 60, 60]
    node.adapters.refusal = None
    await node_pair.eventually(lambda: node.adapters.adapters)


async def test_a_new_process_without_an_adapter_that_nobody_here_has_loaded_is_named(node_pair, capsys):
    """As after a restart of the router, which has forgotten what clients have loaded through it."""
    for node in node_pair.nodes:
        node.adapters = ScriptedAdapters(SQL)
    await node_pair.serve()
    await load(node_pair, name="law", directory="law")
    nodes = node_pair.service.nodes
    for node in (node_pair.decodes[0], node_pair.prefills[0]):
        await restart(node_pair, node)
        await node_pair.eventually(lambda: node.adapters.adapters)  # noqa: B023 awaited here
        await lose(node_pair, node)
        await node.start()
        await node_pair.eventually(lambda: len(nodes.decode_nodes) == len(nodes.prefill_nodes) == 2)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "load them again" in line]
    assert len(warnings) == 2
    for line, name in zip(warnings, ("decode-0", "prefill-0"), strict=True):
        assert "the node lacks adapters that others have" in line
        assert str(SQL) in line
        assert "law" not in line
        assert name in line
    assert nodes_with(node_pair, SQL) == ["decode-1", "prefill-1"]
