"""Cache planes as torch tensors, on a CPU or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine.kv_cache.array_plane import ArrayPlane, Words
from outrider.engine.kv_cache.base import Bytes, CachePlane, Slots
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.transfer import empty_page_locked, upload

Fence = torch.cuda.Event

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor_of(values: Words | Tensor) -> Tensor:
    """Returns a tensor over an array's memory (see WORDS for its dtypes); returns a tensor unchanged."""
    if isinstance(values, Tensor):
        return values
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


def words_of(tensor: Tensor) -> Words:
    """Returns a CPU tensor's numbers as an array, which shares the memory of a contiguous tensor."""
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class TensorMemory:
    """A `PlaneMaker` for planes on one device. On a GPU, all their frames are copied on one stream."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self.copies = CopyStream(self._device) if self._device.type == "cuda" else None

    def make_plane(self, plane: PlaneSpec, *, num_blocks: int, block_size: int) -> CachePlane:
        if self.copies is None:
            return HostTensorPlane(plane, num_blocks=num_blocks, block_size=block_size)
        shape = (plane.num_layers, num_blocks, block_size, plane.num_heads, plane.head_dim)
        return TensorPlane(torch.zeros(shape, dtype=TORCH_DTYPES[plane.dtype], device=self._device), self.copies)


class CopyStream:
    """A stream for copies between a GPU and the host, separate from the stream of forward passes. One per cache;
    thread-safe.

    Forward passes run on the device's default stream. A fence marks the work queued there so far; a copy runs after its
    fence, concurrently with later work. The thread that requests a copy waits for the fence before it queues the copy,
    because a copy that waited in the stream would delay the copies behind it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def fence(self) -> Fence:
        """Returns a fence after all work queued so far. Threads that wait for it sleep, as it may take a whole step."""
        fence = torch.cuda.Event(blocking=True)
        fence.record(torch.cuda.default_stream(self.device))
        return fence

    def gather(self, rows: Tensor, slots: Slots, after: Fence) -> Tensor:
        """Waits for `after`, then copies some slots of [layers, slots, width] to page-locked memory: [layers,
        num_slots, width].
        """
        taken = self.take(rows, slots, after).tensor.view(rows.dtype).view(rows.shape[0], -1, rows.shape[2])
        with torch.cuda.stream(self.stream):
            host = empty_page_locked(taken.shape, taken.dtype)
            host.copy_(taken, non_blocking=True)
            self.wait()
        return host

    def take(self, rows: Tensor, slots: Slots, after: Fence) -> DeviceBytes:
        """Does what `gather` does, but leaves the bytes on the device. The host waits only for `after`."""
        after.synchronize()
        with torch.cuda.stream(self.stream):
            taken = rows.index_select(1, upload(slots, self.device))
            return DeviceBytes(taken.view(torch.uint8).reshape(-1), self)

    def scatter(self, rows: Tensor, slots: Slots, payload: Bytes | DeviceBytes, after: Fence) -> None:
        """Waits for `after`, then writes some slots of [layers, slots, width]. Work that is queued after the fence and
        before this returns must not use these slots.

        `payload`: [layers * num_slots * width * itemsize] uint8. The caller may reuse it afterwards.
        """
        if isinstance(payload, DeviceBytes):
            source = payload.tensor
        else:
            source = empty_page_locked(payload.shape, torch.uint8)
            source.numpy()[:] = payload
        after.synchronize()
        with torch.cuda.stream(self.stream):
            indices = upload(slots, self.device)
            values = source.to(self.device, non_blocking=True)
            rows.index_copy_(1, indices, values.view(rows.dtype).view(rows.shape[0], -1, rows.shape[2]))
            self.wait()

    def empty(self, num_bytes: int) -> DeviceBytes:
        """Allocates bytes on the device, to be written on this stream."""
        with torch.cuda.stream(self.stream):
            return DeviceBytes(torch.empty(num_bytes, dtype=torch.uint8, device=self.device), self)

    def wait(self) -> None:
        """Waits on the host for the work queued on the stream so far."""
        done = torch.cuda.Event()
        done.record(self.stream)
        done.synchronize()


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """The bytes of a frame that never leaves the GPU: [num_bytes] uint8, made and used on one stream."""

    tensor: Tensor
    copies: CopyStream

    def __len__(self) -> int:
        return len(self.tensor)

    def checksum(self) -> int:
        """Returns the sum of all 8-byte words, each multiplied by an odd factor given by its index. The host waits.

        The sum is modulo 2**64, so a device may add in any order. It detects data that was read too early or from a
        wrong place; like xxh3, it is no defence against forgery.
        """
        with torch.cuda.stream(self.copies.stream):
            words = torch.nn.functional.pad(self.tensor, (0, -len(self) % 8)).view(torch.int64)
            factors = torch.arange(1, 2 * len(words) + 1, 2, device=words.device)
            return int((words * factors).sum()) % 2**64

    def to_host(self) -> bytes:
        """Returns a copy in main memory. The host waits for it."""
        with torch.cuda.stream(self.copies.stream):
            return self.tensor.cpu().numpy().tobytes()


class HostTensorPlane(ArrayPlane):
    """A plane whose layers are tensors over a numpy array.

    numpy makes the copies, because torch's would start a thread pool for each calling thread (see `EngineThread`).
    """

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """The layers, each [num_blocks, block_size, heads, dim]."""
        return tensor_of(self._array).unbind(0)


class TensorPlane:
    """A `CachePlane` on a GPU, in one tensor so that a frame of several layers needs only one copy."""

    def __init__(self, tensor: Tensor, copies: CopyStream) -> None:
        """`tensor`: [layers, blocks, block_size, heads, dim]. `copies`: the copy stream of its device."""
        self._tensor = tensor
        self._copies = copies

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """The layers, each [num_blocks, block_size, heads, dim]."""
        return self._tensor.unbind(0)

    def move_slots(self, moves: Slots) -> None:
        sources, destinations = upload(moves, self._tensor.device)
        rows = self._tensor.flatten(1, 2).flatten(2)  # [layers, slots, heads * dim]
        rows.index_copy_(1, destinations, rows.index_select(1, sources))

    def read(self, layers: range, slots: Slots, heads: range, after: Fence | None) -> Bytes:
        taken = self._copies.gather(self.rows(layers, heads), slots, after or self._copies.fence())
        array: Bytes = taken.view(torch.uint8).reshape(-1).numpy()
        return array

    def write(self, layers: range, slots: Slots, heads: range, rows: Bytes | DeviceBytes, after: Any) -> None:
        self._copies.scatter(self.rows(layers, heads), slots, rows, after or self._copies.fence())

    def rows(self, layers: range, heads: range) -> Tensor:
        """Returns some layers and heads of all slots as a view: [layers, slots, heads * dim]."""
        rows = self._tensor[layers.start : layers.stop].flatten(1, 2)  # [layers, slots, heads, dim]
        return rows.flatten(2)[:, :, heads.start * rows.shape[3] : heads.stop * rows.shape[3]]
