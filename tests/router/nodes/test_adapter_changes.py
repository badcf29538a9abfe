"""Adapters (LoRA) that clients load and unload: nodes are made to have them, and to have them no more."""

from __future__ import annotations

import asyncio
import hashlib
import os

import grpc
import pytest

from outrider.errors import AlreadyRunningError, InvalidRequestError, NotAllowedError
from outrider.request import Adapter
from router.api.clients import TokenFile
from router.nodes import adapters as cluster_adapters
from router.nodes import transport
from tests.router.adapter_calls import SQL, SQL_OF_D, fingerprints_on, load, lose, nodes_with, restart, unload
from tests.router.conftest import refused
from tests.support.adapters import ScriptedAdapters


async def test_an_adapter_is_loaded_on_all_nodes_and_can_be_used_at_once(node_pair):
    await node_pair.serve()
    loaded = (await load(node_pair)).adapter
    assert loaded.name == "sql"
    assert (await load(node_pair)).adapter == loaded
    for node in node_pair.nodes:
        assert [adapter.fingerprint for adapter in node.adapters.adapters] == [loaded.fingerprint]
    answer = await node_pair.generate(model="sql", max_tokens=2)
    assert answer.started.model == "sql"
    await unload(node_pair)
    assert not any(node.adapters.adapters for node in node_pair.nodes)
    await node_pair.eventually(lambda: not node_pair.service.nodes.adapters.by_name)
    assert (await node_pair.fail(model="sql")).reason == "MODEL_NOT_FOUND"
    failure = await refused(unload(node_pair))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (
            NotAllowedError("set it", reason="ADAPTERS_ARE_FIXED"),
            grpc.StatusCode.PERMISSION_DENIED,
        ),
        (InvalidRequestError("it has DoRA", field="directory", reason="BAD_ADAPTER"), grpc.StatusCode.INVALID_ARGUMENT),
        (AlreadyRunningError("another has the name", reason="ADAPTER_EXISTS"), grpc.StatusCode.ALREADY_EXISTS),
    ],
    ids=lambda value: getattr(value, "reason", ""),
)
async def test_a_refusal_names_the_node_and_leaves_nothing_on_others(node_pair, refusal, code):
    await node_pair.serve()
    node_pair.prefills[1].adapters.refusal = refusal
    failure = await refused(load(node_pair))
    assert (failure.code, failure.reason) == (code, refusal.reason)
    assert failure.message == f"prefill-1: {refusal.message}"
    assert not any(node.adapters.adapters for node in node_pair.nodes)


async def test_directories_that_differ_between_nodes_are_refused(node_pair):
    node_pair.decodes[0].adapters = ScriptedAdapters(SQL, salt="other")
    await node_pair.serve()
    failure = await refused(load(node_pair, name="law"))
    assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "different adapters on decode-0, decode-1, prefill-0, prefill-1" in failure.message
    assert [len(node.adapters.adapters) for node in node_pair.nodes] == [1, 0, 0, 0]


async def test_a_node_that_comes_later_gets_it_before_it_is_a_candidate(node_pair, monkeypatch):
    monkeypatch.setattr(cluster_adapters, "RETRY_SECONDS", 0.05)
    late, prefill = node_pair.decodes[1], node_pair.prefills[0]
    await node_pair.serve()
    await late.stop()
    await node_pair.eventually(lambda: len(node_pair.service.nodes.decode_nodes) == 1)
    adapter = (await load(node_pair)).adapter
    await prefill.stop()  # it was restarted, and its first attempt fails
    await node_pair.eventually(lambda: len(node_pair.service.nodes.prefill_nodes) == 1)
    prefill.adapters, prefill.incarnation = ScriptedAdapters(), b"another process!"
    prefill.adapters.refusal = InvalidRequestError("the disk is not mounted yet", field="directory")
    await asyncio.gather(late.start(), prefill.start())
    await node_pair.eventually(lambda: late.adapters.adapters)
    prefill.adapters.refusal = None
    await node_pair.eventually(lambda: prefill.adapters.adapters)
    assert {each.fingerprint for node in node_pair.nodes for each in node.adapters.adapters} == {adapter.fingerprint}


