"""Keeps one peer for each address that the targets resolve to. Lookups are repeated until the set is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from outrider.service.resolver import Resolver
from outrider.service.telemetry.logging import get_logger

CANCEL_AGAIN_SECONDS = 0.2

_log = get_logger("peers")


class Peer(Protocol):
    """A connection to one address. `run` maintains it until `run` is cancelled, and then frees its resources."""

    @property
    def is_connected(self) -> bool:
        """Whether the peer is connected; a connected peer is not dropped."""

    async def run(self) -> None: ...


AnyPeer = TypeVar("AnyPeer", bound=Peer)


class PeerSet(Generic[AnyPeer]):
    """The peers of one role. Event loop only.

    A new address gets a peer. A peer whose address no lookup returns any more is dropped once
    it is not connected, so that a draining node can finish. A failed lookup changes nothing.
    Targets are looked up independently, so that a slow name server delays no other target; two
    targets that resolve to one address share its peer.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        open_peer: Callable[[str, str], AnyPeer],
        resolver: Resolver,
        interval_seconds: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`open_peer` takes a target and an address; `on_change` is called when a peer is added or dropped."""
        self._open_peer = open_peer
        self._resolver = resolver
        self._interval_seconds = interval_seconds
        self._on_change = on_change
        self._answers: dict[str, list[str]] = {target: [] for target in targets}  # the last successful answers
        self._failures: dict[str, str] = {}  # error message by target, if its last lookup failed
        self._peers: dict[str, AnyPeer] = {}  # by address
        self._running: dict[str, asyncio.Task[None]] = {}  # by address
        self._tasks: set[asyncio.Task[None]] = set()  # lookups and peers, including those that are ending

    @property
    def peers(self) -> list[AnyPeer]:
        return list(self._peers.values())

    def find(self, address: str) -> AnyPeer | None:
        return self._peers.get(address)

    @property
    def unresolved(self) -> dict[str, str]:
        """The targets that have no address so far, each with the reason."""
        return {
            target: self._failures.get(target, "not looked up yet")
            for target, addresses in self._answers.items()
            if not addresses
        }

    def start(self) -> None:
        for target in self._answers:
            self._spawn(self._follow(target), name=f"look up {target}")

    async def stop(self) -> None:
        """Stops every peer. A second call does nothing."""
        tasks = set(self._tasks)
        while tasks:
            for task in tasks:
                task.cancel()
            # Python 3.11's wait_for loses a cancellation that coincides with a result, so tasks are cancelled again.
            _, tasks = await asyncio.wait(tasks, timeout=CANCEL_AGAIN_SECONDS)
        self._running.clear()
        self._peers.clear()

    async def _follow(self, target: str) -> None:
        while True:
            await self._look_up(target)
            self._update_peers()
            await asyncio.sleep(self._interval_seconds)

    async def _look_up(self, target: str) -> None:
        try:
            addresses = await self._resolver(target)
        except OSError as error:
            if target not in self._failures:
                _log.warning("name is not resolved", target=target, error=str(error), kept=self._answers[target])
            self._failures[target] = str(error)
            return
        if self._failures.pop(target, None) is not None:
            _log.info("name is resolved again", target=target, addresses=addresses)
        self._answers[target] = addresses

    def _update_peers(self) -> None:
        """Opens peers for new addresses; drops disconnected peers whose addresses DNS no longer returns."""
        wanted = {address: target for target, addresses in self._answers.items() for address in addresses}
        coming = sorted(wanted.keys() - self._peers.keys())
        going = [address for address, peer in self._peers.items() if address not in wanted and not peer.is_connected]
        for address in coming:
            peer = self._peers[address] = self._open_peer(wanted[address], address)
            self._running[address] = running = self._spawn(peer.run(), name=f"peer {address}")
            running.add_done_callback(partial(self._remove_ended, address))
        for address in going:
            self._running.pop(address).cancel()
            del self._peers[address]
            _log.info("address is gone", address=address)
        if coming or going:
            self._on_change()

    def _spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._take_end)
        return task

    def _remove_ended(self, address: str, task: asyncio.Task[None]) -> None:
        """Forgets a peer that ended by itself (a bug), so that it is reopened after the next lookup."""
        if self._running.get(address) is task:
            del self._running[address], self._peers[address]

    def _take_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a peer's task failed", task=task.get_name(), error=str(error), exc_info=error)
