"""A fake of CUDA's driver, with POSIX shared memory in place of a GPU's memory.

It has the functions of `cuda.bindings.driver` that `outrider.kv_transfer.cuda_ipc` calls. If the real driver is
installed, tests/kv_transfer/test_cuda_ipc.py compares the two. "Device memory" is a file, a pointer is its address in
this process, and copies are immediate. Memory outlives its owner as long as another process has it mapped; whether that
holds on a GPU is tested in tests/gpu. Unlike with the real driver, a process may map its own memory.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import secrets
from pathlib import Path

import numpy as np
import torch

from outrider.engine.kv_cache import tensor_planes
from outrider.engine.kv_cache.tensor_planes import CopyStream, DeviceBytes, DeviceRows
from outrider.kv_transfer.cuda_ipc import SharedGpu
from tests.support.fake_gpu import fake_streams

LAZY_ENABLE_PEER_ACCESS = 1
HOST_STREAM = 1234


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400


class CUipcMemHandle:
    reserved = bytes(64)


class FakeCudaDriver:
    """The driver as one process sees it. `fails` has the names of the functions that return an error."""

    CUresult = CUresult
    CUipcMemHandle = CUipcMemHandle

    def __init__(self, directory: Path) -> None:
        """`directory` holds the files and is the same for all processes."""
        self._directory = directory
        self.fails: set[str] = set()
        self.num_allocated = 0
        self.num_freed = 0
        self.num_mapped = 0
        self._files: dict[int, Path] = {}  # own memory
        self._maps: dict[int, mmap.mmap] = {}  # by address

    def cuDeviceGet(self, ordinal):
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDevicePrimaryCtxRetain(self, device):
        return CUresult.CUDA_SUCCESS, f"context of {device}"

    def cuCtxSetCurrent(self, context):
        assert context == "context of 0"
        return (CUresult.CUDA_SUCCESS,)

    def cuMemAlloc(self, num_bytes):
        if "cuMemAlloc" in self.fails:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        assert num_bytes % (2 << 20) == 0, "what else is in its pages would be shared"
        path = self._directory / secrets.token_hex(16)
        path.touch()
        os.truncate(path, num_bytes)
        self.num_allocated += 1
        pointer = self._map(path)
        self._files[pointer] = path
        return CUresult.CUDA_SUCCESS, pointer

    def cuMemFree(self, pointer):
        del self._maps[pointer]
        self._files.pop(pointer).unlink()
        self.num_freed += 1
        return (CUresult.CUDA_SUCCESS,)

    def cuIpcGetMemHandle(self, pointer):
        if "cuIpcGetMemHandle" in self.fails:
            return CUresult.CUDA_ERROR_INVALID_HANDLE, None
        handle = CUipcMemHandle()
        handle.reserved = self._files[pointer].name.encode().ljust(64, b"\0")
        return CUresult.CUDA_SUCCESS, handle

    def cuIpcOpenMemHandle(self, handle, flags):
        assert flags == LAZY_ENABLE_PEER_ACCESS
        path = Path(self._directory, handle.reserved.rstrip(b"\0").decode())
        if "cuIpcOpenMemHandle" in self.fails or not path.exists():
            return CUresult.CUDA_ERROR_INVALID_HANDLE, None
        self.num_mapped += 1
        return CUresult.CUDA_SUCCESS, self._map(path)

    def cuIpcCloseMemHandle(self, pointer):
        del self._maps[pointer]
        self.num_mapped -= 1
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyDtoDAsync(self, destination, source, num_bytes, stream):
        assert stream == HOST_STREAM
        if "cuMemcpyDtoDAsync" in self.fails:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        ctypes.memmove(destination, source, num_bytes)
        return (CUresult.CUDA_SUCCESS,)

    def _map(self, path):
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._maps[pointer] = mapped
        return pointer


def tensor_at(_copies, pointer, num_bytes):
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(pointer), dtype=torch.uint8)


def fake_shared_gpu(monkeypatch, directory):
    """Returns (a SharedGpu whose memory is the host's, its driver). From now on, torch's streams do nothing."""
    fake_streams(monkeypatch)
    monkeypatch.setattr(torch.cuda.Stream, "cuda_stream", HOST_STREAM, raising=False)
    monkeypatch.setattr(tensor_planes, "empty_page_locked", lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    monkeypatch.setattr(CopyStream, "tensor_at", tensor_at)
    driver = FakeCudaDriver(Path(directory))
    return SharedGpu(CopyStream(torch.device("cpu")), driver), driver


def put_caches_on_gpu(gpu, monkeypatch):
    """Puts the planes of all caches that torch lays out from now on into the memory of this GPU."""

    def init(memory, _device):
        memory._device, memory.copies = gpu.copies.device, gpu.copies

    monkeypatch.setattr(tensor_planes.TensorMemory, "__init__", init)


def device_bytes(gpu, payload):
    """Returns the payload as a receiver has it after copying it from an arena."""
    return DeviceBytes(torch.frombuffer(bytearray(payload), dtype=torch.uint8), gpu.copies)


def device_rows(gpu, payload):
    """Returns the payload as a cache on the GPU would return it to a sender."""
    return DeviceRows(device_bytes(gpu, payload).tensor.view(1, 1, -1), np.zeros(1, dtype=np.int64), gpu.copies)
