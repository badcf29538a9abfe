"""Reads the features that decode nodes offer from their caches, with the hand-off of KV."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from draft_node.held_sequences import HeldSequence
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.kv_transfer.base import Region, TransferSpec, cut_frames
from outrider.kv_transfer.connectors import Connector
from outrider.service.telemetry.logging import get_logger
from outrider.speculation.draft_stream import FeatureOffer

FRAME_BYTES = 1 << 20
"""Bytes that are read at once. Both sides copy them while they hold the interpreter's lock."""

_log = get_logger("draft_node")


class FeatureFetches:
    """The offers that are read or wait. Belongs to the draft loop's thread.

    Of each decode node one offer is read at a time, in a thread of its own, so that prompts become complete one after
    another, and a node that is stopped or unreachable delays only its own. The newest sequence comes first.
    """

    def __init__(self, connector: Connector, plane: PlaneSpec, *, on_read: Callable[[], None]) -> None:
        """`on_read` is called from another thread when `take_read` has something to do."""
        self._connector = connector
        self._plane = plane
        self._on_read = on_read
        self._waiting: dict[int, HeldSequence] = {}  # by key
        self._busy: set[int] = set()  # ids of peers
        # What was read (sequence, offer, first token, features), and at the end of each offer no features.
        self._read: queue.SimpleQueue[tuple[HeldSequence, FeatureOffer, int, memoryview | None]] = queue.SimpleQueue()

    def take_offer(self, held: HeldSequence, offer: FeatureOffer) -> None:
        """Reads the offer as soon as possible. An offer is tried once."""
        if offer != held.offer and held.num_features < offer.end_token:
            held.offer, held.is_fetching = offer, True
            self._waiting[held.key] = held
            self._start_next(held.peer.peer_id)

    def forget(self, held: HeldSequence) -> None:
        """Ignores what is still read for a sequence that has ended."""
        self._waiting.pop(held.key, None)
        held.offer = None

    def take_read(self) -> list[HeldSequence]:
        """Adds what has been read to its sequences. Returns those for which nothing more will be read."""
        ended: list[HeldSequence] = []
        while not self._read.empty():
            held, offer, start, features = self._read.get()
            if held.offer is offer and held.features is not None and features is not None:
                held.features.extend(start, features)
            elif features is None:
                if held.offer is offer:
                    held.is_fetching = False
                    ended.append(held)
                self._busy.discard(held.peer.peer_id)
                self._start_next(held.peer.peer_id)
        return ended

    def _start_next(self, peer_id: int) -> None:
        newest = max((key for key, held in self._waiting.items() if held.peer.peer_id == peer_id), default=None)
        if newest is not None and peer_id not in self._busy:
            held = self._waiting.pop(newest)
            self._busy.add(peer_id)
            arguments = held, held.offer, held.num_features
            threading.Thread(target=self._run, args=arguments, name="feature-fetch", daemon=True).start()

    def _run(self, held: HeldSequence, offer: FeatureOffer, start: int) -> None:
        def add(region: Region, payload: memoryview) -> None:
            self._read.put((held, offer, region.tokens.start, payload))
            self._on_read()

        sender, end = None, offer.end_token
        try:
            spec = TransferSpec(
                transfer_id=offer.transfer_id,
                incarnation=held.peer.hello.incarnation,
                start_token=end,
                end_token=end,
                planes=(self._plane,),
            )
            sender = self._connector.connect(offer.address, spec)
            sender.read(cut_frames(self._plane, range(1), range(1), start, end, max_frame_bytes=FRAME_BYTES), add)
        except Exception as error:  # noqa: BLE001 thread boundary: without features there are no drafts, and no more
            _log.info("offered features were not read", address=offer.address, error=str(error))
        self._read.put((held, offer, end, None))
        self._on_read()
        if sender is not None:
            sender.cancel()
