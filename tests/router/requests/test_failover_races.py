"""Moves, hedges, the queue and hand-offs where two things happen at once, in an order that hides one of them."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc.aio
import pytest
import structlog

from outrider.v1 import router_pb2
from tests.router.conftest import PATIENCE_SECONDS
from tests.support.router_fakes import FakeDecodeNode, fake_model_info
from tests.support.router_fakes.decode_node import letters

LONG = 400
FOREVER_SECONDS = 300.0
"""A node that is late for less is not declared dead: what moves meanwhile moves on a suspicion."""


@pytest.fixture
def pair(node_pair):
    """Steps slow enough for an answer to outlast what happens to its node; `finish` makes them fast."""
    node_pair.pace(0.01)
    return node_pair


async def finish(pair, task):
    answer = await pair.finish(task)
    opened = next(opened for node in pair.decodes for opened in node.opened)
    assert answer.token_ids() == letters(opened, 0)
    return answer


async def until_late(pair, node):
    link = pair.link_of(node)
    await pair.eventually(lambda: link.is_late, what=f"{node.name} is late")
    assert link.condition == "late"
    return link


def reports_running(node, num_running):
    """From its next report on, whatever it runs."""
    node.load = lambda: dataclasses.replace(FakeDecodeNode.load(node), num_running=num_running)


# ---------------------------------------------------------------- hedges


async def test_a_hedge_that_was_refused_leaves_the_budget_for_another_one(pair):
    await pair.serve(liveness_timeout_seconds=FOREVER_SECONDS)
    task, busy, free = await pair.begin(LONG)
    free.max_running = 0
    busy.freeze()
    await pair.eventually(lambda: free.opened, what="a hedge to refuse")
    free.max_running = 64
    await pair.eventually(lambda: free.groups, what="a hedge once there is room")
    await finish(pair, task)


async def test_a_hedge_goes_to_the_node_that_computes_alike_though_another_has_less_to_do(pair):
    odd = FakeDecodeNode(name="decode-2", model=fake_model_info(numerics="exact (amx)"))
    pair.use([*pair.decodes, odd], pair.prefills)
    reports_running(odd, 9)
    pair.pace(0.01)
    await pair.serve(liveness_timeout_seconds=FOREVER_SECONDS)
    task = asyncio.ensure_future(pair.generate(max_tokens=LONG))
    await pair.until_streaming()
    busy = next(node for node in pair.decodes if node.groups)
    (alike,) = (node for node in pair.decodes if node not in (busy, odd))
    reports_running(odd, 0)
    reports_running(alike, 5)
    await pair.eventually(lambda: pair.link_of(odd).report.load.num_running == 0)
    await pair.eventually(lambda: pair.link_of(alike).report.load.num_running == 5)
    busy.freeze()
    await pair.eventually(lambda: alike.groups, what="a second attempt")
    assert not odd.opened
    await finish(pair, task)


# ---------------------------------------------------------------- nodes that drain


# ---------------------------------------------------------------- the queue, hand-offs


async def test_a_request_whose_only_large_enough_node_is_gone_holds_up_nobody(pair):
    small, large = pair.decodes
    small.num_blocks = 2
    large.max_running = 0
    await pair.serve(no_node_timeout_seconds=1.0)
    refused = asyncio.ensure_future(pair.fail(text="a long prompt " * 10))
    for node in pair.decodes:
        await pair.eventually(lambda node=node: node.opened, what=f"refused by {node.name}")
    await pair.eventually(lambda: pair.context.queue.num_waiting == 1)
    await large.stop()
    await pair.eventually(lambda: len(pair.service.nodes.decode_nodes) == 1)
    answer = await asyncio.wait_for(pair.generate(text="hi", max_tokens=2), PATIENCE_SECONDS)
    assert len(answer.token_ids()) == 2
    assert (await asyncio.wait_for(refused, PATIENCE_SECONDS)).reason == "NO_NODE"


async def test_a_hand_off_that_fails_unexpectedly_moves_its_request(pair):
    await pair.serve()
    failed = []

    def failing_once(link):
        transport, prefill = link.transport, link.transport.prefill

        async def call(request):
            if not failed:
                failed.append(link.name)
                raise grpc.aio.UsageError("Channel is closed.")
            return await prefill(request)

        transport.prefill = call

    for link in pair.service.nodes.prefill_nodes:
        failing_once(link)
    with structlog.testing.capture_logs() as log:  # drawing the traceback would stall the loop, which makes nodes late
        answer = await asyncio.wait_for(pair.generate(max_tokens=8), PATIENCE_SECONDS)
    assert len(failed) == 1
    assert len(answer.token_ids()) == 8
    assert answer.summary.metrics.attempts >= 2
    assert [line["log_level"] for line in log].count("error") == 1


async def test_a_request_that_ends_as_its_turn_comes_takes_no_place_and_costs_no_other_request_its_own(
    cluster, monkeypatch
):
    """It is aborted in the turn of the event loop in which room comes: its task has not left the queue yet."""
    await cluster.serve(prefill_outstanding_tokens=64, liveness_timeout_seconds=FOREVER_SECONDS)
    requests, placement = cluster.service.requests, cluster.context.placement
    release_prefill = placement.release_prefill

    def release_after_abort(*arguments):
        monkeypatch.undo()
        assert requests._by_key["waiting"].abort()
        release_prefill(*arguments)

    monkeypatch.setattr(placement, "release_prefill", release_after_abort)
    cluster.prefill.freeze()
    first = asyncio.ensure_future(cluster.generate(text="x" * 60, max_tokens=4))
    await cluster.eventually(lambda: placement.num_placed == 1)
    waiting = asyncio.ensure_future(cluster.generate(request_id="waiting", text="y" * 60, max_tokens=4))
    await cluster.eventually(lambda: cluster.context.queue.num_waiting == 1)
    cluster.prefill.thaw()
    assert (await waiting).finished[0].reason == router_pb2.FINISH_REASON_ABORTED
    assert len((await asyncio.wait_for(first, PATIENCE_SECONDS)).token_ids()) == 4
    assert requests.cluster_status().num_moves == 0
    await cluster.is_empty()
