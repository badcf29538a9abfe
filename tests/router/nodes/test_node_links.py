"""Links to nodes: backoff of connections, and nodes that do not answer."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from outrider.errors import PeerLostError
from outrider.node import NodeInfo, NodeRole, NodeState
from router.nodes import link as node_link
from router.nodes.link import MAX_BACKOFF_SECONDS, MIN_BACKOFF_SECONDS, NodeLink
from tests.support.router_fakes import fake_model_info


class EndedError(Exception):
    """Ends a link after its last pause."""


class Transport:
    """A transport to a node that reports these states in turn. For None, it raises PeerLostError instead."""

    def __init__(self, states):
        self._states = iter(states)

    async def identify(self, *, timeout_seconds):
        state = next(self._states)
        if state is None:
            raise PeerLostError("nobody is there")
        return NodeInfo(
            incarnation=b"i", name="n", role=NodeRole.DECODE, state=state, version="", model=fake_model_info()
        )

    async def close(self):
        pass


async def pauses_of(monkeypatch, states, num_pauses=60):
    """Returns a link's pauses in seconds. If the link's node serves, it is approved as an alias of another node."""
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == num_pauses:
            raise EndedError

    async def approve(link, _info):
        link.is_alias = True
        return "f"

    monkeypatch.setattr(node_link, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": pause}))
    owner = SimpleNamespace(approve=approve, on_link_change=lambda: None)
    link = NodeLink(
        role=NodeRole.DECODE,
        address="a:1",
        transport=Transport(states),
        identity=None,
        owner=owner,
        liveness_timeout_seconds=1.0,
    )
    with pytest.raises(EndedError):
        await link.run()
    return pauses


@pytest.mark.parametrize("state", [NodeState.STARTING, NodeState.SERVING], ids=["loads", "is an alias"])
async def test_a_node_that_is_not_used_is_asked_ever_more_rarely(monkeypatch, state):
    pauses = await pauses_of(monkeypatch, itertools.repeat(state))
    assert pauses[0] == MIN_BACKOFF_SECONDS
    assert pauses[-1] == MAX_BACKOFF_SECONDS
    for number, pause in enumerate(pauses[1:], 1):
        assert pause <= MIN_BACKOFF_SECONDS + 0.11 * sum(pauses[:number]), "it is noticed soon enough"


async def test_a_node_that_comes_up_is_asked_soon_again(monkeypatch):
    pauses = await pauses_of(monkeypatch, [*[None] * 10, *[NodeState.STARTING] * 5, None, None], 17)
    assert pauses[9] == MAX_BACKOFF_SECONDS
    assert pauses[10] == MIN_BACKOFF_SECONDS
    assert pauses[14:] == sorted(pauses[14:])


async def test_nodes_that_do_not_send_their_tokenizer_keep_no_other_from_serving(node_pair):
    *silent, _ = node_pair.nodes
    for node in silent:
        node.sends_tokenizer = False
    await node_pair.serve()
    assert (await node_pair.generate(max_tokens=2)).token_ids()
