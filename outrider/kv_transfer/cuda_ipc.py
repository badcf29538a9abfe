"""Memory of a GPU that two processes share by CUDA IPC.

It is allocated by the driver, apart from torch: of an allocation of torch's the other process would see all that torch
keeps in it. `cuda.bindings` comes with torch's builds for CUDA.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from outrider.engine.kv_cache.device_bytes import DeviceBytes
from outrider.errors import ConfigError
from outrider.kv_transfer.config import KvTransferConfig
from outrider.service.telemetry.logging import get_logger

if TYPE_CHECKING:
    from outrider.engine.kv_cache.tensor_planes import CopyStream
    from outrider.engine.ranks.sharded_cache import KVCache

CONNECTOR = "cuda_ipc"
HANDLE_BYTES = 64
ALLOCATION_BYTES = 2 << 20
"""The driver shares multiples of it: what else lies in one would be shared as well."""
LAZY_ENABLE_PEER_ACCESS = 1
"""Of CUipcMem_flags: memory of another GPU is mapped where the two can reach each other."""

log = get_logger("kv_transfer")


class DeviceMemoryError(OSError):
    """The GPU's memory cannot be had, shared, mapped or copied."""


class DeviceMemory:
    """[num_bytes] of a GPU's memory, of this process or mapped from another one."""

    def __init__(self, gpu: SharedGpu, pointer: int, num_bytes: int, handle: bytes) -> None:
        self.num_bytes = num_bytes
        self.handle = handle  # by which another process maps it
        self._gpu = gpu
        self._pointer = pointer

    def copy_in(self, offset: int, payload: DeviceBytes) -> None:
        """Returns once it is there, for every process. Raises: DeviceMemoryError."""
        self._gpu.copy(self._pointer + offset, payload.tensor.data_ptr(), len(payload))
        self._gpu.copies.wait()

    def copy_out(self, offset: int, num_bytes: int) -> DeviceBytes:
        """A private copy; the host does not wait for it. Raises: DeviceMemoryError."""
        taken = self._gpu.copies.empty(num_bytes)
        self._gpu.copy(taken.tensor.data_ptr(), self._pointer + offset, num_bytes)
        return taken


class SharedGpu:
    """Shares memory of one GPU with other processes, and maps theirs. Thread-safe."""

    def __init__(self, copies: CopyStream, driver: Any) -> None:
        """`copies`: of the GPU's cache. `driver`: `cuda.bindings.driver`. Raises: DeviceMemoryError."""
        self.copies = copies
        self._driver = driver
        self._context = None
        device = self._call("cuDeviceGet", copies.device.index or 0)
        self._context = self._call("cuDevicePrimaryCtxRetain", device)  # torch's

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Memory that other processes may map. Raises: DeviceMemoryError.

        It is kept until this process ends: the driver forbids to free what another one may still have mapped.
        """
        pointer = self._call("cuMemAlloc", -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES)
        handle = self._call("cuIpcGetMemHandle", pointer)
        return DeviceMemory(self, int(pointer), num_bytes, bytes(handle.reserved))

    def map(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """Another process's memory, for as long as the result lives. Raises: DeviceMemoryError."""
        wanted = self._driver.CUipcMemHandle()
        wanted.reserved = handle
        pointer = self._call("cuIpcOpenMemHandle", wanted, LAZY_ENABLE_PEER_ACCESS)
        memory = DeviceMemory(self, int(pointer), num_bytes, handle)
        weakref.finalize(memory, self._call, "cuIpcCloseMemHandle", pointer).atexit = False
        return memory

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Queues a copy on the cache's stream. Raises: DeviceMemoryError."""
        self._call("cuMemcpyDtoDAsync", destination, source, num_bytes, self.copies.handle)

    def _call(self, name: str, *arguments: Any) -> Any:
        """What a function of the driver returns, in the context that torch uses. Raises: DeviceMemoryError."""
        if self._context is not None:
            self._driver.cuCtxSetCurrent(self._context)  # any thread may call
        error, *result = getattr(self._driver, name)(*arguments)
        if int(error):
            raise DeviceMemoryError(f"{name}: {error.name}")
        return result[0] if result else None


def open_shared_gpu(kv_cache: KVCache, config: KvTransferConfig) -> SharedGpu | None:
    """The GPU of a cache. None: it is on a CPU or on several GPUs, CUDA IPC is not wanted, or the driver has none.

    Raises: ConfigError where nothing else is wanted.
    """
    if CONNECTOR not in config.accepted:
        return None
    problem = "the KV cache is not on one GPU"
    if kv_cache.copies is not None:
        try:
            from cuda.bindings import driver

            return SharedGpu(kv_cache.copies, driver)
        except (ImportError, OSError, RuntimeError) as error:
            problem = str(error)
            log.warning("no CUDA IPC", error=problem)
    if config.connector == CONNECTOR:
        raise ConfigError(f"kv_transfer.connector is {CONNECTOR}, but {problem}: choose auto")
    return None
