"""The planes of a cache as torch tensors, on a CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.engine.kv_cache.array_plane import ArrayPlane, Words
from outrider.engine.kv_cache.base import Bytes, CachePlane, Slots
from outrider.engine.kv_cache.device_bytes import DeviceBytes
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.transfer import empty_page_locked, upload

Fence = torch.cuda.Event

FACTOR_STEP = 0x1E3779B97F4A7C15
"""Of `CopyStream.checksum`: factors of words at near places have few bits in common. Odd, below 2**63."""

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor_of(values: Words | Tensor) -> Tensor:
    """Numbers as an array has them (see WORDS), in its memory; a tensor as it is."""
    if isinstance(values, Tensor):
        return values
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


def words_of(tensor: Tensor) -> Words:
    """The numbers of a tensor on the CPU, in its memory where that is contiguous."""
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class TensorMemory:
    """A `PlaneMaker`: planes on one device, whose frames are copied on one stream."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self.copies = CopyStream(self._device) if self._device.type == "cuda" else None

    def make_plane(self, plane: PlaneSpec, *, num_blocks: int, block_size: int) -> CachePlane:
        if self.copies is None:
            return HostTensorPlane(plane, num_blocks=num_blocks, block_size=block_size)
        shape = (plane.num_layers, num_blocks, block_size, plane.num_heads, plane.head_dim)
        return TensorPlane(torch.zeros(shape, dtype=TORCH_DTYPES[plane.dtype], device=self._device), self.copies)

    def fence(self) -> Fence | None:
        return None if self.copies is None else self.copies.fence()


class CopyStream:
    """Copies between a GPU and the host, on a stream beside the forward passes. Of one cache; any thread may use it.

    Forward passes run on the device's default stream. A fence marks the work queued there; a copy comes after it and
    runs beside what follows. The thread that asks for a copy waits for its fence before the copy is queued: the stream
    is a queue, in which a copy that waited for a running step would hold up those behind it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._factors = torch.zeros(0, dtype=torch.int64, device=device)  # of `checksum`

    def fence(self) -> Fence:
        """After all work that is queued by now. Who waits for it sleeps: that may be as long as a step."""
        fence = torch.cuda.Event(blocking=True)
        fence.record(torch.cuda.default_stream(self.device))
        return fence

    def gather(self, rows: Tensor, slots: Slots, after: Fence) -> Tensor:
        """Some slots of [layers, slots, width], once `after` is reached: [layers, num_slots, width], page-locked."""
        after.synchronize()
        with torch.cuda.stream(self._stream):
            taken = self._select(rows, slots)
            host = empty_page_locked(taken.shape, taken.dtype)
            host.copy_(taken, non_blocking=True)
            self.wait()
        return host

    def take(self, rows: Tensor, slots: Slots, after: Fence) -> DeviceBytes:
        """What `gather` gives, but on the device. The host waits for `after` only."""
        after.synchronize()
        with torch.cuda.stream(self._stream):
            return DeviceBytes(self._select(rows, slots).view(torch.uint8).reshape(-1), self)

    def _select(self, rows: Tensor, slots: Slots) -> Tensor:
        return rows.index_select(1, upload(slots, self.device))

    def scatter(self, rows: Tensor, slots: Slots, payload: Bytes | DeviceBytes, after: Fence) -> None:
        """Writes some slots of [layers, slots, width] once `after` is reached. Later work must not use them.

        `payload` [layers * num_slots * width * itemsize] uint8 may be used again afterwards.
        """
        source = payload.tensor if isinstance(payload, DeviceBytes) else _page_locked_copy(payload)
        after.synchronize()
        with torch.cuda.stream(self._stream):
            indices = upload(slots, self.device)
            values = source.to(self.device, non_blocking=True)
            rows.index_copy_(1, indices, values.view(rows.dtype).view(rows.shape[0], -1, rows.shape[2]))
            self.wait()

    def upload(self, payload: bytes) -> DeviceBytes:
        """A copy on the device."""
        source = _page_locked_copy(np.frombuffer(payload, dtype=np.uint8))
        with torch.cuda.stream(self._stream):
            return DeviceBytes(source.to(self.device, non_blocking=True), self)

    def download(self, payload: Tensor) -> bytes:
        """A copy of [num_bytes] uint8 on the host."""
        with torch.cuda.stream(self._stream):
            return payload.cpu().numpy().tobytes()

    def empty(self, num_bytes: int) -> DeviceBytes:
        """Memory for a copy that is queued on this stream (`handle`)."""
        with torch.cuda.stream(self._stream):
            return DeviceBytes(torch.empty(num_bytes, dtype=torch.uint8, device=self.device), self)

    def checksum(self, payload: Tensor) -> int:
        """Of [num_bytes] uint8: the sum of its words of 8 bytes, each times an odd number that depends on its place.

        All modulo 2**64, so it is the same in whatever order a device adds. A change of one word changes it. It finds
        bytes that were read too early or at a wrong place; like xxh3, it is no defence against forgery.
        """
        with torch.cuda.stream(self._stream):
            words = torch.nn.functional.pad(payload, (0, -len(payload) % 8)).view(torch.int64)
            if len(words) > len(self._factors):
                self._factors = torch.arange(len(words), dtype=torch.int64, device=self.device) * FACTOR_STEP | 1
            return int((words * self._factors[: len(words)]).sum()) % 2**64

    @property
    def handle(self) -> int:
        """The stream (cudaStream_t), for copies that torch does not make."""
        return self._stream.cuda_stream

    def wait(self) -> None:
        """The host waits for what has been queued on the stream by now."""
        done = torch.cuda.Event()
        done.record(self._stream)
        done.synchronize()


def _page_locked_copy(payload: Bytes) -> Tensor:
    host = empty_page_locked(payload.shape, torch.uint8)
    host.numpy()[:] = payload
    return host


class HostTensorPlane(ArrayPlane):
    """An array, which torch would copy by a pool of threads for the caller's (see `EngineThread`)."""

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """Of each layer [num_blocks, block_size, heads, dim]."""
        return tensor_of(self._array).unbind(0)


