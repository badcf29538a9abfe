"""Requests that name an adapter (LoRA): they keep it on every way, and end soon once nobody has it any more."""

from __future__ import annotations

import asyncio
import hashlib
import time

import grpc
import pytest

from outrider.errors import InvalidRequestError
from outrider.request import Adapter
from outrider.v1 import router_pb2
from router.nodes import adapters as cluster_adapters
from tests.router.conftest import PATIENCE_SECONDS, read_rest, refused
from tests.support.adapters import ScriptedAdapters
from tests.support.router_fakes.decode_node import letters

SQL, OTHER_SQL = Adapter("sql", "a1" * 32), Adapter("sql", "b2" * 32)
LONG = 400
SOON_SECONDS = 3.0
"""Far below the default of router.no_node_timeout_seconds."""


def give(*nodes, adapter=SQL):
    for node in nodes:
        node.adapters = ScriptedAdapters(adapter)


def unload(cluster, name="sql"):
    return cluster.stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(name=name), timeout=PATIENCE_SECONDS)


async def until_unloaded(cluster):
    await unload(cluster)
    await cluster.eventually(lambda: not cluster.service.nodes.adapters.by_name)


def assert_unloaded(failure, began_at):
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert f"the adapter {SQL} was unloaded" in failure.message
    assert time.monotonic() - began_at < SOON_SECONDS


def adapters_of(nodes):
    """Returns the adapters of all commands to decode nodes, in order."""
    return [opened.options.adapter for node in nodes for opened in node.opened]


async def test_started_has_the_fingerprint(cluster):
    give(*cluster.nodes)
    await cluster.serve()
    assert (await cluster.generate(model="sql")).started.adapter_fingerprint == SQL.fingerprint
    assert (await cluster.generate()).started.adapter_fingerprint == ""


async def test_tokens_of_an_adapter_are_continued_only_with_its_fingerprint(cluster):
    give(*cluster.nodes)
    await cluster.serve()
    whole = await cluster.generate(model="sql", seed=3, max_tokens=8)
    again = {"model": "sql", "seed": 3, "max_tokens": 8, "generated_token_ids": whole.token_ids()[:5]}
    failure = await cluster.fail(**again)
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "adapter_fingerprint")
    rest = await cluster.generate(**again, adapter_fingerprint=SQL.fingerprint)
    assert rest.token_ids() == whole.token_ids()[5:]
    failure = await cluster.fail(**again, adapter_fingerprint=OTHER_SQL.fingerprint)
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_MISMATCH")


@pytest.mark.parametrize("name", ["", "fake-model"])
async def test_the_model_itself_has_no_fingerprint(cluster, name):
    await cluster.serve()
    failure = await cluster.fail(model=name, adapter_fingerprint=SQL.fingerprint)
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_MISMATCH")
    assert failure.message == (
        "the request needs an adapter with the fingerprint a1a1a1a1a1a1…, but names the model 'fake-model' itself"
    )


# ---------------------------------------------------------------- ways on which the adapter stays the same


@pytest.mark.parametrize("fields", [{"n": 3}, {"output": router_pb2.OutputOptions(prompt_logprobs=1)}, {"priority": 3}])
async def test_an_attempt_after_a_loss_has_the_adapter(node_pair, fields):
    give(*node_pair.nodes)
    await node_pair.serve()
    task, busy, free = await node_pair.begin(LONG, model="sql", **fields)
    await busy.stop()
    answer = await node_pair.finish(task)
    for sample in range(fields.get("n", 1)):
        assert answer.token_ids(sample) == letters(free.opened[0], sample)
    assert adapters_of(node_pair.decodes) == [SQL, SQL]
    assert {each.options.adapter.fingerprint for node in node_pair.prefills for each in node.requests} == {
        SQL.fingerprint
    }


async def test_a_hedge_has_the_adapter(node_pair):
    give(*node_pair.nodes)
    await node_pair.serve()
    task, busy, free = await node_pair.begin(LONG, model="sql")
    busy.freeze()
    await node_pair.eventually(lambda: free.opened)
    answer = await node_pair.finish(task)
    assert answer.token_ids() == letters(free.opened[0], 0)
    assert adapters_of(node_pair.decodes) == [SQL, SQL]


async def test_a_request_that_found_no_room_is_opened_again_with_the_adapter(cluster):
    give(*cluster.nodes)
    cluster.decode.num_blocks = 4
    await cluster.serve()
    link = cluster.service.nodes.decode_nodes[0]
    link.has_room = lambda _size, _now: True  # as if the report of the full node had not come yet
    texts = await asyncio.gather(*(cluster.generate(model="sql", max_tokens=30, seed=seed) for seed in range(4)))
    assert [answer.token_ids() for answer in texts] == [letters(_with_seed(cluster, seed), 0) for seed in range(4)]
    assert set(adapters_of([cluster.decode])) == {SQL}
    assert len(cluster.decode.opened) > 4, "some were rejected"


def _with_seed(cluster, seed):
    return next(opened for opened in cluster.decode.opened if opened.options.sampling.seed == seed)


