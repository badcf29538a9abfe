"""Reads the features that decode nodes offer from their caches, with the hand-off of KV."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from draft_node.held_sequences import HeldSequence
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.errors import AbortedError
from outrider.kv_transfer.base import TransferSpec, cut_frames
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.sender import Sender
from outrider.service.telemetry.logging import get_logger
from outrider.speculation.draft_stream import FeatureOffer

MAX_FETCHES = 2
"""Maximum number of a decode node's offers that are read at a time. The others wait, so that prompts become complete
one after the other. The newest sequence comes first, as it has the most tokens ahead of it."""

FRAME_BYTES = 1 << 20
"""Bytes that are read at once. Both sides copy them while they hold the interpreter's lock."""

_log = get_logger("draft_node")


@dataclass(eq=False)
class _Fetch:
    """The reading of one offer. `sender` and `is_cancelled` are guarded by the lock of `FeatureFetches`."""

    held: HeldSequence
    offer: FeatureOffer
    start: int = 0  # the first token to read
    is_running: bool = False
    is_cancelled: bool = False
    is_complete: bool = False
    sender: Sender | None = None


class FeatureFetches:
    """The offers that are read or wait. Belongs to the draft loop's thread; each reading has its own thread.

    A decode node that is lost, stopped or unreachable delays only the features of its own sequences.
    """

    def __init__(self, connector: Connector, plane: PlaneSpec, *, on_ended: Callable[[], None]) -> None:
        """`on_ended` is called from another thread when `take_ended` has something."""
        self._connector = connector
        self._plane = plane
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._fetches: dict[int, _Fetch] = {}  # the newest offer of each sequence, by key
        self._running: dict[_Fetch, None] = {}
        self._ended: queue.SimpleQueue[_Fetch] = queue.SimpleQueue()

    def take_offer(self, held: HeldSequence, offer: FeatureOffer) -> None:
        """Reads the offer as soon as possible, but only once."""
        known = self._fetches.get(held.key)
        if held.num_features < offer.end_token and (known is None or known.offer != offer):
            self.forget(held.key)
            self._fetches[held.key] = _Fetch(held, offer)
            held.is_fetching = True
            self._start_next(held.peer.peer_id)

    def forget(self, key: int) -> None:
        """Ends the reading of a sequence's features, if there is any."""
        fetch = self._fetches.pop(key, None)
        if fetch is not None:
            with self._lock:
                fetch.is_cancelled = True
                sender = fetch.sender
            if sender is not None:
                sender.interrupt()

    def take_ended(self) -> list[HeldSequence]:
        """Returns the sequences whose features have been read, or could not be."""
        ended = [self._ended.get() for _ in range(self._ended.qsize())]
        for fetch in ended:
            self._running.pop(fetch, None)
            if not fetch.is_cancelled:
                fetch.held.is_fetching = False
                if fetch.is_complete and fetch.held.features is not None:
                    fetch.held.features.complete(fetch.offer.end_token)
            self._start_next(fetch.held.peer.peer_id)
        return [fetch.held for fetch in ended if not fetch.is_cancelled]

    def _start_next(self, peer_id: int) -> None:
        if sum(each.held.peer.peer_id == peer_id for each in self._running) >= MAX_FETCHES:
            return
        waiting = [each for each in self._fetches.values() if each.held.peer.peer_id == peer_id and not each.is_running]
        if waiting:
            newest = max(waiting, key=lambda each: each.held.key)
            assert newest.held.features is not None
            newest.is_running, newest.start = True, newest.held.num_features
            newest.held.features.reserve(newest.offer.end_token)
            self._running[newest] = None
            threading.Thread(target=self._run, args=(newest,), name="feature-fetch", daemon=True).start()

    def _run(self, fetch: _Fetch) -> None:
        sender = None
        try:
            sender = self._connect(fetch)
            regions = cut_frames(
                self._plane, range(1), range(1), fetch.start, fetch.offer.end_token, max_frame_bytes=FRAME_BYTES
            )
            assert fetch.held.features is not None
            sender.read(regions, fetch.held.features)
            sender.commit()
            fetch.is_complete = True
        except Exception as error:  # noqa: BLE001 thread boundary: without features there are no drafts, and no more
            _log.info("offered features were not read", address=fetch.offer.address, error=str(error))
        self._ended.put(fetch)
        self._on_ended()
        if sender is not None:
            sender.cancel()

    def _connect(self, fetch: _Fetch) -> Sender:
        """Attaches to the offered transfer. Raises: OutriderError."""
        end = fetch.offer.end_token
        spec = TransferSpec(
            transfer_id=fetch.offer.transfer_id,
            incarnation=fetch.held.peer.hello.incarnation,
            start_token=end,
            end_token=end,
            planes=(self._plane,),
        )
        sender = self._connector.connect(fetch.offer.address, spec)
        with self._lock:
            fetch.sender = sender
            is_cancelled = fetch.is_cancelled
        if is_cancelled:
            sender.cancel()
            raise AbortedError("the sequence has ended")
        return sender
