"""Connector `shared_memory`: payload in an arena of the sender, its place in the stream's messages."""

from __future__ import annotations

import functools
import threading
import time

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

log = get_logger("kv_transfer")


class SlotCarrier:
    """Frames go into slots; an acknowledged slot is free for any transfer to the same receiver."""

    name = "shared_memory"

    def __init__(self, arena: Arena, *, progress_seconds: float) -> None:
        self._arena = arena
        self._progress_seconds = progress_seconds
        self.max_frame_bytes = arena.slot_bytes

    def send(self, stream: SenderStream, header: FrameHeader, payload: memoryview) -> None:
        offset = self._take_slot(stream)
        self._arena.write(offset, payload)
        stream.send(
            header,
            lambda sequence, head: encode_slot_frame(sequence, head, offset),
            functools.partial(self._arena.release, offset),
        )

    def _take_slot(self, stream: SenderStream) -> int:
        deadline = time.monotonic() + self._progress_seconds
        while True:
            stream.raise_if_ended()
            offset = self._arena.take(POLL_SECONDS)
            if offset is not None:
                return offset
            if self._arena.is_retired:
                raise PeerLostError(f"KV receiver {stream.address} was lost to another transfer", node=stream.address)
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"KV receiver {stream.address} acknowledged no slot for {self._progress_seconds:g} s",
                    node=stream.address,
                )

    def abandon(self) -> None:
        self._arena.retire()


class ArenaSource:
    """Offers one arena to each receiving process, the same one to all its transfers. Thread-safe."""

    name = "shared_memory"

    def __init__(self, config: KvTransferConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._arenas: dict[str, tuple[bytes, Arena]] = {}  # address -> its process's incarnation, arena

    def offer(self, stream: SenderStream, spec: TransferSpec) -> Carrier | None:
        """None when the receiver cannot attach. A receiver forgets idle arenas: then a new one is offered."""
        arena = self._arena_for(stream.address, spec.incarnation)
        if arena is not None and self._attach(stream, spec, arena):
            return SlotCarrier(arena, progress_seconds=self._config.progress_seconds)
        arena = self._new_arena()
        if arena is None or not self._attach(stream, spec, arena):
            if arena is not None:
                arena.retire()
            return None
        arena = self._keep(stream.address, spec.incarnation, arena)
        return SlotCarrier(arena, progress_seconds=self._config.progress_seconds)

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

    def _arena_for(self, address: str, incarnation: bytes) -> Arena | None:
        with self._lock:
            owner, arena = self._arenas.get(address, (b"", None))
        return arena if arena is not None and owner == incarnation and not arena.is_retired else None

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

    def _keep(self, address: str, incarnation: bytes, arena: Arena) -> Arena:
        arena.unlink()
        with self._lock:
            self._arenas[address] = (incarnation, arena)
        return arena

    def close(self) -> None:
        with self._lock:
            arenas = [arena for _, arena in self._arenas.values()]
            self._arenas.clear()
        for arena in arenas:
            arena.retire()