async def test_a_request_that_waits_is_not_answered_by_another_adapter_of_its_name(cluster):
    give(*cluster.nodes)
    cluster.decode.max_running, cluster.decode.step_seconds = 1, 0.003
    await cluster.serve()
    first = asyncio.ensure_future(cluster.generate(model="sql", max_tokens=LONG))
    await cluster.eventually(lambda: cluster.decode.max_sent > 2)
    second = asyncio.ensure_future(cluster.fail(model="sql", max_tokens=8))
    await cluster.eventually(lambda: cluster.context.queue.num_waiting == 1)
    began_at = time.monotonic()
    give(*cluster.nodes, adapter=OTHER_SQL)
    assert_unloaded(await second, began_at)
    cluster.decode.step_seconds = 0.0
    assert len((await first).token_ids()) == LONG
    assert adapters_of([cluster.decode])[0] == SQL


# ---------------------------------------------------------------- prefill nodes that have unloaded it


@pytest.mark.parametrize("num_unloaded", [1, 2])
@pytest.mark.parametrize("fields", [{}, {"output": router_pb2.OutputOptions(prompt_logprobs=1)}])
async def test_a_prefill_node_that_has_just_unloaded_it_is_not_blamed(node_pair, num_unloaded, fields):
    """The router has not read the report yet."""
    give(*node_pair.nodes)
    for node in node_pair.prefills:
        node.reported_adapters = (SQL,)
    await node_pair.serve()
    unloaded = node_pair.prefills[:num_unloaded]
    for node in unloaded:
        node.adapters.unload("sql")
    links = [node_pair.link_of(node) for node in node_pair.nodes]
    for seed in range(4):
        answer = await node_pair.generate(model="sql", max_tokens=5, seed=seed, **fields)
        assert len(answer.token_ids()) == 5
        assert answer.summary.metrics.attempts == 1
    assert all(node.requests for node in unloaded)
    assert not any(link.breaker.is_open for link in links)
    assert not any(link.breaker._causes for link in links)
    assert node_pair.service.requests.cluster_status().num_moves == 0
    last = {each.sequence_group_id: each for node in node_pair.decodes for each in node.retargeted}
    assert {bool(command.transfer_id) for command in last.values()} == {num_unloaded == 1}, (
        "else it computes the prompt"
    )
    await node_pair.is_empty()


# ---------------------------------------------------------------- decode nodes that have unloaded it


async def test_an_answer_that_has_begun_ends_although_its_adapter_is_unloaded(node_pair):
    give(*node_pair.nodes)
    await node_pair.serve()
    task, busy, _ = await node_pair.begin(LONG, model="sql")
    await until_unloaded(node_pair)
    assert (await node_pair.finish(task)).token_ids() == letters(busy.opened[0], 0)


async def test_an_answer_whose_node_dies_after_the_unloading_ends_at_once(node_pair):
    give(*node_pair.nodes)
    await node_pair.serve()
    call = node_pair.stub.Generate(node_pair.request(model="sql", max_tokens=LONG), timeout=PATIENCE_SECONDS)
    await node_pair.until_streaming()
    busy, _ = node_pair.busy_and_free()
    await until_unloaded(node_pair)
    began_at = time.monotonic()
    await busy.stop()
    assert_unloaded(await refused(call), began_at)
    await node_pair.is_empty()


async def test_the_only_decode_node_dies_after_the_unloading(cluster):
    give(*cluster.nodes)
    cluster.decode.step_seconds = 0.003
    await cluster.serve()
    call = cluster.stub.Generate(cluster.request(model="sql", max_tokens=LONG), timeout=PATIENCE_SECONDS)
    await cluster.eventually(lambda: cluster.decode.max_sent > 2)
    await until_unloaded(cluster)
    began_at = time.monotonic()
    await cluster.decode.stop()
    assert_unloaded(await refused(call), began_at)


async def test_requests_that_wait_for_room_end_at_once_when_it_is_unloaded(cluster):
    give(*cluster.nodes)
    cluster.decode.max_running, cluster.decode.step_seconds = 1, 0.003
    await cluster.serve()
    running = asyncio.ensure_future(cluster.generate(model="sql", max_tokens=LONG))
    await cluster.eventually(lambda: cluster.decode.max_sent > 2)
    waiting = [asyncio.ensure_future(cluster.fail(model="sql", max_tokens=8, seed=seed)) for seed in range(20)]
    of_base = asyncio.ensure_future(cluster.generate(max_tokens=8))
    await cluster.eventually(lambda: cluster.context.queue.num_waiting == 21)
    began_at = time.monotonic()
    await unload(cluster)
    for failure in await asyncio.gather(*waiting):
        assert_unloaded(failure, began_at)
    assert cluster.context.queue.num_waiting == 1
    cluster.decode.step_seconds = 0.0
    assert len((await running).token_ids()) == LONG
    assert len((await of_base).token_ids()) == 8
    await cluster.is_empty()


