"""Nodes that lose work again and again, and clusters in which a kind of node is missing."""

from __future__ import annotations

import asyncio

import pytest

from outrider.client import AsyncClient, RetryPolicy
from outrider.errors import PeerLostError
from tests.router.conftest import PATIENCE_SECONDS
from tests.support.router_fakes import FakeDecodeNode, FakePrefillNode, fake_model_info
from tests.support.router_fakes.decode_node import letters

LONG = 400
FOREVER_SECONDS = 300.0
OTHER = fake_model_info(numerics="exact (amx)")


# ---------------------------------------------------------------- nodes that lost a request


async def test_a_node_that_a_waiting_request_avoids_serves_those_behind_it(node_pair, monkeypatch):
    monkeypatch.setattr("router.nodes.link.NO_ROOM_RETRY_SECONDS", FOREVER_SECONDS)
    sick, full = node_pair.decodes
    full.max_running = 0
    sick.gives_up_opens = True
    await node_pair.serve()
    avoiding = asyncio.ensure_future(node_pair.generate(max_tokens=4))
    await node_pair.eventually(lambda: node_pair.link_of(sick).breaker.is_open)
    sick.gives_up_opens = False
    await node_pair.eventually(lambda: node_pair.context.queue.num_waiting == 1)
    later = node_pair.generate(max_tokens=4)
    assert len((await asyncio.wait_for(later, PATIENCE_SECONDS / 3)).token_ids()) == 4
    assert not avoiding.done()
    full.max_running = 64
    assert len((await asyncio.wait_for(avoiding, PATIENCE_SECONDS)).token_ids()) == 4


# ---------------------------------------------------------------- numerics


@pytest.mark.parametrize("alike", ["lost", "busier", "of another kind than the decode nodes"])
async def test_two_attempts_never_run_at_once_where_a_prompt_is_computed_differently(node_pair, alike):
    """`alike`: what became of the prefill node that computed the first attempt's prompt."""
    same, other = node_pair.prefills
    may_be_hedged = alike in ("lost", "busier")
    other.model = OTHER
    if not may_be_hedged:
        same.model = OTHER
    node_pair.pace(0.01)
    await node_pair.serve(liveness_timeout_seconds=FOREVER_SECONDS)
    if may_be_hedged:
        node_pair.link_of(other).num_outstanding_tokens = 50
    task, busy, free = await node_pair.begin(LONG)
    if alike == "lost":
        await same.stop()
        await node_pair.eventually(lambda: len(node_pair.service.nodes.prefill_nodes) == 1)
    if may_be_hedged:
        node_pair.link_of(other).num_outstanding_tokens = 0
    if alike == "busier":
        node_pair.link_of(same).num_outstanding_tokens = 50
    num_prompts = len(other.requests)
    link = node_pair.link_of(busy)
    busy.freeze()
    await node_pair.eventually(lambda: link.is_late)
    if may_be_hedged:  # with the prompt from the decode node itself, or from the busier prefill node
        await node_pair.eventually(lambda: free.groups)
    else:
        await asyncio.sleep(0.3)
        assert not free.opened
    assert len(other.requests) == num_prompts
    if alike == "busier":
        node_pair.link_of(same).num_outstanding_tokens -= 50
    assert (await node_pair.finish(task)).token_ids() == letters(busy.opened[-1], 0)


# ---------------------------------------------------------------- without prefill nodes


async def test_without_prefill_nodes_decode_nodes_compute_prompts(cluster):
    cluster.nodes = [cluster.decode]
    await cluster.serve()
    answer = await cluster.generate(max_tokens=20)
    assert len(answer.token_ids()) == 20
    await cluster.is_empty()


# ---------------------------------------------------------------- a request that kills its nodes


class Plague:
    """Nodes end when they are asked to work on a prompt."""

    def __init__(self):
        self.endings = []

    def on_prefill(self, node):
        async def prefill(_request, _context):
            self._end(node)
            await asyncio.Event().wait()

        node.Prefill = prefill

    def on_open(self, node):
        node._open = lambda _session, _opened: self._end(node)

    def on_local_prompt(self, node):
        retarget = node._retarget

        def end_or_wait(session, command):
            if command.transfer_id:
                retarget(session, command)
            else:
                self._end(node)

        node._retarget = end_or_wait

    def _end(self, node):
        self.endings.append(asyncio.ensure_future(node.stop()))


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
async def test_a_request_ends_three_processes_at_most_whatever_their_roles(node_pair, role):
    decodes = [FakeDecodeNode(name=f"decode-{number}") for number in range(6)]
    prefills = [FakePrefillNode(name=f"prefill-{number}") for number in range(2 if role == "both" else 6)]
    node_pair.use(decodes, prefills)
    plague = Plague()
    for node in prefills if role != "decode" else ():
        plague.on_prefill(node)
    for node in decodes:
        if role == "decode":
            plague.on_open(node)
        plague.on_local_prompt(node)
    await node_pair.serve()
    failure = await node_pair.fail(max_tokens=4)
    assert (failure.code.name, failure.reason) == ("UNAVAILABLE", "REQUEST_LOSES_NODES")
    assert "3 nodes failed while serving this request" in failure.message
    assert len(plague.endings) == 3
    await asyncio.gather(*plague.endings)


@pytest.mark.parametrize("window", [None, 10.0], ids=["without a window", "resumable"])
async def test_a_request_that_ended_three_processes_is_sent_again_by_nobody(router_pair, window):
    pair, plague = router_pair, Plague()
    decodes = [FakeDecodeNode(name=f"decode-{number}") for number in range(2)]
    prefills = [FakePrefillNode(name=f"prefill-{number}") for number in range(9)]
    pair.first.nodes = [*decodes, *prefills]
    for node in prefills:
        plague.on_prefill(node)
    timing = {"store_append_seconds": 0.02, "store_lease_seconds": 0.3}
    await pair.first.serve(store=pair.stores[0], **timing)
    targets = {
        "decode_targets": tuple(node.address for node in decodes),
        "prefill_targets": tuple(node.address for node in prefills),
    }
    await pair.second.serve(store=pair.stores[1], **timing, **targets)
    for router in (pair.first, pair.second):
        await router.eventually(lambda router=router: len(router.service.nodes.prefill_nodes) == len(prefills))
    async with AsyncClient([pair.first.address, pair.second.address], retry=RetryPolicy()) as client:
        stream = client.generate("a prompt", seed=1, max_tokens=4, resume_window_seconds=window)
        with pytest.raises(PeerLostError, match="3 nodes failed while serving this request"):
            await asyncio.wait_for(anext(aiter(stream)), PATIENCE_SECONDS)
    assert len(plague.endings) == 3
    await asyncio.gather(*plague.endings)
    await pair.first.eventually(lambda: not len(pair.records))


async def test_a_request_that_hangs_its_nodes_stops_three_processes_at_most(node_pair):
    decodes = [FakeDecodeNode(name=f"decode-{number}") for number in range(6)]
    node_pair.use(decodes, node_pair.prefills)
    hung = []

    def hang_on_open(node):
        def hang(_session, _opened):
            hung.append(node.name)
            node.freeze()

        node._open = hang

    for node in decodes:
        hang_on_open(node)
    await node_pair.serve()
    failure = await node_pair.fail(max_tokens=4)
    assert (failure.code.name, failure.reason) == ("UNAVAILABLE", "REQUEST_LOSES_NODES")
    assert len(hung) == 3, hung
    for node in decodes:
        node.thaw()
