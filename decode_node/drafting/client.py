"""The decode node's client of its draft nodes: an exchange of which each address may be a name with several nodes, and
which sends the features that heads need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import grpc.aio
import numpy as np

from outrider.drafting.book import DraftCounters, FeatureRange
from outrider.drafting.exchange import DraftExchange
from outrider.drafting.link import DraftLink, LinkOutlets
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.ranks.sharded_cache import KVCache
from outrider.rpc.tls import PLAINTEXT
from outrider.service.announce import announce
from outrider.service.peers import PeerSet
from outrider.service.resolver import Resolver, resolve_with_dns
from outrider.service.telemetry.logging import get_logger
from outrider.speculation.draft_stream import DraftHello

NO_TABLES: Mapping[int, SequenceKV] = {}


@dataclass(frozen=True, slots=True)
class DraftClientStatus:
    """The client's state for metrics."""

    is_late: Mapping[str, bool] = field(default_factory=dict)  # by address; also True if the node is not connected
    counters: DraftCounters = field(default_factory=DraftCounters)


@dataclass(eq=False)
class FeaturePlane:
    """The plane of a paged KV cache that has the features of each token (see outrider.engine.feature_spec)."""

    kv_cache: KVCache
    plane: PlaneSpec

    def read(self, ranges: Sequence[tuple[SequenceKV, int, int]]) -> list[bytes]:
        """Copies features of tokens [start, end) of each block table from the device in one read. Their KV must exist.

        Engine thread only, since a block may pass to another sequence between two steps. Returns bytes in wire format.
        """
        slots = [kv.slot(place) for kv, start, end in ranges for place in range(start, end)]
        rows = self.kv_cache.read(self.plane.name, range(1), np.asarray(slots, dtype=np.int64))
        size = self.plane.bytes_per_token_per_layer
        ends = np.cumsum([(end - start) * size for _, start, end in ranges])
        return [part.tobytes() for part in np.split(rows, ends[:-1])]


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
        feature_plane: FeaturePlane | None = None,
    ) -> None:
        """`feature_plane`: the plane of the features that the hello names; None if it names none."""
        assert (hello.features is None) is (feature_plane is None)
        outlets = LinkOutlets(open_channel=open_channel, log=get_logger("drafts"), on_refused=_announce_refused)
        super().__init__(hello, outlets)
        self._feature_plane = feature_plane
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
        """Whether a draft node has a head, so that `update` needs tables."""
        return self._feature_plane is not None and self._book.needs_features

    def update(
        self,
        updates: Sequence[tuple[int, Sequence[int], int]],
        tables: Mapping[int, SequenceKV] = NO_TABLES,
        *,
        min_reach: float = 0.0,
    ) -> None:
        """Commits what a step has generated, with the features of `tables`: block tables by sequence id. All tokens but
        the newest have features. `begin_step` sends it.
        """
        self.commit(updates, min_reach=min_reach, features=self._copy_features(tables) if tables else (), wakes=False)

    def _copy_features(self, tables: Mapping[int, SequenceKV]) -> Iterable[tuple[FeatureRange, bytes]]:
        """Copies as many features as one step may. The copy runs without the lock, since on a GPU it takes a while."""
        assert self._feature_plane is not None
        with self._changed:
            ranges = self._book.missing_features({key: kv.num_tokens for key, kv in tables.items()})
        if not ranges:
            return ()
        payloads = self._feature_plane.read([(tables[each.sequence_id], each.start, each.end) for each in ranges])
        return zip(ranges, payloads, strict=True)

    def status(self) -> DraftClientStatus:
        with self._changed:
            is_late = {link.address: self._book.is_late(link.node) for link in self.links}
            return DraftClientStatus(is_late, replace(self._book.counters))


def _announce_refused(address: str, reason: str) -> None:
    announce(refused=reason, address=address)
