"""Peers behind names whose addresses change at run time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import structlog

from outrider.service.peers import PeerSet
from tests.support.fake_resolver import FakeResolver
from tests.support.waiting import PATIENCE_SECONDS, until

NAME = "decode.test:1"


class Node:
    """A peer whose connection the test controls."""

    def __init__(self, target: str, address: str) -> None:
        self.target = target
        self.address = address
        self.is_connected = False
        self.has_ended = False
        self.failure: Exception | None = None
        self.wake = asyncio.Event()

    async def run(self) -> None:
        try:
            await self.wake.wait()
            if self.failure is not None:
                raise self.failure
        finally:
            self.has_ended = True


@contextlib.asynccontextmanager
async def peers_of(resolver, *targets: str, **options):
    nodes = PeerSet(targets or (NAME,), open_peer=Node, resolver=resolver, interval_seconds=0.01, **options)
    nodes.start()
    try:
        yield nodes
    finally:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await nodes.stop()


async def lookups(resolver: FakeResolver, num: int = 3) -> None:
    """Waits until this many further lookups have ended."""
    wanted = resolver.num_lookups + num + 1
    await until(lambda: resolver.num_lookups >= wanted)


def addresses(nodes: PeerSet[Node]) -> list[str]:
    return [node.address for node in nodes.peers]


async def test_every_address_of_a_name_is_a_peer_and_new_ones_are_found_while_running():
    resolver = FakeResolver({NAME: ["10.0.0.1:1"]})
    changes = []
    async with peers_of(resolver, on_change=lambda: changes.append(1)) as nodes:
        await until(lambda: addresses(nodes) == ["10.0.0.1:1"])
        assert nodes.peers[0].target == NAME
        resolver.set(NAME, "10.0.0.2:1", "10.0.0.1:1")
        await until(lambda: addresses(nodes) == ["10.0.0.1:1", "10.0.0.2:1"])
        assert len(changes) == 2


async def test_a_peer_that_is_gone_from_the_answer_stays_as_long_as_it_is_connected():
    resolver = FakeResolver({NAME: ["10.0.0.1:1", "10.0.0.2:1"]})
    async with peers_of(resolver) as nodes:
        await until(lambda: len(nodes.peers) == 2)
        draining, gone = nodes.peers
        draining.is_connected = True
        resolver.set(NAME, "10.0.0.3:1")
        await until(lambda: addresses(nodes) == ["10.0.0.1:1", "10.0.0.3:1"])
        await until(lambda: gone.has_ended)
        assert not draining.has_ended
        draining.is_connected = False
        await until(lambda: addresses(nodes) == ["10.0.0.3:1"])
        await until(lambda: draining.has_ended)


async def test_an_address_that_comes_back_while_its_peer_is_connected_is_the_same_peer():
    resolver = FakeResolver({NAME: ["10.0.0.1:1"]})
    async with peers_of(resolver) as nodes:
        await until(lambda: len(nodes.peers) == 1)
        (peer,) = nodes.peers
        peer.is_connected = True
        resolver.set(NAME, "10.0.0.2:1")
        await until(lambda: len(nodes.peers) == 2)
        resolver.set(NAME, "10.0.0.1:1")
        await until(lambda: len(nodes.peers) == 1)
        peer.is_connected = False
        await lookups(resolver)
        assert nodes.peers == [peer]


async def test_a_resolver_that_fails_keeps_the_last_answer_and_is_logged_once():
    resolver = FakeResolver({NAME: ["10.0.0.1:1"]})
    with structlog.testing.capture_logs() as log:
        async with peers_of(resolver) as nodes:
            await until(lambda: len(nodes.peers) == 1)
            resolver.set(NAME)
            await lookups(resolver)
            assert addresses(nodes) == ["10.0.0.1:1"]
            assert nodes.unresolved == {}
            resolver.set(NAME, "10.0.0.1:1")
            await lookups(resolver)
    assert [(line["log_level"], line["event"]) for line in log] == [
        ("warning", "name is not resolved"),
        ("info", "name is resolved again"),
    ]
    assert log[0]["target"] == NAME
    assert log[0]["kept"] == ["10.0.0.1:1"]


async def test_a_name_that_was_never_resolved_is_told_with_the_reason():
    resolver = FakeResolver({})
    async with peers_of(resolver) as nodes:
        assert nodes.unresolved == {NAME: "not looked up yet"}
        await until(lambda: "Name or service not known" in nodes.unresolved[NAME])
        assert nodes.peers == []
        resolver.set(NAME, "10.0.0.1:1")
        await until(lambda: len(nodes.peers) == 1)
        assert nodes.unresolved == {}


async def test_a_slow_name_delays_no_other():
    never = asyncio.Event()

    async def resolve(target):
        if target.startswith("slow"):
            await never.wait()
        return ["10.0.0.1:1"]

    async with peers_of(resolve, "slow.test:1", NAME) as nodes:
        await until(lambda: len(nodes.peers) == 1)
        assert list(nodes.unresolved) == ["slow.test:1"]


async def test_two_names_of_one_address_share_a_peer_that_either_keeps():
    resolver = FakeResolver({NAME: ["10.0.0.1:1"], "alias.test:1": ["10.0.0.1:1"]})
    async with peers_of(resolver, NAME, "alias.test:1") as nodes:
        await until(lambda: len(nodes.peers) == 1)
        resolver.set(NAME, "10.0.0.2:1")
        await until(lambda: len(nodes.peers) == 2)
        assert sorted(addresses(nodes)) == ["10.0.0.1:1", "10.0.0.2:1"]


@pytest.mark.parametrize("failure", [RuntimeError("a bug"), None], ids=["raises", "returns"])
async def test_a_peer_that_ends_by_itself_is_begun_anew(failure):
    resolver = FakeResolver({NAME: ["10.0.0.1:1"]})
    async with peers_of(resolver) as nodes:
        await until(lambda: len(nodes.peers) == 1)
        (first,) = nodes.peers
        first.failure = failure
        first.wake.set()
        await until(lambda: nodes.peers not in ([first], []))
        assert first.has_ended
        assert addresses(nodes) == ["10.0.0.1:1"]


async def test_stopping_ends_every_peer_and_every_lookup():
    resolver = FakeResolver({NAME: ["10.0.0.1:1", "10.0.0.2:1"]})
    async with peers_of(resolver) as nodes:
        await until(lambda: len(nodes.peers) == 2)
        before = nodes.peers
        await nodes.stop()
        assert all(peer.has_ended for peer in before)
        num_lookups = resolver.num_lookups
        await asyncio.sleep(0.05)
        assert resolver.num_lookups == num_lookups
        assert nodes.peers == []
