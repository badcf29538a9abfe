"""Connector `cuda_ipc`: payload in memory of the sender's GPU, which the receiver maps with CUDA IPC.

It works like an arena in shared memory: the sender owns it, and the receiver only copies from it to its own memory.
The slots are not in the file. Instead, the file gives this user's processes on this machine the handle of the slots'
memory. The CUDA driver allocates that memory, because memory from torch would also share other data in the same
allocation.

    file      handle of the memory 64s, nonce 16s; a receiver locks the file while it has the memory mapped
    memory    the nonce at 0, the slots from 4096 on
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
    from outrider.engine.kv_cache.tensor_planes import CopyStream, DeviceBytes, DeviceRows

DESCRIPTION = struct.Struct(f"<64s{NONCE_BYTES}s")
"""Format of the file. It must not begin with the nonce, or older receivers would take the file for shared memory and
read zeros from it."""
ALLOCATION_BYTES = 2 << 20
"""Granularity in which the driver shares memory, in bytes: other data in the same unit would be shared too."""
LAZY_ENABLE_PEER_ACCESS = 1  # of CUipcMem_flags: allows mapping memory of another GPU that has peer access

log = get_logger("kv_transfer")


class SharedGpu:
    """Shares memory on the KV cache's GPU, and maps memory of other processes. Thread-safe. Methods raise OSError."""

    def __init__(self, copies: CopyStream, driver: Any) -> None:
        """`copies`: the cache's stream. `driver`: `cuda.bindings.driver`, a dependency of torch's builds for CUDA."""
        self.copies = copies
        self._driver = driver
        self._context: Any = None
        self._context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", copies.device.index or 0))
        self.left: list[ReusableMemory] = []  # memory of dropped arenas, which later arenas reuse

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the driver in torch's context and returns its result."""
        if self._context is not None:
            self._driver.cuCtxSetCurrent(self._context)  # the context is set per thread, and any thread may call this
        error, *result = getattr(self._driver, name)(*arguments)
        if int(error):
            raise OSError(f"{name}: {error.name}")
        return result[0] if result else None

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """Returns pointer and handle of a dropped arena's memory if any is reusable, otherwise of new memory.

        New memory is kept until the process ends, because the driver does not allow freeing memory that another process
        may have mapped. All arenas of a process have the same size.
        """
        for memory in [*self.left]:
            if memory.is_reusable():
                self.left.remove(memory)
                os.close(memory.file)
                return memory.pointer, memory.handle
        pointer = int(self.call("cuMemAlloc", -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES))
        try:
            return pointer, bytes(self.call("cuIpcGetMemHandle", pointer).reserved)
        except OSError:  # there is no CUDA IPC, so no process can have mapped the memory
            self.call("cuMemFree", pointer)
            raise

    def map(self, handle: bytes) -> int:
        """Maps another process's memory and returns its pointer."""
        wanted = self._driver.CUipcMemHandle()
        wanted.reserved = handle
        return int(self.call("cuIpcOpenMemHandle", wanted, LAZY_ENABLE_PEER_ACCESS))

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Queues a copy on the cache's copy stream."""
        self.call("cuMemcpyDtoDAsync", destination, source, num_bytes, self.copies.stream.cuda_stream)


class ReusableMemory(NamedTuple):
    """The memory of a dropped arena."""

    pointer: int
    handle: bytes
    file: int  # descriptor of the arena's file
    taken: dict[int, object]  # the unacknowledged slots: the same dict as the arena's

    def is_reusable(self) -> bool:
        """Returns whether nobody reads the memory: all slots are acknowledged, or the receiver unmapped it or ended."""
        try:
            if self.taken:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # the receiver may be frozen, and read the memory later
        return True


class DeviceArena(Arena):
    """The sender's side. After it is dropped, a later arena may reuse its memory."""

    def __init__(self, gpu: SharedGpu, config: KvTransferConfig) -> None:
        slots = {"num_bytes": config.device_arena_bytes, "slot_bytes": config.device_frame_bytes}
        super().__init__(directory=config.arena_directory, has_slots=False, **slots)
        try:
            pointer, handle = gpu.allocate(self.num_bytes)
            left = ReusableMemory(pointer, handle, os.dup(self._fd), self._taken)
            weakref.finalize(self, gpu.left.append, left).atexit = False
            self._memory = gpu.copies.tensor_at(pointer, self.num_bytes)
            gpu.copies.fill(self._memory[:NONCE_BYTES], self.nonce)  # as frames are written, so that it proves the way
        except (OSError, RuntimeError) as error:
            self.unlink()
            raise OSError(str(error)) from error
        self._map[: DESCRIPTION.size] = DESCRIPTION.pack(handle, self.nonce)

    def write(self, offset: int, payload: Any) -> DeviceBytes:
        """Gathers DeviceRows into a taken slot. Returns before the GPU has done so; its checksum waits for that."""
        rows: DeviceRows = payload
        return rows.gather(self._memory[offset : offset + len(rows)])


class DeviceArenaReader(ArenaReader):
    """Maps arenas of GPUs. If mapping fails, senders use shared memory; the first failure is logged as a warning."""

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
            if copy_out(0, NONCE_BYTES).to_host() != nonce:  # the nonce is copied as frames are, from GPU to GPU
                raise OSError("the nonce that was read is not the one that was written")
        except OSError as error:
            if not self._has_warned:
                log.warning("memory of a sender's GPU cannot be mapped", error=str(error))
            self._has_warned = True
            return None
        return mapping

    def _unmap(self, pointer: int, file: int) -> None:
        self._gpu.call("cuIpcCloseMemHandle", pointer)
        os.close(file)  # releases the lock

    def _copy_out(self, pointer: int, offset: int, num_bytes: int) -> DeviceBytes:
        """Copies bytes out of mapped memory. Returns before the GPU has copied them."""
        taken = self._gpu.copies.empty(num_bytes)
        self._gpu.copy(taken.tensor.data_ptr(), pointer + offset, num_bytes)
        return taken


def open_shared_gpu(copies: CopyStream | None, config: KvTransferConfig) -> SharedGpu | None:
    """Returns the cache's GPU; None if the cache is not on one GPU, or CUDA IPC is unavailable or not accepted.

    Raises: ConfigError in place of returning None if the settings allow only CUDA IPC.
    """
    if copies is not None and CUDA_IPC in config.accepted:
        try:
            from cuda.bindings import driver

            return SharedGpu(copies, driver)
        except (ImportError, OSError, RuntimeError) as error:
            log.warning("no CUDA IPC", error=str(error))
    if config.connector == CUDA_IPC:
        raise ConfigError(f"kv_transfer.connector is {CUDA_IPC}, but the KV cache is not on a GPU with it: choose auto")
    return None
