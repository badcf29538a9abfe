"""Which router a call goes to if a client has several."""

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
    targets = Targets(["a:1", "b:1", "c:1"])
    targets.current = "b:1"
    assert targets.in_order() == ("b:1", "c:1", "a:1")
    with pytest.raises(ValueError, match="at least one"):
        Targets(" , ")


@pytest.mark.parametrize(
    ("given", "dialled"),
    [
        ("h:1", ("h:1",)),
        ("127.0.0.1", ("127.0.0.1:50051",)),
        ("router", ("router:50051",)),
        ("http://127.0.0.1:7/v1", ("127.0.0.1:7",)),
        ("http://[::1]:7,http://h", ("[::1]:7", "h:50051")),
        ("[::1]:7, [::2]:7", ("[::1]:7", "[::2]:7")),
        ("HTTP://h:7/,grpc://[::1]", ("h:7", "[::1]:50051")),
        ("::1", ("[::1]:50051",)),
        ("[::1]", ("[::1]:50051",)),
        (["fe80::1%lo"], ("[fe80::1%lo]:50051",)),
        ("unix:/run/router", ("unix:/run/router",)),
        ("dns:///router", ("dns:///router",)),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", ("ipv4:127.0.0.1:1,127.0.0.1:2",)),
    ],
)
def test_a_target_is_dialled_as_people_write_it(given, dialled):
    assert Targets(given).all == dialled


def test_a_target_of_https_names_the_way_to_tls():
    with pytest.raises(ValueError, match=r"tls \(in commands --tls, --authority\) turns TLS on"):
        Targets("https://router:443")


@pytest.mark.parametrize("given", ["::1:50777", "[::1", "[::1]:abc", "h:70000", "h:", "a b:c", 5, None, b"h:1", [5]])
def test_what_is_no_target_is_an_error_at_once(given):
    with pytest.raises(ValueError, match="a target must be HOST:PORT"):
        Targets(given)
