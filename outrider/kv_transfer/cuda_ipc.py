"""Connector `cuda_ipc`: payload in memory of the sender's GPU, which the receiver maps by CUDA IPC.

Everything is as in an arena of shared memory: the sender owns it, and the receiver only reads it, by copies to memory
of its own. The slots are not in the file, which tells processes of this user on this machine where they are. The driver
allocates them, apart from torch: with memory of torch's, the receiver would get all that torch keeps beside it.

    file      handle of the memory 64s, nonce 16s; locked by a receiver for as long as it has the memory mapped
    memory    from 0 the nonce, from 4096 the slots
"""

from __future__ import annotations

import fcntl
import functools
import os
import struct
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.errors import ConfigError
from outrider.kv_transfer.arena import NONCE_BYTES, Arena, ArenaMapping, ArenaReader
from outrider.kv_transfer.config import CUDA_IPC, KvTransferConfig
from outrider.service.telemetry.logging import get_logger

if TYPE_CHECKING:
    from outrider.engine.kv_cache.tensor_planes import CopyStream, DeviceBytes

DESCRIPTION = struct.Struct(f"<64s{NONCE_BYTES}s")
"""Not as shared memory begins: an older receiver would take the file for that, and read zeros for slots."""
ALLOCATION_BYTES = 2 << 20
"""The driver shares multiples of it: what else lies in one would be shared as well."""
LAZY_ENABLE_PEER_ACCESS = 1  # of CUipcMem_flags: memory of another GPU is mapped where the two reach each other

log = get_logger("kv_transfer")


class SharedGpu:
    """Shares memory of the GPU that has a cache, and maps memory of other processes. Thread-safe; raises OSError."""

    def __init__(self, copies: CopyStream, driver: Any) -> None:
        """`copies`: of the cache. `driver`: `cuda.bindings.driver`, which torch's builds for CUDA bring."""
        self.copies = copies
        self._driver = driver
        self._context: Any = None
        self._context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", copies.device.index or 0))
        self.left: list[LeftMemory] = []  # for later arenas

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the driver, in the context that torch uses, and returns its result."""
        if self._context is not None:
            self._driver.cuCtxSetCurrent(self._context)  # any thread may call
        error, *result = getattr(self._driver, name)(*arguments)
        if int(error):
            raise OSError(f"{name}: {error.name}")
        return result[0] if result else None

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """Returns pointer and handle of memory that an arena has left, or else of new memory.

        New memory is kept until the process ends, because the driver forbids to free what another process may have
        mapped. All arenas of a process are of one size.
        """
        for memory in [*self.left]:
            if memory.is_unread():
                self.left.remove(memory)
                os.close(memory.file)
                return memory.pointer, memory.handle
        pointer = int(self.call("cuMemAlloc", -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES))
        try:
            return pointer, bytes(self.call("cuIpcGetMemHandle", pointer).reserved)
        except OSError:  # a GPU or system without CUDA IPC: nobody can map it
            self.call("cuMemFree", pointer)
            raise

    def map(self, handle: bytes) -> int:
        """Maps another process's memory and returns its pointer."""
        wanted = self._driver.CUipcMemHandle()
        wanted.reserved = handle
        return int(self.call("cuIpcOpenMemHandle", wanted, LAZY_ENABLE_PEER_ACCESS))

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Queues a copy on the stream of `copies`."""
        self.call("cuMemcpyDtoDAsync", destination, source, num_bytes, self.copies.stream.cuda_stream)


class LeftMemory(NamedTuple):
    """Memory of an arena that was dropped."""

    pointer: int
    handle: bytes
    file: int  # the arena's, a descriptor
    taken: dict[int, object]  # its slots that were not acknowledged

    def is_unread(self) -> bool:
        """Returns whether nobody reads it any more: all slots are acknowledged, or the receiver unmapped it or died."""
        try:
            if self.taken:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # a frozen receiver may read it once it is thawed
        return True


class DeviceArena(Arena):
    """The sender's side. When it is dropped, its memory is left for a later arena."""

    def __init__(self, gpu: SharedGpu, config: KvTransferConfig) -> None:
        slots = {"num_bytes": config.arena_bytes, "slot_bytes": config.device_frame_bytes}
        super().__init__(directory=config.arena_directory, has_slots=False, **slots)
        self._gpu = gpu
        try:
            self._pointer, handle = gpu.allocate(self.num_bytes)
            gpu.call("cuMemcpyHtoD", self._pointer, self.nonce, NONCE_BYTES)
        except OSError:
            self.unlink()
            raise
        self._map[: DESCRIPTION.size] = DESCRIPTION.pack(handle, self.nonce)
        left = LeftMemory(self._pointer, handle, os.dup(self._fd), self._taken)
        weakref.finalize(self, gpu.left.append, left).atexit = False

    def write(self, offset: int, payload: Any) -> None:
        """Fills a taken slot with DeviceBytes; returns once they are there, for every process."""
        self._gpu.copy(self._pointer + offset, payload.tensor.data_ptr(), len(payload))
        self._gpu.copies.wait()


class DeviceArenaReader(ArenaReader):
    """Maps arenas of GPUs. The first that cannot be mapped is a warning: their senders use shared memory."""

    def __init__(self, gpu: SharedGpu, directory: str) -> None:
        super().__init__(directory)
        self._gpu = gpu
        self._has_warned = False

    def _open(self, descriptor: int, arena_id: bytes, num_bytes: int) -> ArenaMapping | None:
        handle, nonce = DESCRIPTION.unpack(os.pread(descriptor, DESCRIPTION.size, 0))
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        try:
            pointer = self._gpu.map(handle)
            copy_out = functools.partial(self._copy_out, pointer)
            mapping = ArenaMapping(arena_id, nonce, num_bytes, copy_out)
            weakref.finalize(mapping, self._unmap, pointer, os.dup(descriptor)).atexit = False
            if copy_out(0, NONCE_BYTES).to_host() != nonce:  # read as frames are: from GPU to GPU
                raise OSError("other bytes are read than were written")
        except OSError as error:
            if not self._has_warned:
                log.warning("memory of a sender's GPU cannot be mapped", error=str(error))
            self._has_warned = True
            return None
        return mapping

    def _unmap(self, pointer: int, file: int) -> None:
        self._gpu.call("cuIpcCloseMemHandle", pointer)
        os.close(file)  # which ends its lock

    def _copy_out(self, pointer: int, offset: int, num_bytes: int) -> DeviceBytes:
        """Copies bytes out of mapped memory. The host does not wait for it."""
        taken = self._gpu.copies.empty(num_bytes)
        self._gpu.copy(taken.tensor.data_ptr(), pointer + offset, num_bytes)
        return taken


def open_shared_gpu(copies: CopyStream | None, config: KvTransferConfig) -> SharedGpu | None:
    """Returns the GPU of a cache, by its copies. None: the cache is not on one GPU, or CUDA IPC is off or missing.

    Raises: ConfigError where the settings allow nothing else.
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
