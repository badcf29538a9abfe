"""Nodes that fail requests again and again, and clusters without prefill nodes."""

from __future__ import annotations

import asyncio

import pytest

from outrider.client import AsyncClient, RetryPolicy
from outrider.errors import PeerLostError
from tests.router.conftest import PATIENCE_SECONDS
from tests.support.router_fakes import FakeDecodeNode, FakePrefillNode

FOREVER_SECONDS = 300.0


# ---------------------------------------------------------------- nodes that lost a request


async def test_a_node_that_a_waiting_request_avoids_serves_those_behind_it(node_pair, monkeypatch):
    monkeypatch.setattr("router.nodes.room.NO_ROOM_RETRY_SECONDS", FOREVER_SECONDS)
    sick, full = node_pair.decodes
    full.max_running = 0
    sick.fails_opens = True
    await node_pair.serve()
    avoiding = asyncio.ensure_future(node_pair.generate(max_tokens=4))
    await node_pair.eventually(lambda: node_pair.link_of(sick).breaker.is_open)
    sick.fails_opens = False
    await node_pair.eventually(lambda: node_pair.context.queue.num_waiting == 1)
    later = node_pair.generate(max_tokens=4)
    assert len((await asyncio.wait_for(later, PATIENCE_SECONDS / 3)).token_ids()) == 4
    assert not avoiding.done()
    full.max_running = 64
    assert len((await asyncio.wait_for(avoiding, PATIENCE_SECONDS)).token_ids()) == 4


# ---------------------------------------------------------------- without prefill nodes


async def test_without_prefill_nodes_decode_nodes_compute_prompts(cluster):
    cluster.nodes = [cluster.decode]
    await cluster.serve()
    answer = await cluster.generate(max_tokens=20)
    assert len(answer.token_ids()) == 20
    await cluster.is_empty()


# ---------------------------------------------------------------- a request that kills its nodes


class Plague:
    """Stops nodes when they are asked to compute a prompt."""

    def __init__(self):
        self.endings = []

    def on_prefill(self, node):
        async def prefill(_request, _context):
            self.endings.append(asyncio.ensure_future(node.stop()))
            await asyncio.Event().wait()

        node.Prefill = prefill


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
