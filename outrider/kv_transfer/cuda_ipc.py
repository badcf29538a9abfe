"""Connector `cuda_ipc`: payload in memory of the sender's GPU, which the receiver maps by CUDA IPC.

Everything is as in an arena of shared memory: the sender owns it, and the receiver only reads it, by copies to memory
of its own. The file has no slots, but tells processes of this user on this machine where they are. The driver allocates
them, apart from torch: with memory of torch's, the receiver would get all that torch keeps beside it.

    file      nonce 16s, handle of the memory 64s, its size u64
    memory    from 0 the nonce, from 4096 the slots
"""

from __future__ import annotations

import functools
import os
import struct
import weakref
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError
from outrider.kv_transfer.arena import NONCE_BYTES, Arena, ArenaMapping, ArenaReader, arena_path, own_file
from outrider.kv_transfer.base import Payload
from outrider.kv_transfer.config import CUDA_IPC, KvTransferConfig
from outrider.service.telemetry.logging import get_logger

if TYPE_CHECKING:
    from outrider.engine.kv_cache.tensor_planes import CopyStream

DESCRIPTION = struct.Struct(f"<{NONCE_BYTES}s64sQ")
ALLOCATION_BYTES = 2 << 20
"""The driver shares multiples of it: what else lies in one would be shared as well."""
LAZY_ENABLE_PEER_ACCESS = 1  # of CUipcMem_flags: memory of another GPU is mapped where the two reach each other

log = get_logger("kv_transfer")


class SharedGpu:
    """Shares memory of the GPU that has a cache, and maps that of other processes. Thread-safe; raises OSError."""

    def __init__(self, copies: CopyStream, driver: Any) -> None:
        """`copies`: of the cache. `driver`: `cuda.bindings.driver`, which torch's builds for CUDA bring."""
        self.copies = copies
        self._driver = driver
        self._context: Any = None
        self._context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", copies.device.index or 0))
        self.spare: list[tuple[int, bytes]] = []  # memory of arenas that are no more: pointer, handle

    def call(self, name: str, *arguments: Any) -> Any:
        """What a function of the driver returns, in the context that torch uses."""
        if self._context is not None:
            self._driver.cuCtxSetCurrent(self._context)  # any thread may call
        error, *result = getattr(self._driver, name)(*arguments)
        if int(error):
            raise OSError(f"{name}: {error.name}")
        return result[0] if result else None

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """Pointer and handle of memory that is kept until the process ends: the driver forbids to free what another
        process may have mapped.
        """
        pointer = self.call("cuMemAlloc", -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES)
        return int(pointer), bytes(self.call("cuIpcGetMemHandle", pointer).reserved)

    def map(self, handle: bytes) -> int:
        """The pointer to another process's memory."""
        wanted = self._driver.CUipcMemHandle()
        wanted.reserved = handle
        return int(self.call("cuIpcOpenMemHandle", wanted, LAZY_ENABLE_PEER_ACCESS))

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Queues it on the stream of `copies`."""
        self.call("cuMemcpyDtoDAsync", destination, source, num_bytes, self.copies.stream.cuda_stream)


class DeviceArena(Arena):
    """The sender's side. When it is dropped, its memory is a later arena's, unless a receiver may still read of it."""

    def __init__(self, gpu: SharedGpu, config: KvTransferConfig) -> None:
        slots = {"num_bytes": config.arena_bytes, "slot_bytes": config.device_frame_bytes}
        super().__init__(directory=config.arena_directory, has_slots=False, **slots)
        self._gpu = gpu
        try:
            memory = gpu.spare.pop() if gpu.spare else gpu.allocate(self.num_bytes)
            gpu.call("cuMemcpyHtoD", memory[0], self.nonce, NONCE_BYTES)
        except OSError:
            self.unlink()
            raise
        self._pointer, handle = memory
        self._map[: DESCRIPTION.size] = DESCRIPTION.pack(self.nonce, handle, self.num_bytes)
        weakref.finalize(self, _take_back, memory, self._taken, gpu.spare).atexit = False

    def write(self, offset: int, payload: Any) -> None:
        """Fills a taken slot with DeviceBytes; returns once they are there, for every process."""
        self._gpu.copy(self._pointer + offset, payload.tensor.data_ptr(), len(payload))
        self._gpu.copies.wait()


def _take_back(memory: tuple[int, bytes], taken: dict[int, object], spare: list[tuple[int, bytes]]) -> None:
    if not taken:  # else a receiver that was not drained may read of it, if only when it is thawed
        spare.append(memory)


class DeviceArenaReader(ArenaReader):
    """Maps arenas of GPUs. The first that cannot be mapped is a warning: their senders use shared memory."""

    def __init__(self, gpu: SharedGpu, directory: str) -> None:
        super().__init__(directory)
        self._gpu = gpu
        self._has_warned = False

    def _map(self, arena_id: bytes, num_bytes: int) -> ArenaMapping | None:
        try:
            with own_file(arena_path(self._directory, arena_id)) as (descriptor, _):
                nonce, handle, size = DESCRIPTION.unpack(os.pread(descriptor, DESCRIPTION.size, 0))
        except (OSError, struct.error):
            return None  # another machine, or unlinked
        try:
            pointer = self._gpu.map(handle)
            mapping = ArenaMapping(arena_id, nonce, size, functools.partial(self._copy_out, pointer))
            weakref.finalize(mapping, self._gpu.call, "cuIpcCloseMemHandle", pointer).atexit = False
            found = bytearray(NONCE_BYTES)
            self._gpu.call("cuMemcpyDtoH", found, pointer, NONCE_BYTES)
            if (found, size) != (nonce, num_bytes):
                raise OSError("other bytes are read than were written")
        except OSError as error:
            if not self._has_warned:
                log.warning("memory of a sender's GPU cannot be mapped", error=str(error))
            self._has_warned = True
            return None
        return mapping

    def _copy_out(self, pointer: int, offset: int, num_bytes: int) -> Payload:
        """The host does not wait for it."""
        taken = self._gpu.copies.empty(num_bytes)
        self._gpu.copy(taken.tensor.data_ptr(), pointer + offset, num_bytes)
        return taken


def open_shared_gpu(copies: CopyStream | None, config: KvTransferConfig) -> SharedGpu | None:
    """The GPU of a cache, by its copies. None: the cache is not on one GPU, or CUDA IPC is not wanted or not there.

    Raises: ConfigError where nothing else is wanted.
    """
    if copies is not None and CUDA_IPC in config.accepted:
        try:
            from cuda.bindings import driver

            return SharedGpu(copies, driver)
        except (ImportError, OSError, RuntimeError) as error:
            log.warning("no CUDA IPC", error=str(error))
    if config.connector == CUDA_IPC:
        raise ConfigError(f"kv_transfer.connector is {CUDA_IPC}, but the KV cache is on no GPU with it: choose auto")
    return None
