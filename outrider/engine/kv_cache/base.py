"""The interface of one plane of a KV cache, and of what makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from outrider.engine.kv_cache.planes import PlaneSpec

Bytes = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.int64]
"""Places in a cache, [num_tokens]: block_id * block_size + offset."""


def slots_of(block_ids: npt.ArrayLike, num_tokens: int, block_size: int) -> Slots:
    """Of tokens [0, num_tokens), by their block table."""
    positions = np.arange(num_tokens)
    slots: Slots = np.asarray(block_ids, dtype=np.int64)[positions // block_size] * block_size + positions % block_size
    return slots


def slots_of_blocks(pairs: Sequence[tuple[int, int]], block_size: int) -> list[tuple[int, int]]:
    """(source, destination) of each slot of blocks that are copied, (source, destination) each."""
    return [(source * block_size + i, to * block_size + i) for source, to in pairs for i in range(block_size)]


class CachePlane(Protocol):
    """One plane of a cache, laid out as whoever attends over it wants. Rows go in and out token-major, as bytes."""

    @property
    def layers(self) -> Any:
        """What is kept of each layer, by its number."""

    def read(self, layers: range, slots: Slots, heads: range, after: Any) -> Bytes:
        """[len(layers) * num_slots * len(heads) * head_dim * itemsize], contiguous; `after` as of PagedKVCache.read."""

    def write(self, layers: range, slots: Slots, heads: range, rows: Bytes, after: Any) -> None:
        """Writes what `read` gave."""

    def move_slots(self, moves: Slots) -> None:
        """As PagedKVCache.move_slots; at least one. `moves`: [2, num_moves], sources and destinations."""


class PlaneMaker(Protocol):
    """Allocates the planes of a cache for those who compute with them."""

    def make_plane(self, plane: PlaneSpec, *, num_blocks: int, block_size: int) -> CachePlane:
        """Of zeros, whose pages take no main memory before they are written."""
