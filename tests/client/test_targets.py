"""Several routers: which of them a call goes to."""

from __future__ import annotations

import pytest

from outrider.client import AsyncClient, Client
from outrider.client.targets import Targets
from outrider.errors import PeerLostError

NOBODY = "127.0.0.1:1"


def test_other_calls_go_to_a_router_that_can_be_reached(start):
    serving = start()
    with Client([NOBODY, serving.address]) as client:
        assert client.model().name == "m"
        assert client.target == serving.address
        serving.router.faults = [PeerLostError("no node", reason="NO_NODE")]
        with pytest.raises(PeerLostError, match="no node"):
            client.model()
    with Client([NOBODY, "127.0.0.1:2"]) as client, pytest.raises(PeerLostError, match="cannot be reached"):
        client.model()


async def test_the_async_clients_other_calls_do_so_too(start):
    serving = start()
    async with AsyncClient([NOBODY, serving.address]) as client:
        assert (await client.model()).name == "m"
        assert client.target == serving.address


async def test_abort_reaches_the_router_that_knows_the_request(start):
    first, second = start("one"), start("other")
    for name in ("a", "b"):
        second.router.store(name)
    with Client([first.address, second.address]) as client:
        assert client.abort("a")
        assert not client.abort("a")
    with Client([NOBODY, second.address]) as client:
        assert not client.abort("a")
    async with AsyncClient([first.address, NOBODY, second.address]) as client:
        assert await client.abort("b")
        assert not await client.abort("b")
    with Client([NOBODY]) as client, pytest.raises(PeerLostError):
        client.abort("a")


def test_targets():
    assert Targets(" a:1, b:2,,a:1").all == ("a:1", "b:2")
    assert Targets("ipv4:1.2.3.4:5,6.7.8.9:5").all == ("ipv4:1.2.3.4:5,6.7.8.9:5",)
    assert Targets(["a:1"]).after("a:1") == "a:1"
    targets = Targets(["a", "b", "c"])
    targets.current = "b"
    assert targets.in_order() == ("b", "c", "a")
    with pytest.raises(ValueError, match="at least one"):
        Targets(" , ")