async def test_what_somebody_else_has_unloaded_is_not_loaded_again(node_pair):
    await node_pair.serve()
    await load(node_pair)
    for node in node_pair.nodes:
        node.adapters.unload("sql")
    await node_pair.eventually(lambda: not node_pair.service.nodes.adapters.by_name)
    await node_pair.decodes[0].stop()
    await node_pair.eventually(lambda: len(node_pair.service.nodes.decode_nodes) == 1)
    await node_pair.decodes[0].start()
    await node_pair.eventually(lambda: len(node_pair.service.nodes.decode_nodes) == 2)
    assert not any(node.adapters.adapters for node in node_pair.nodes)


async def test_without_nodes_nothing_is_loaded(cluster):
    cluster.nodes = []
    await cluster.start(decode_targets=("127.0.0.1:1",))
    failure = await refused(load(cluster))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_NODE")
    await cluster.stack.aclose()


async def test_a_name_can_get_another_adapter(node_pair):
    await node_pair.serve()
    old = (await load(node_pair, directory="v1")).adapter
    await unload(node_pair)
    new = (await load(node_pair, directory="v2")).adapter
    assert old.fingerprint != new.fingerprint
    await restart(node_pair, node_pair.decodes[0])
    await node_pair.eventually(lambda: fingerprints_on(node_pair.nodes[:1]) == {new.fingerprint})


async def test_a_node_that_was_lost_changes_its_old_adapter_for_the_new_one(node_pair):
    await node_pair.serve()
    await load(node_pair, directory="v1")
    stale = node_pair.decodes[0]
    await lose(node_pair, stale)
    await unload(node_pair)
    new = Adapter("sql", (await load(node_pair, directory="v2")).adapter.fingerprint)
    adapters = node_pair.service.nodes.adapters
    seen = set()
    await stale.start()
    await node_pair.eventually(lambda: seen.add(adapters.by_name["sql"]) or new in stale.adapters.adapters)
    assert seen == {new}
    assert adapters.by_name == {"sql": new}


async def test_a_node_with_another_adapter_in_the_directory_is_asked_once(node_pair, monkeypatch):
    monkeypatch.setattr(cluster_adapters, "RETRY_SECONDS", 0.01)
    await node_pair.serve()
    loaded = (await load(node_pair)).adapter
    node = node_pair.decodes[0]
    await lose(node_pair, node)
    node.adapters, node.incarnation = ScriptedAdapters(salt="other"), os.urandom(16)
    await node.start()
    await node_pair.eventually(lambda: node.adapters.num_loads)
    for _ in range(3):  # the router has time to ask again
        await lose(node_pair, node)
        await node.start()
        await node_pair.eventually(lambda: len(node_pair.service.nodes.decode_nodes) == 2)
        await node_pair.generate(model="sql", max_tokens=2)
    assert (node.adapters.num_loads, node.adapters.adapters) == (1, ())
    node.adapters.salt = ""
    assert (await load(node_pair)).adapter == loaded
    assert fingerprints_on([node]) == {loaded.fingerprint}


async def test_what_is_unloaded_while_a_node_loads_it_does_not_come_back(node_pair):
    await node_pair.serve()
    await load(node_pair)
    late = node_pair.decodes[0]
    await lose(node_pair, late)
    late.adapters, late.incarnation = ScriptedAdapters(), os.urandom(16)
    late.adapters.proceeds.clear()
    await late.start()
    await node_pair.eventually(lambda: late.adapters.num_loads)
    await unload(node_pair)
    late.adapters.proceeds.set()
    other = (await load(node_pair, name="law", directory="law")).adapter
    await node_pair.eventually(lambda: node_pair.link_of(late).adapters)
    assert {adapter.fingerprint for node in node_pair.nodes for adapter in node.adapters.adapters} == {
        other.fingerprint
    }


async def test_what_is_unloaded_while_a_node_is_lost_does_not_come_back(node_pair):
    await node_pair.serve()
    await load(node_pair)
    lost = node_pair.decodes[0]
    await lose(node_pair, lost)
    await unload(node_pair)
    await lost.start()
    await node_pair.eventually(lambda: not lost.adapters.adapters)
    assert not node_pair.service.nodes.adapters.by_name


async def test_a_load_goes_on_without_its_client(node_pair):
    await node_pair.serve()
    slow = node_pair.decodes[0]
    slow.adapters.proceeds.clear()
    call = load(node_pair)
    await node_pair.eventually(lambda: all(node.adapters.num_loads for node in node_pair.nodes))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    slow.adapters.proceeds.set()
    await node_pair.eventually(lambda: node_pair.service.nodes.adapters.by_name)
    await node_pair.eventually(lambda: all(node.adapters.adapters for node in node_pair.nodes))
    await restart(node_pair, node_pair.prefills[0])
    await node_pair.eventually(lambda: node_pair.prefills[0].adapters.adapters)


