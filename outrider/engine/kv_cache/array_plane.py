"""A cache plane in one numpy array. Torch-free."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.engine.kv_cache.base import Bytes, Slots
from outrider.engine.kv_cache.planes import PlaneSpec

WORDS: dict[str, Any] = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
"""The numpy dtype for each dtype of a plane. numpy has no bfloat16, so its bits are stored as uint16."""
Words: TypeAlias = npt.NDArray[Any]


class ArrayPlane:
    """A `CachePlane` on a CPU, in one array so that a frame of several layers needs only one copy.

    It starts with zeros, whose pages take no memory before they are written; torch.zeros would write them all.
    """

    def __init__(self, plane: PlaneSpec, *, num_blocks: int, block_size: int) -> None:
        shape = (plane.num_layers, num_blocks, block_size, plane.num_heads, plane.head_dim)
        self._array: Words = np.zeros(shape, dtype=WORDS[plane.dtype])
        self._head_bytes = plane.bytes_per_head

    @property
    def layers(self) -> Any:
        """The layers, each [num_blocks, block_size, heads, dim]."""
        return self._array

    def block(self, block_id: int) -> Bytes:
        return self._array.view(np.uint8).reshape(*self._array.shape[:2], -1)[:, block_id]

    def move_slots(self, moves: Slots) -> None:
        sources, destinations = moves
        rows = self._rows(range(len(self._array)), range(self._array.shape[3]))
        rows[:, destinations] = rows[:, sources]

    def read(self, layers: range, slots: Slots, heads: range, after: object = None) -> Bytes:
        rows = self._rows(layers, heads)
        if not rows.flags.c_contiguous:
            return rows[:, slots].reshape(-1)  # np.take would first copy these heads of all slots
        return np.take(rows, slots, axis=1).reshape(-1)

    def write(self, layers: range, slots: Slots, heads: range, rows: Bytes, after: object = None) -> None:
        self._rows(layers, heads)[:, slots] = rows.reshape(len(layers), slots.size, -1)

    def _rows(self, layers: range, heads: range) -> Bytes:
        """Returns some layers and heads of all slots as a view: [layers, slots, heads * dim * itemsize]."""
        num_layers, _, _, num_heads, _ = self._array.shape
        rows = self._array.view(np.uint8).reshape(num_layers, -1, num_heads * self._head_bytes)
        columns = slice(heads.start * self._head_bytes, heads.stop * self._head_bytes)
        return rows[layers.start : layers.stop, :, columns]