async def test_a_request_that_all_nodes_reject_ends_when_they_report_it(node_pair):
    give(*node_pair.nodes)
    for node in node_pair.decodes:
        node.reported_adapters = (SQL,)
    await node_pair.serve()
    for node in node_pair.decodes:
        node.adapters.unload("sql")
    failing = asyncio.ensure_future(node_pair.fail(model="sql"))
    await node_pair.eventually(lambda: node_pair.num_opened == 2)
    began_at = time.monotonic()
    for node in node_pair.decodes:
        node.reported_adapters = None
    assert_unloaded(await failing, began_at)
    assert node_pair.num_opened == 2, "none was asked twice"
    await node_pair.is_empty()


async def test_a_request_whose_node_restarts_waits_for_it(node_pair):
    """Only one decode node has the adapter, by its settings."""
    first, second = node_pair.decodes
    give(first, *node_pair.prefills)
    await node_pair.serve()
    task, busy, _ = await node_pair.begin(LONG, model="sql")
    assert busy is first
    await first.stop()
    await node_pair.eventually(lambda: node_pair.context.queue.num_waiting == 1)
    first.incarnation = b"another process!"
    await first.start()
    assert (await node_pair.finish(task)).token_ids() == letters(first.opened[0], 0)
    assert not second.opened


async def test_a_request_waits_until_another_router_has_loaded_it_on_a_node_that_restarted(router_pair, monkeypatch):
    monkeypatch.setattr(cluster_adapters, "RETRY_SECONDS", 0.05)
    decode = router_pair.first.decode
    await router_pair.serve()
    load = router_pb2.LoadAdapterRequest(name="sql", directory="d")
    adapter = (await router_pair.first.stub.LoadAdapter(load, timeout=PATIENCE_SECONDS)).adapter
    second = router_pair.second
    await second.eventually(lambda: "sql" in second.service.nodes.adapters.by_name)
    call = second.stub.Generate(second.request(model="sql", max_tokens=100), timeout=PATIENCE_SECONDS)
    await second.eventually(lambda: decode.max_sent > 2)
    await decode.stop()
    decode.incarnation, decode.adapters = b"another process!", ScriptedAdapters()
    decode.adapters.refusal = InvalidRequestError("the disk is not mounted yet", field="directory")
    await decode.start()
    await second.eventually(lambda: not second.service.nodes.adapters.by_name)
    await second.eventually(lambda: second.context.queue.num_waiting == 1)
    decode.adapters.refusal = None
    messages = await read_rest(call)
    assert messages[-1].summary.metrics.attempts == 2
    assert {opened.options.adapter.fingerprint for opened in decode.opened} == {adapter.fingerprint}


async def test_an_adapter_that_was_loaded_again_continues_the_answer(node_pair):
    give(*node_pair.nodes, adapter=Adapter("sql", hashlib.sha256(b"d").hexdigest()))
    await node_pair.serve()
    task, busy, free = await node_pair.begin(LONG, model="sql")
    await until_unloaded(node_pair)
    load = router_pb2.LoadAdapterRequest(name="sql", directory="d")
    await node_pair.stub.LoadAdapter(load, timeout=PATIENCE_SECONDS)
    await busy.stop()
    answer = await node_pair.finish(task)
    assert answer.token_ids() == letters(free.opened[0], 0)
    assert answer.summary.metrics.attempts == 2


async def test_an_adapter_counts_as_unloaded_until_it_is_loaded_again(cluster):
    await cluster.serve()
    adapters = [Adapter("sql", f"{index:064}") for index in range(3)]
    known = cluster.service.nodes.adapters
    for adapter in (*adapters, adapters[0]):
        give(cluster.decode, adapter=adapter)
        await cluster.eventually(lambda: list(known.by_name.values()) == [adapter])  # noqa: B023 awaited here
    assert [known.was_unloaded(adapter) for adapter in adapters] == [False, True, True]


async def test_an_adapter_is_unloaded_although_a_lost_node_had_it(node_pair):
    give(*node_pair.nodes)
    await node_pair.serve()
    known = node_pair.service.nodes.adapters
    first, second = node_pair.decodes
    await first.stop()
    await node_pair.eventually(lambda: len(node_pair.service.nodes.decode_nodes) == 1)
    assert not known.was_unloaded(SQL)
    second.adapters.unload("sql")  # by another router, which cannot reach the first node either
    await node_pair.eventually(lambda: known.was_unloaded(SQL))
    await first.start()
    await node_pair.eventually(lambda: not first.adapters.adapters)
    assert known.was_unloaded(SQL)


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_node_that_has_it_again_is_asked_again(cluster, role):
    """It has unloaded and loaded the adapter between two reports."""
    give(*cluster.nodes)
    node = getattr(cluster, role)
    node.reported_adapters = (SQL,)
    await cluster.serve()
    node.adapters.unload("sql")
    first = asyncio.ensure_future(cluster.generate(model="sql", max_tokens=8))
    (link,) = getattr(cluster.service.nodes, f"{role}_nodes")
    await cluster.eventually(lambda: not link.has_adapter(SQL))
    give(node)
    await cluster.eventually(lambda: link.has_adapter(SQL))
    assert len((await first).token_ids()) == 8
    num_asked = len(cluster.prefill.requests)
    await cluster.generate(model="sql", seed=2)
    assert len(cluster.prefill.requests) == num_asked + 1
    await cluster.is_empty()