async def test_a_late_node_gets_the_adapter_later(node_pair, monkeypatch):
    monkeypatch.setattr(transport, "ADAPTER_SECONDS", 0.3)
    monkeypatch.setattr(cluster_adapters, "RETRY_SECONDS", 0.05)
    await node_pair.serve()
    late = node_pair.decodes[0]
    late.adapters.proceeds.clear()
    await load(node_pair)
    assert fingerprints_on([late]) == set()
    late.adapters.proceeds.set()
    await node_pair.eventually(lambda: late.adapters.adapters)


async def test_a_node_that_is_lost_meanwhile_gets_the_adapter_later(node_pair):
    await node_pair.serve()
    frozen = node_pair.decodes[0]
    frozen.freeze()
    await load(node_pair)
    assert not frozen.adapters.adapters
    frozen.thaw()
    await node_pair.eventually(lambda: frozen.adapters.adapters)


async def test_a_refused_load_leaves_nothing_on_late_nodes(node_pair, monkeypatch):
    monkeypatch.setattr(transport, "ADAPTER_SECONDS", 0.3)
    await node_pair.serve()
    node_pair.prefills[1].adapters.refusal = InvalidRequestError("it has DoRA", field="directory")
    late = node_pair.decodes[0]
    late.adapters.proceeds.clear()
    assert (await refused(load(node_pair))).code is grpc.StatusCode.INVALID_ARGUMENT
    assert not any(node.adapters.adapters for node in node_pair.nodes)
    late.adapters.proceeds.set()
    node_pair.prefills[1].adapters.refusal = None
    law = (await load(node_pair, name="law", directory="law")).adapter
    assert [adapter.name for adapter in late.adapters.adapters] == [law.name]


async def test_adapters_of_a_nodes_settings_stay(node_pair):
    for node in node_pair.nodes:
        node.adapters = ScriptedAdapters(SQL, fixed=("sql",))
    await node_pair.serve()
    failure = await refused(unload(node_pair))
    assert (failure.code, failure.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADAPTERS_ARE_FIXED")
    assert node_pair.service.nodes.adapters.by_name == {"sql": SQL}
    assert len(nodes_with(node_pair, SQL)) == 4


async def test_what_one_nodes_settings_have_is_not_wanted_elsewhere_any_more(node_pair):
    fixed = node_pair.decodes[0]
    fixed.adapters = ScriptedAdapters(SQL_OF_D, fixed=("sql",))
    await node_pair.serve()
    await load(node_pair)
    assert f"in model.adapters of {fixed.name}," in (await refused(unload(node_pair))).message
    await restart(node_pair, node_pair.decodes[1])
    await load(node_pair, name="law", directory="law")
    await node_pair.eventually(lambda: node_pair.decodes[1].adapters.adapters)
    assert nodes_with(node_pair, SQL_OF_D) == [fixed.name]
    assert node_pair.service.nodes.adapters.by_name["sql"] == SQL_OF_D


async def test_a_load_that_is_refused_leaves_alone_what_was_there(node_pair):
    for node in node_pair.nodes[:2]:
        node.adapters = ScriptedAdapters(SQL_OF_D)
    node_pair.prefills[1].adapters.refusal = InvalidRequestError("no file", field="directory")
    await node_pair.serve()
    await refused(load(node_pair))
    assert nodes_with(node_pair, SQL_OF_D)[:2] == ["decode-0", "decode-1"]


async def test_a_wanted_adapter_keeps_its_name(node_pair, capsys):
    await node_pair.serve()
    wanted = Adapter("sql", (await load(node_pair)).adapter.fingerprint)
    for node in node_pair.decodes:
        await restart(node_pair, node, [SQL])
    adapters = node_pair.service.nodes.adapters
    links = node_pair.service.nodes
    await node_pair.eventually(lambda: [link.adapters for link in links.decode_nodes] == [{SQL}, {SQL}])
    assert adapters.is_served(wanted)
    assert not adapters.is_served(SQL)
    failure = await refused(load(node_pair, directory="other"))
    assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "ADAPTER_EXISTS")
    assert capsys.readouterr().out.count("nodes have different adapters of one name") == 1
    await unload(node_pair)
    await node_pair.eventually(lambda: not any(node.adapters.adapters for node in node_pair.nodes))


