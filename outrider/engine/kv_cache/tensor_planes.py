"""Cache planes as torch tensors, on a CPU or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
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


def in_words(rows: Tensor) -> Tensor:
    """Returns [layers, slots, width] as 8-byte words if they fit: a GPU moves elements, whatever their size."""
    edges = rows.shape[2], rows.stride(0), rows.stride(1), rows.storage_offset()
    return rows if any(edge * rows.itemsize % 8 for edge in edges) else rows.view(torch.int64)


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
        after.synchronize()
        with torch.cuda.stream(self.stream):
            taken = in_words(rows).index_select(1, upload(slots, self.device)).view(rows.dtype)
            host = empty_page_locked(taken.shape, taken.dtype)
            host.copy_(taken, non_blocking=True)
            self.wait()
        return host

    def take(self, rows: Tensor, slots: Slots, after: Fence) -> DeviceRows:
        """Waits for `after`, and returns what `gather` would copy."""
        after.synchronize()
        return DeviceRows(rows, slots, self)

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
            words, values = in_words(rows), source.to(self.device, non_blocking=True)
            words.index_copy_(1, indices, values.view(words.dtype).view(words.shape[0], -1, words.shape[2]))
            self.wait()

    def tensor_at(self, pointer: int, num_bytes: int) -> Tensor:
        """Returns a tensor [num_bytes] uint8 over memory that torch has not allocated and that it never frees."""
        description = {"shape": (num_bytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=description), device=self.device)

    def fill(self, target: Tensor, content: bytes) -> None:
        """Writes bytes from main memory to `target` [len(content)] uint8. The host waits for it."""
        with torch.cuda.stream(self.stream):
            target.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

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
class DeviceRows:
    """Written slots of a plane on a GPU that are not copied yet: the payload of a frame to be sent."""

    rows: Tensor  # [layers, slots, width]
    slots: Slots
    copies: CopyStream

    def __len__(self) -> int:
        return self.rows.shape[0] * self.slots.size * self.rows.shape[2] * self.rows.itemsize

    def gather(self, target: Tensor) -> DeviceBytes:
        """Copies the rows to `target` [len(self)] uint8. Returns before the GPU has copied them."""
        with torch.cuda.stream(self.copies.stream):
            words = in_words(self.rows)
            out = target.view(words.dtype).view(words.shape[0], -1, words.shape[2])
            torch.index_select(words, 1, upload(self.slots, self.copies.device), out=out)
        return DeviceBytes(target, self.copies)


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
            padding = -len(self) % 8
            padded = torch.nn.functional.pad(self.tensor, (0, padding)) if padding else self.tensor
            words = padded.view(torch.int64)
            # The products replace the factors, and are freed before the wait, as they are as large as the frame.
            return int(torch.arange(1, 2 * len(words) + 1, 2, device=words.device).mul_(words).sum()) % 2**64

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

    def block(self, block_id: int) -> Tensor:
        return self._tensor[:, block_id]

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
