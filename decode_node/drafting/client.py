"""The decode node's client of its draft nodes, which has proposals ready when a step needs them.

Two threads use it. The engine thread calls `open`, `update`, `close` and `take`, which do no I/O. The event loop owns
one bidirectional stream for each draft node (`link`). Both share the `DraftBook`, which has the newest state of every
sequence and is guarded by one lock. A message is made from this state when a stream can be written.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import grpc.aio
import numpy as np

from decode_node.drafting.book import DraftBook, DraftCounters, FeatureRange, StepDrafts
from decode_node.drafting.link import DraftLink
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.ranks.sharded_cache import KVCache
from outrider.rpc.tls import PLAINTEXT
from outrider.service.peers import PeerSet
from outrider.service.resolver import Resolver, resolve_with_dns
from outrider.speculation.draft_stream import DraftHello, SequenceStart

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


class DraftClient:
    """The client of all draft nodes behind `addresses`. An address may be a name shared by several nodes.

    Every node can serve every sequence. `start`, `stop`, `links` and `status` belong to the event loop; `open`,
    `update`, `close` and `take` to the engine thread. No method raises because of a draft node.
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
        self._hello = hello
        self._changed = threading.Condition()
        feature_bytes = 0 if hello.features is None else hello.features.bytes_per_token
        self._book = DraftBook(clock=time.monotonic, feature_bytes=feature_bytes)
        self._feature_plane = feature_plane
        self._nodes = PeerSet(
            addresses, open_peer=self._open_link, resolver=resolver, interval_seconds=resolve_interval_seconds
        )
        self._open_channel = open_channel
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Begins to connect, without waiting for connections."""
        self._loop = asyncio.get_running_loop()
        self._nodes.start()

    async def stop(self) -> None:
        """Ends all streams. From then on the engine thread finds no proposals."""
        self._loop = None
        await self._nodes.stop()

    def open(self, sequence_id: int, start: SequenceStart, token_ids: Sequence[int], *, num_wanted: int) -> None:
        """Announces a sequence when its prompt is known, and asks for its first draft."""
        with self._changed:
            self._book.open(sequence_id, start, token_ids, num_wanted=num_wanted)
        self._wake()

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
        """Records what a step has committed. An update is (sequence id, new token ids, number of draft tokens wanted).

        `tables`: block tables of the sequences' features, by id; all tokens but the newest have features.
        `min_reach`: see ProposalRequest.
        """
        copied = self._copy_features(tables) if tables else ()
        with self._changed:
            self._book.min_reach = min_reach
            for sequence_id, new_token_ids, num_wanted in updates:
                self._book.update(sequence_id, new_token_ids, num_wanted=num_wanted)
            for feature_range, payload in copied:
                self._book.add_features(feature_range, payload)
        self._wake()

    def _copy_features(self, tables: Mapping[int, SequenceKV]) -> Iterable[tuple[FeatureRange, bytes]]:
        """Copies as many features as one step may. The copy runs without the lock, since on a GPU it takes a while."""
        assert self._feature_plane is not None
        with self._changed:
            ranges = self._book.missing_features({key: kv.num_tokens for key, kv in tables.items()})
        if not ranges:
            return ()
        payloads = self._feature_plane.read([(tables[each.sequence_id], each.start, each.end) for each in ranges])
        return zip(ranges, payloads, strict=True)

    def close(self, sequence_id: int) -> None:
        """Forgets a sequence that has ended, if it is known."""
        with self._changed:
            self._book.close(sequence_id)
        self._wake()

    def take(self, sequence_ids: Sequence[int], *, wait_seconds: float) -> StepDrafts:
        """Returns the proposals for this step, after waiting at most `wait_seconds` for missing ones.

        It waits neither for a node that is late or not connected, nor for a sequence whose node had no draft this time
        or last time.
        """
        started = time.monotonic()
        with self._changed:
            found = self._book.find(sequence_ids, wait_seconds=wait_seconds)
            deadline = started + wait_seconds
            if found.missing:
                self._wake()
            while found.missing and (remaining := deadline - time.monotonic()) > 0.0:
                if not self._changed.wait(remaining):
                    break
                more = self._book.find(found.missing, wait_seconds=wait_seconds)
                found.trees |= more.trees
                found.missing = more.missing
        found.waited_seconds = time.monotonic() - started
        return found

    def observe_step(self, seconds: float) -> None:
        """Records the duration of a step."""
        with self._changed:
            self._book.observe_step(seconds)

    def _open_link(self, _name: str, address: str) -> DraftLink:
        return DraftLink(
            address,
            self._hello,
            book=self._book,
            changed=self._changed,
            others=lambda: self.links,
            open_channel=self._open_channel,
        )

    @property
    def links(self) -> list[DraftLink]:
        """The links to all present draft nodes. Event loop only."""
        return self._nodes.peers

    def status(self) -> DraftClientStatus:
        with self._changed:
            is_late = {link.address: self._book.is_late(link.node) for link in self.links}
            return DraftClientStatus(is_late, replace(self._book.counters))

    def _wake(self) -> None:
        """Makes the streams send new updates. Any thread may call it."""
        loop = self._loop  # read only once, since `stop` may clear it between two reads
        if loop is None or not self._book.has_unsent:
            return
        try:
            loop.call_soon_threadsafe(self._wake_links)
        except RuntimeError:  # the loop has ended meanwhile
            self._loop = None

    def _wake_links(self) -> None:
        for link in self.links:
            link.wake()