async def test_only_so_many_loads_run_at_a_time(node_pair, monkeypatch):
    monkeypatch.setattr(cluster_adapters, "MAX_CHANGES", 2)
    await node_pair.serve()
    node_pair.decode.adapters.proceeds.clear()
    calls = [load(node_pair, name=name) for name in ("one", "two")]
    await node_pair.eventually(lambda: len(node_pair.service.nodes.adapters._changes) == 2)
    failure = await refused(load(node_pair, name="three"))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    node_pair.decode.adapters.proceeds.set()
    assert [(await call).adapter.name for call in calls] == ["one", "two"]


async def test_only_the_latest_lost_nodes_are_remembered(node_pair, monkeypatch):
    monkeypatch.setattr(cluster_adapters, "MAX_LOST_NODES", 2)
    await node_pair.serve()
    node, adapters = node_pair.decodes[0], node_pair.service.nodes.adapters
    first = node.incarnation
    for _ in range(3):
        await restart(node_pair, node)
        await node_pair.eventually(lambda: node.incarnation in adapters._nodes)
    assert len(adapters._nodes) == 6
    assert first not in adapters._nodes


async def test_a_router_stops_while_it_loads_adapters(node_pair):
    await node_pair.serve()
    node_pair.decode.adapters.proceeds.clear()
    call = load(node_pair)
    await node_pair.eventually(lambda: node_pair.decode.adapters.num_loads)
    await node_pair.service.stop()
    await node_pair.eventually(node_pair.decode.adapters.has_ended)
    node_pair.decode.adapters.proceeds.set()
    call.cancel()


async def test_another_router_unloads_what_this_one_is_loading(router_pair):
    await router_pair.serve()
    first, second = router_pair.first, router_pair.second
    await load(first)
    node = first.prefill
    await node.stop()
    await first.eventually(lambda: not (first.service.nodes.prefill_nodes or second.service.nodes.prefill_nodes))
    node.adapters, node.incarnation = ScriptedAdapters(), os.urandom(16)
    node.adapters.proceeds.clear()
    await node.start()
    await first.eventually(lambda: node.adapters.num_loads)
    await second.eventually(lambda: second.service.nodes.prefill_nodes)
    await unload(second)
    await first.eventually(lambda: not first.service.nodes.adapters.by_name)
    node.adapters.proceeds.set()
    await load(first, name="law", directory="law")
    await first.eventually(lambda: [adapter.name for adapter in node.adapters.adapters] == ["law"])


async def test_only_clients_whose_tokens_allow_it_load_and_unload(cluster, tmp_path):
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("alice", "bob")}
    path = tmp_path / "tokens"
    path.write_text("alice sha256:{alice} adapters\nbob sha256:{bob} priority=9\n".format(**hashes))
    await cluster.serve(clients=TokenFile(path))
    alice, bob = ({"metadata": (("authorization", f"Bearer {name}"),)} for name in ("alice", "bob"))
    for change in (load, unload):
        failure = await refused(change(cluster, **bob))
        assert (failure.code, failure.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADAPTERS_NOT_ALLOWED")
        assert len(nodes_with(cluster, SQL_OF_D)) == (0 if change is load else 2)
        await change(cluster, **alice)


async def test_two_loads_of_one_name_come_one_after_the_other(node_pair):
    await node_pair.serve()
    results = await asyncio.gather(
        *(load(node_pair, directory=directory) for directory in ("v1", "v2")), return_exceptions=True
    )
    loaded = [result.adapter.fingerprint for result in results if not isinstance(result, Exception)]
    failures = [node_pair.failure_of(result) for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert [failure.reason for failure in failures] == ["ADAPTER_EXISTS"]
    assert fingerprints_on(node_pair.nodes) == set(loaded)
    assert all(node.adapters.adapters for node in node_pair.nodes)


async def test_another_routers_changes_are_respected(router_pair):
    """Both routers load and unload the same adapter."""
    await router_pair.serve()
    first, second = router_pair.first, router_pair.second
    ours, theirs = first.service.nodes.adapters, second.service.nodes.adapters
    await load(first)
    await first.eventually(lambda: theirs.by_name == ours.by_name != {})
    await unload(second)
    await first.eventually(lambda: not ours.by_name)
    await load(second)
    await first.eventually(lambda: ours.by_name == theirs.by_name != {})
    await unload(first)
    await first.eventually(lambda: not theirs.by_name)
    await load(second)
    await first.eventually(lambda: ours.by_name == theirs.by_name != {})
    await first.generate(model="sql", max_tokens=2)
    assert all(node.adapters.adapters for node in first.nodes)
