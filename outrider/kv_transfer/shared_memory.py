"""Connector `shared_memory`: payload in an arena of the sender, its place in the stream's messages."""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from outrider.errors import PeerLostError
from outrider.kv_transfer.arena import IDLE_SECONDS, Arena, sweep
from outrider.kv_transfer.base import FrameHeader, TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.frames import Hello, encode_slot_frame
from outrider.kv_transfer.inbox import AttachState
from outrider.kv_transfer.sender import Carrier, raise_unless_attached
from outrider.kv_transfer.sender_stream import SenderStream
from outrider.service.telemetry.logging import get_logger

POLL_SECONDS = 0.05
"""How soon a sender that waits for a slot of the shared arena sees that its own stream has ended."""

KEEP_ALIVES = 4
"""How often within its progress deadline a sender without a slot says that it lives."""

MAX_RECEIVERS = 32
UNATTACHABLE_SECONDS = 60.0
"""How long a receiver that could not attach is not asked again: its /dev/shm may have been full for a moment."""

log = get_logger("kv_transfer")

Value = TypeVar("Value")


class SlotCarrier:
    """Frames go into slots; an acknowledged slot is free for any transfer to the same receiver."""

    name = "shared_memory"

    def __init__(self, arena: Arena, *, progress_seconds: float) -> None:
        self._arena = arena
        self._progress_seconds = progress_seconds
        self._lock = threading.Lock()
        self._num_unacknowledged = 0
        self._is_abandoned = False
        self.max_frame_bytes = arena.slot_bytes

    def send(self, stream: SenderStream, header: FrameHeader, payload: memoryview) -> None:
        offset = self._take_slot(stream)
        self._arena.write(offset, payload)
        with self._lock:
            self._num_unacknowledged += 1
        stream.send(
            header,
            lambda sequence, head: encode_slot_frame(sequence, head, offset),
            functools.partial(self._acknowledge, offset),
        )

    def _acknowledge(self, offset: int) -> None:
        with self._lock:
            self._num_unacknowledged -= 1
            if self._is_abandoned:  # late, but not too late
                self._arena.quarantine(-1)
        self._arena.release(offset)

    def _take_slot(self, stream: SenderStream) -> int:
        """Other transfers may hold all slots: each that the receiver gives back to any of them is progress."""
        arena = self._arena
        deadline, num_released = time.monotonic() + self._progress_seconds, arena.num_released
        alive_at = time.monotonic() + self._progress_seconds / KEEP_ALIVES
        while True:
            stream.raise_if_ended()
            offset = arena.take(min(POLL_SECONDS, self._progress_seconds / KEEP_ALIVES))
            if offset is not None:
                return offset
            if arena.is_retired:
                raise PeerLostError("the node is stopping: its shared memory is gone", node=stream.address)
            now = time.monotonic()
            if now >= alive_at:
                stream.keep_alive()
                alive_at = now + self._progress_seconds / KEEP_ALIVES
            if arena.num_released != num_released:
                deadline, num_released = now + self._progress_seconds, arena.num_released
            if now > deadline:
                raise PeerLostError(
                    f"KV receiver {stream.address} acknowledged no slot for {self._progress_seconds:g} s",
                    node=stream.address,
                )

    def abandon(self) -> None:
        """Only this transfer's unacknowledged slots are lost; others go on in the same arena."""
        with self._lock:
            if not self._is_abandoned:
                self._is_abandoned = True
                self._arena.quarantine(self._num_unacknowledged)


@dataclass(slots=True)
class _Offered:
    """An arena that a receiver is attached to."""

    arena: Arena
    address: str
    used_at: float  # monotonic seconds


class ArenaSource:
    """Offers one arena to each receiving process, the same one to all its transfers. Thread-safe.

    An arena is dropped when its receiver is lost, when another process answers at its
    address, and when nothing was sent to it for so long that the receiver has dropped it.
    """

    name = "shared_memory"

    def __init__(self, config: KvTransferConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._offered: OrderedDict[bytes, _Offered] = OrderedDict()  # by the receiver's incarnation, last used last
        self._unattachable: OrderedDict[bytes, float] = OrderedDict()  # incarnations that cannot attach, until when
        sweep(config.arena_directory)

    def offer(self, stream: SenderStream, spec: TransferSpec) -> Carrier | None:
        """None when the receiver cannot attach. A receiver forgets idle arenas: then a new one is offered."""
        with self._lock:
            now = self._clock()
            if self._unattachable.get(spec.incarnation, now) > now:
                return None
            self._drop_idle(now)
            offered = self._offered.get(spec.incarnation)
        arena = None if offered is None else offered.arena
        try:
            if arena is None or arena.is_retired or arena.is_worn or not self._attach(stream, spec, arena):
                arena = self._offer_new(stream, spec)
        except PeerLostError:
            with self._lock:
                self._offered.pop(spec.incarnation, None)
            raise
        if arena is None:
            return None
        with self._lock:
            self._remember(spec.incarnation, arena, stream.address)
        return SlotCarrier(arena, progress_seconds=self._config.progress_seconds)

    def _remember(self, incarnation: bytes, arena: Arena, address: str) -> None:
        """With the lock held. Senders in work keep what they use."""
        for other in [key for key, known in self._offered.items() if known.address == address and key != incarnation]:
            del self._offered[other]
        self._offered[incarnation] = _Offered(arena, address, self._clock())
        _bound(self._offered, incarnation)

    def _drop_idle(self, now: float) -> None:
        """With the lock held."""
        while self._offered:
            incarnation, oldest = next(iter(self._offered.items()))
            if oldest.used_at + IDLE_SECONDS > now:
                return
            del self._offered[incarnation]

    def _offer_new(self, stream: SenderStream, spec: TransferSpec) -> Arena | None:
        arena = self._new_arena()
        if arena is None:
            return None
        try:
            is_attached = self._attach(stream, spec, arena)
        finally:
            arena.unlink()  # it has served its purpose, or never will
        if is_attached:
            return arena
        with self._lock:
            self._unattachable[spec.incarnation] = self._clock() + UNATTACHABLE_SECONDS
            _bound(self._unattachable, spec.incarnation)
        return None

    def _attach(self, stream: SenderStream, spec: TransferSpec, arena: Arena) -> bool:
        hello = Hello(
            transfer_id=spec.transfer_id,
            incarnation=spec.incarnation,
            arena_id=arena.arena_id,
            arena_bytes=arena.num_bytes,
        )
        welcome = stream.hello(hello)
        if welcome.state is AttachState.NOT_OFFERED:
            return False
        raise_unless_attached(welcome, stream.address)
        return welcome.nonce == arena.nonce

    def _new_arena(self) -> Arena | None:
        try:
            return Arena(
                directory=self._config.arena_directory,
                num_bytes=self._config.arena_bytes,
                slot_bytes=self._config.frame_bytes,
            )
        except OSError as error:
            log.warning("no shared memory", directory=self._config.arena_directory, error=str(error))
            return None

    def close(self) -> None:
        with self._lock:
            arenas = [offered.arena for offered in self._offered.values()]
            self._offered.clear()
        for arena in arenas:
            arena.retire()


def _bound(items: OrderedDict[bytes, Value], newest: bytes) -> None:
    """Drops the oldest beyond `MAX_RECEIVERS`: decode nodes come and go."""
    items.move_to_end(newest)
    while len(items) > MAX_RECEIVERS:
        items.popitem(last=False)
