"""Connector `shared_memory`: payload in an arena of the sender, its place in the stream's messages."""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from typing import TypeVar

from outrider.errors import PeerLostError
from outrider.kv_transfer.arena import Arena
from outrider.kv_transfer.base import FrameHeader, TransferSpec
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.frames import Hello, encode_slot_frame
from outrider.kv_transfer.inbox import AttachState
from outrider.kv_transfer.sender import Carrier, raise_unless_attached
from outrider.kv_transfer.sender_stream import SenderStream
from outrider.service.telemetry.logging import get_logger

POLL_SECONDS = 0.05
"""How soon a sender that waits for a slot of the shared arena sees that its own stream has ended."""

MAX_RECEIVERS = 32

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
        deadline = time.monotonic() + self._progress_seconds
        while True:
            stream.raise_if_ended()
            offset = self._arena.take(POLL_SECONDS)
            if offset is not None:
                return offset
            if self._arena.is_retired:
                raise PeerLostError("the node is stopping: its shared memory is gone", node=stream.address)
            if time.monotonic() > deadline:
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


class ArenaSource:
    """Offers one arena to each receiving process, the same one to all its transfers. Thread-safe."""

    name = "shared_memory"

    def __init__(self, config: KvTransferConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._arenas: OrderedDict[bytes, Arena] = OrderedDict()  # by the receiver's incarnation, last used last
        self._strangers: OrderedDict[bytes, None] = OrderedDict()  # incarnations that share no memory with us

    def offer(self, stream: SenderStream, spec: TransferSpec) -> Carrier | None:
        """None when the receiver cannot attach. A receiver forgets idle arenas: then a new one is offered."""
        with self._lock:
            if spec.incarnation in self._strangers:
                return None
            arena = self._arenas.get(spec.incarnation)
        if arena is None or arena.is_retired or arena.is_worn or not self._attach(stream, spec, arena):
            arena = self._offer_new(stream, spec)
        return None if arena is None else SlotCarrier(arena, progress_seconds=self._config.progress_seconds)

    def _offer_new(self, stream: SenderStream, spec: TransferSpec) -> Arena | None:
        arena = self._new_arena()
        if arena is None:
            return None
        try:
            is_attached = self._attach(stream, spec, arena)
        finally:
            arena.unlink()  # it has served its purpose, or never will
        with self._lock:
            if is_attached:
                _remember(self._arenas, spec.incarnation, arena)
            else:
                _remember(self._strangers, spec.incarnation, None)
        return arena if is_attached else None

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
            arena = Arena(
                directory=self._config.arena_directory,
                num_bytes=self._config.arena_bytes,
                slot_bytes=self._config.frame_bytes,
            )
        except OSError as error:
            log.warning("no shared memory", directory=self._config.arena_directory, error=str(error))
            return None
        if arena.has_slots:
            return arena
        log.warning("no shared memory", directory=self._config.arena_directory, error="no room for one slot")
        arena.retire()
        return None

    def close(self) -> None:
        with self._lock:
            arenas = list(self._arenas.values())
            self._arenas.clear()
        for arena in arenas:
            arena.retire()


def _remember(items: OrderedDict[bytes, Value], key: bytes, value: Value) -> None:
    """Drops the oldest beyond `MAX_RECEIVERS`: decode nodes come and go, senders in work keep what they use."""
    items[key] = value
    items.move_to_end(key)
    while len(items) > MAX_RECEIVERS:
        items.popitem(last=False)
