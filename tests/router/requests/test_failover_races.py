"""Races of hedges, migrations and the queue."""

from __future__ import annotations

import asyncio

import pytest

from outrider.v1 import router_pb2
from tests.router.conftest import PATIENCE_SECONDS
from tests.support.router_fakes.decode_node import letters

LONG = 400
FOREVER_SECONDS = 300.0
"""Seconds after which a late node would be declared lost. The tests end earlier, so work migrates by hedges only."""


@pytest.fixture
def pair(node_pair):
    """Nodes with slow steps, so that an answer outlasts what happens to its node. `finish` makes the steps fast."""
    node_pair.pace(0.01)
    return node_pair


async def finish(pair, task):
    answer = await pair.finish(task)
    opened = next(opened for node in pair.decodes for opened in node.opened)
    assert answer.token_ids() == letters(opened, 0)
    return answer


# ---------------------------------------------------------------- hedges


async def test_a_hedge_that_was_refused_leaves_the_budget_for_another_one(pair, monkeypatch):
    monkeypatch.setattr("outrider.service.liveness.SILENT_SECONDS", FOREVER_SECONDS)  # silent nodes have no limit
    await pair.serve(liveness_timeout_seconds=FOREVER_SECONDS)
    task, busy, free = await pair.begin(LONG)
    free.max_running = 0
    busy.freeze()
    await pair.eventually(lambda: free.opened, what="a hedge to refuse")
    free.max_running = 64
    await pair.eventually(lambda: free.groups, what="a hedge once there is room")
    await finish(pair, task)


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


async def test_a_request_that_ends_as_its_turn_comes_takes_no_place_and_costs_no_other_request_its_own(
    cluster, monkeypatch
):
    """It is aborted in the same turn of the event loop in which room appears, before its task has left the queue."""
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
