"""The decode node's client of its draft nodes: an exchange of which each address may be a name with several nodes, and
which sends the features that heads need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import grpc.aio

from outrider.drafting.book import DraftCounters
from outrider.drafting.drafted_sequence import FeatureSource
from outrider.drafting.exchange import DraftExchange
from outrider.drafting.link import DraftLink, LinkOutlets
from outrider.rpc.tls import PLAINTEXT
from outrider.service.announce import announce
from outrider.service.peers import PeerSet
from outrider.service.resolver import Resolver, resolve_with_dns
from outrider.service.telemetry.logging import get_logger
from outrider.speculation.draft_stream import DraftHello


@dataclass(frozen=True, slots=True)
class DraftClientStatus:
    """The client's state for metrics."""

    is_late: Mapping[str, bool] = field(default_factory=dict)  # by address; also True if the node is not connected
    counters: DraftCounters = field(default_factory=DraftCounters)


class DraftClient(DraftExchange):
    """The client of all draft nodes behind `addresses`. An address may be a name shared by several nodes.

    `start`, `stop`, `links` and `status` belong to the event loop, everything else to the engine thread.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        hello: DraftHello,
        *,
        resolver: Resolver = resolve_with_dns,
        resolve_interval_seconds: float = 5.0,
        open_channel: Callable[[str], grpc.aio.Channel] = PLAINTEXT.open_channel,
        features: FeatureSource | None = None,
    ) -> None:
        """`features`: where the features are that the hello names; None if it names none."""
        outlets = LinkOutlets(
            open_channel=open_channel,
            log=get_logger("drafts"),
            on_refused=lambda address, reason: announce(refused=reason, address=address),
        )
        super().__init__(hello, outlets, features)
        self._nodes = PeerSet(
            addresses,
            open_peer=lambda _name, address: self.open_link(address),
            resolver=resolver,
            interval_seconds=resolve_interval_seconds,
        )

    async def start(self) -> None:
        """Begins to connect, without waiting for connections."""
        self._loop = asyncio.get_running_loop()
        self._nodes.start()

    async def stop(self) -> None:
        """Ends all streams. From then on the engine thread finds no proposals."""
        self._loop = None
        await self._nodes.stop()

    @property
    def links(self) -> list[DraftLink]:
        return self._nodes.peers

    @property
    def needs_features(self) -> bool:
        """Whether a draft node has a head, so that `commit` needs tables."""
        return self._book.needs_features

    def status(self) -> DraftClientStatus:
        with self._changed:
            is_late = {link.address: self._book.is_late(link.node) for link in self.links}
            return DraftClientStatus(is_late, replace(self._book.counters))