class TensorPlane:
    """A `CachePlane` on a GPU in one tensor, so that a frame of several layers is one copy."""

    def __init__(self, tensor: Tensor, copies: CopyStream) -> None:
        """`tensor`: [layers, blocks, block_size, heads, dim]. `copies`: of its device."""
        self._tensor = tensor
        self._copies = copies

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """Of each layer [num_blocks, block_size, heads, dim]."""
        return self._tensor.unbind(0)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, destinations = self._upload(pairs)
        self._tensor.index_copy_(1, destinations, self._tensor.index_select(1, sources))

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, destinations = self._upload(pairs)
        rows = self._tensor.flatten(1, 2).flatten(2)  # [layers, slots, heads * dim]
        rows.index_copy_(1, destinations, rows.index_select(1, sources))

    def read(self, layers: range, slots: Slots, heads: range, after: Fence | None) -> Bytes:
        taken = self._copies.gather(self.rows(layers, heads), slots, after or self._copies.fence())
        array: Bytes = taken.view(torch.uint8).reshape(-1).numpy()
        return array

    def take(self, layers: range, slots: Slots, heads: range, after: Fence | None) -> DeviceBytes:
        """What `read` gives, on the device."""
        return self._copies.take(self.rows(layers, heads), slots, after or self._copies.fence())

    def write(self, layers: range, slots: Slots, heads: range, rows: Bytes | DeviceBytes, after: Fence | None) -> None:
        self._copies.scatter(self.rows(layers, heads), slots, rows, after or self._copies.fence())

    def _upload(self, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        sources, destinations = upload(np.asarray(pairs, dtype=np.int64).T, self._tensor.device)
        return sources, destinations

    def rows(self, layers: range, heads: range) -> Tensor:
        """Some layers and heads of all slots: [layers, slots, heads * dim], a view."""
        rows = self._tensor[layers.start : layers.stop].flatten(1, 2)  # [layers, slots, heads, dim]
        return rows.flatten(2)[:, :, heads.start * rows.shape[3] : heads.stop * rows.shape[3]]
