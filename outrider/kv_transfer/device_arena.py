"""An arena in the memory of the sender's GPU: the connector `cuda_ipc`.

Everything is as in an arena of shared memory (see `arena`): the sender owns it, and the receiver only reads it, by
copies to memory of its own. The file has no slots. It tells processes of this user on this machine where they are.

    file           nonce 16s, handle of the memory 64s, size of the memory u64
    memory         from 0 the nonce, from 4096 the slots
"""

from __future__ import annotations

import os
import struct
import weakref
from typing import TypeAlias

from outrider.engine.kv_cache.device_bytes import DeviceBytes
from outrider.kv_transfer.arena import HEAD_BYTES, NONCE_BYTES, Arena, ArenaMapping, ArenaReader, arena_path, own_file
from outrider.kv_transfer.base import Payload
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.cuda_ipc import CONNECTOR, HANDLE_BYTES, DeviceMemory, DeviceMemoryError, SharedGpu
from outrider.kv_transfer.shared_memory import ArenaSource
from outrider.service.telemetry.logging import get_logger

DESCRIPTION = struct.Struct(f"<{NONCE_BYTES}s{HANDLE_BYTES}sQ")

log = get_logger("kv_transfer")

Spare: TypeAlias = list[DeviceMemory]


class DeviceArena(Arena):
    """The sender's side. Once it is dropped its memory is another arena's, unless a receiver may still read of it."""

    is_on_device = True

    def __init__(self, gpu: SharedGpu, spare: Spare, *, directory: str, num_bytes: int, slot_bytes: int) -> None:
        """`spare`: memory of arenas of this size that were dropped. Raises: OSError."""
        super().__init__(directory=directory, num_bytes=num_bytes, slot_bytes=slot_bytes)
        try:
            self._memory = _spare_or_new(gpu, spare, self.num_bytes)
            self._memory.copy_in(0, gpu.copies.upload(self.nonce))
        except OSError:
            self.unlink()
            raise
        self._map[: DESCRIPTION.size] = DESCRIPTION.pack(self.nonce, self._memory.handle, self.num_bytes)
        weakref.finalize(self, _take_back, self._memory, self._taken, spare).atexit = False

    def _file_bytes(self) -> int:
        return HEAD_BYTES

    def _allocate(self, offset: int) -> None:
        """All slots are there."""

    def write(self, offset: int, payload: Payload) -> None:
        """Fills a taken slot; returns once every process sees it. Raises: DeviceMemoryError."""
        assert isinstance(payload, DeviceBytes)
        self._memory.copy_in(offset, payload)


def _spare_or_new(gpu: SharedGpu, spare: Spare, num_bytes: int) -> DeviceMemory:
    try:
        return spare.pop()
    except IndexError:
        return gpu.allocate(num_bytes)


def _take_back(memory: DeviceMemory, taken: dict[int, object], spare: Spare) -> None:
    if not taken:  # else a receiver that was not drained may read of it once it is thawed: it is kept for nobody
        spare.append(memory)


class DeviceArenaSource(ArenaSource):
    """Offers arenas in a GPU's memory to receivers whose caches are on GPUs that reach it."""

    name = CONNECTOR

    def __init__(self, gpu: SharedGpu, config: KvTransferConfig) -> None:
        super().__init__(config)
        self._gpu = gpu
        self._spare: Spare = []

    def make_arena(self) -> Arena:
        return DeviceArena(
            self._gpu,
            self._spare,
            directory=self._config.arena_directory,
            num_bytes=self._config.arena_bytes,
            slot_bytes=self._config.device_frame_bytes,
        )


class DeviceArenaReader(ArenaReader):
    """The receiver's side. Thread-safe."""

    def __init__(self, gpu: SharedGpu, directory: str) -> None:
        super().__init__(directory)
        self._gpu = gpu
        self._has_warned = False

    def _map(self, arena_id: bytes, num_bytes: int) -> ArenaMapping | None:
        try:
            with own_file(arena_path(self._directory, arena_id)) as (descriptor, _):
                nonce, handle, held_bytes = DESCRIPTION.unpack(os.pread(descriptor, DESCRIPTION.size, 0))
        except (OSError, struct.error):
            return None  # another machine, or unlinked
        if held_bytes != num_bytes:
            return None
        try:
            memory = self._gpu.map(handle, num_bytes)
            if bytes(memory.copy_out(0, NONCE_BYTES)) != nonce:
                raise DeviceMemoryError("this GPU reads other bytes than the sender's has written")
        except (DeviceMemoryError, RuntimeError) as error:  # RuntimeError: torch's
            if not self._has_warned:
                self._has_warned = True
                log.warning("a sender's GPU memory cannot be mapped; KV goes through main memory", error=str(error))
            return None
        return ArenaMapping(arena_id, nonce, num_bytes, memory.copy_out)
