"""The planes of a cache as torch tensors, on a CPU or on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.engine.kv_cache.base import Bytes, Slots
from outrider.engine.kv_cache.copy_stream import CopyStream, Fence
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.transfer import upload_ids

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TensorMemory:
    """A `PlaneMaker`: planes on one device, whose frames are copied on one stream."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._copies = CopyStream(self._device) if self._device.type == "cuda" else None

    def make_plane(self, plane: PlaneSpec, *, num_blocks: int, block_size: int) -> TensorPlane:
        shape = (plane.num_layers, num_blocks, block_size, plane.num_heads, plane.head_dim)
        return TensorPlane(_lazy_zeros(shape, TORCH_DTYPES[plane.dtype], self._device), self._copies)

    def fence(self) -> Fence | None:
        return None if self._copies is None else self._copies.fence()


class TensorPlane:
    """A `CachePlane` in one tensor, so that a frame of several layers is one copy."""

    def __init__(self, tensor: Tensor, copies: CopyStream | None) -> None:
        """`tensor`: [layers, blocks, block_size, heads, dim]. `copies`: of its device, None on a CPU."""
        self._tensor = tensor
        self._copies = copies

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """Of each layer [num_blocks, block_size, heads, dim]."""
        return self._tensor.unbind(0)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources = upload_ids([source for source, _ in pairs], self._tensor.device)
        destinations = upload_ids([destination for _, destination in pairs], self._tensor.device)
        if self._copies is not None:  # in two launches
            self._tensor.index_copy_(1, destinations, self._tensor.index_select(1, sources))
            return
        for layer in self.layers:
            layer.index_copy_(0, destinations, layer.index_select(0, sources))

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, destinations = [source for source, _ in pairs], [destination for _, destination in pairs]
        rows = self._tensor.flatten(1, 2).flatten(2)  # [layers, slots, heads * dim]
        if self._copies is None:  # numpy, as in `read`
            data: np.ndarray = rows.view(torch.uint8).numpy()
            data[:, destinations] = data[:, sources]
        else:
            moved = rows.index_select(1, upload_ids(sources, rows.device))
            rows.index_copy_(1, upload_ids(destinations, rows.device), moved)

    def read(self, layers: range, slots: Slots, heads: range, after: Fence | None) -> Bytes:
        rows = self.rows(layers, heads)
        if self._copies is not None:
            taken = self._copies.gather(rows, slots, after or self._copies.fence())
            array: Bytes = taken.view(torch.uint8).reshape(-1).numpy()
            return array
        # numpy: torch would start a pool of threads for the caller's (see `EngineThread`).
        data: Bytes = rows.view(torch.uint8).numpy()  # [layers, slots, heads * dim * itemsize]
        if not data.flags.c_contiguous:
            return data[:, slots].reshape(-1)  # `take` would copy these heads of the whole cache first
        return np.take(data, slots, axis=1).reshape(-1)

    def write(self, layers: range, slots: Slots, heads: range, rows: Bytes, after: Fence | None) -> None:
        destination = self.rows(layers, heads)
        if self._copies is not None:
            self._copies.scatter(destination, slots, rows, after or self._copies.fence())
            return
        data: Bytes = destination.view(torch.uint8).numpy()
        data[:, slots] = rows.reshape(len(layers), slots.size, -1)

    def rows(self, layers: range, heads: range) -> Tensor:
        """Some layers and heads of all slots: [layers, slots, heads * dim], a view."""
        rows = self._tensor[layers.start : layers.stop].flatten(1, 2)  # [layers, slots, heads, dim]
        return rows.flatten(2)[:, :, heads.start * rows.shape[3] : heads.stop * rows.shape[3]]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from calloc, whose pages take no memory before they are written (torch.zeros writes them all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
