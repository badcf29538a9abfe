"""Connector `shared_memory`: the sender writes payloads to its arena and sends only their locations in messages."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import PeerLostError
from outrider.kv_transfer.arena import IDLE_SECONDS, Arena, sweep
from outrider.kv_transfer.base import TransferSpec
from outrider.kv_transfer.config import CUDA_IPC, KvTransferConfig
from outrider.kv_transfer.cuda_ipc import DeviceArena, SharedGpu
from outrider.kv_transfer.sender_stream import SenderStream
from outrider.service.telemetry.logging import get_logger

MAX_RECEIVERS = 32

log = get_logger("kv_transfer")


@dataclass(slots=True)
class _Offered:
    """The arena that was offered to one receiver."""

    arena: Arena | None  # None: the receiver could not attach to it
    address: str
    used_at: float  # clock time of the last transfer, or of the offer if the receiver could not attach


class ArenaSource:
    """Offers one arena to each receiving process, for all transfers to that process. Thread-safe.

    An arena is dropped if its receiver is lost, if another process answers at its address, or
    after IDLE_SECONDS without a transfer, when the receiver has dropped it, too. A receiver
    that could not attach, or for which there was no memory, gets another offer after IDLE_SECONDS.
    """

    def __init__(
        self, config: KvTransferConfig, gpu: SharedGpu | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`gpu`: the GPU whose memory holds the arenas; None: they are in shared memory."""
        self.name = "shared_memory" if gpu is None else CUDA_IPC
        self._gpu = gpu
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._offered: OrderedDict[bytes, _Offered] = OrderedDict()  # by incarnation, most recently used last
        sweep(config.arena_directory)

    def offer(self, stream: SenderStream, spec: TransferSpec) -> Arena | None:
        """Returns the arena that the receiver has attached to; None if it cannot attach.

        A receiver that has dropped its idle arena gets a new one. Raises: PeerLostError, AbortedError.
        """
        with self._lock:
            self._drop_idle()
            offered = self._offered.get(spec.incarnation)
        arena = None if offered is None else offered.arena
        if offered is not None and arena is None:
            return None
        try:
            if arena is None or arena.should_be_replaced or not self._attach(stream, spec, arena):
                arena = self._attach_new(stream, spec)
        except PeerLostError:
            with self._lock:
                self._offered.pop(spec.incarnation, None)
            raise
        with self._lock:
            self._remember(spec.incarnation, _Offered(arena, stream.address, self._clock()))
        return arena

    def _remember(self, incarnation: bytes, offered: _Offered) -> None:
        """Records what was offered. Running senders keep the arena that they use. Needs the lock."""
        self._offered.pop(incarnation, None)  # this process may have had another address
        for other in [key for key, known in self._offered.items() if known.address == offered.address]:
            del self._offered[other]
        self._offered[incarnation] = offered
        if len(self._offered) > MAX_RECEIVERS:  # limited, as decode nodes come and go
            self._offered.popitem(last=False)

    def _drop_idle(self) -> None:
        """Drops arenas that have not been used for IDLE_SECONDS. Needs the lock."""
        horizon = self._clock() - IDLE_SECONDS
        while self._offered and next(iter(self._offered.values())).used_at <= horizon:
            self._offered.popitem(last=False)

    def _attach_new(self, stream: SenderStream, spec: TransferSpec) -> Arena | None:
        try:
            arena = self._make_arena()
        except OSError as error:
            directory = self._config.arena_directory
            log.warning("no shared memory", connector=self.name, directory=directory, error=str(error))
            return None
        try:
            return arena if self._attach(stream, spec, arena) else None
        finally:
            arena.unlink()  # only the receiver needs its name, and only to attach

    def _make_arena(self) -> Arena:
        if self._gpu is not None:
            with self._lock:
                return DeviceArena(self._gpu, self._config)
        return Arena(
            directory=self._config.arena_directory,
            num_bytes=self._config.arena_bytes,
            slot_bytes=self._config.frame_bytes,
        )

    def _attach(self, stream: SenderStream, spec: TransferSpec, arena: Arena) -> bool:
        place = {"arena_bytes": arena.num_bytes, "arena_is_on_device": self._gpu is not None}
        return stream.hello(spec, arena_id=arena.arena_id, **place) == arena.nonce

    def close(self) -> None:
        with self._lock:
            arenas = [offered.arena for offered in self._offered.values() if offered.arena is not None]
            self._offered.clear()
        for arena in arenas:
            arena.retire()
