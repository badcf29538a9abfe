"""The interfaces of a KV cache plane and of its allocator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from outrider.engine.kv_cache.planes import PlaneSpec

Bytes = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.int64]
"""Slots of a cache, [num_tokens]. A slot is block_id * block_size + offset."""


def slots_of(block_ids: npt.ArrayLike, num_tokens: int, block_size: int) -> Slots:
    """Returns the slots of tokens [0, num_tokens) of the sequence with this block table."""
    positions = np.arange(num_tokens)
    slots: Slots = np.asarray(block_ids, dtype=np.int64)[positions // block_size] * block_size + positions % block_size
    return slots


def slots_of_blocks(pairs: Sequence[tuple[int, int]], block_size: int) -> list[tuple[int, int]]:
    """Returns the (source, destination) slots for copying blocks, each given as (source, destination)."""
    return [(source * block_size + i, to * block_size + i) for source, to in pairs for i in range(block_size)]


class CachePlane(Protocol):
    """One plane of a cache, in the layout that its attention kernels need. `read` and `write` use token-major bytes."""

    @property
    def layers(self) -> Any:
        """The content of each layer, by layer number."""

    def read(self, layers: range, slots: Slots, heads: range, after: Any) -> Bytes:
        """Returns [len(layers) * num_slots * len(heads) * head_dim * itemsize] bytes, contiguous. For `after` see
        PagedKVCache.read.
        """

    def write(self, layers: range, slots: Slots, heads: range, rows: Bytes, after: Any) -> None:
        """Writes rows in the format of `read`."""

    def block(self, block_id: int) -> Any:
        """Returns a block in all layers, in the plane's own layout: a view, on a CPU [layers, bytes] uint8."""

    def move_slots(self, moves: Slots) -> None:
        """Does what PagedKVCache.move_slots does. `moves`: sources and destinations, [2, num_moves >= 1]."""


class PlaneMaker(Protocol):
    """Allocates a cache's planes in the layout of the kernels that use them."""

    def make_plane(self, plane: PlaneSpec, *, num_blocks: int, block_size: int) -> CachePlane:
        """Makes a plane of zeros, whose pages take no main memory before they are written."""
