"""The interface of a KV cache, in one process or shared among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from outrider.engine.kv_cache.planes import PlaneSpec

Bytes = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.int64]
"""Places in a cache, [num_tokens]: block_id * block_size + offset."""


class CachePlane(Protocol):
    """One plane of a cache, laid out as whoever attends over it wants. Rows go in and out token-major, as bytes."""

    @property
    def layers(self) -> Any:
        """What is kept of each layer, by its number."""

    def read(self, layers: range, slots: Slots, heads: range, after: Any) -> Bytes:
        """[len(layers) * num_slots * len(heads) * head_dim * itemsize], contiguous; `after` as of PagedKVCache.read."""

    def write(self, layers: range, slots: Slots, heads: range, rows: Bytes, after: Any) -> None:
        """Writes what `read` gave."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As PagedKVCache.copy_blocks; at least one pair. So `move_slots`."""

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None: ...


class PlaneMaker(Protocol):
    """Allocates the planes of a cache for those who compute with them."""

    def make_plane(self, plane: PlaneSpec, *, num_blocks: int, block_size: int) -> CachePlane:
        """Of zeros, whose pages take no main memory before they are written."""


class KVCache(Protocol):
    """A PagedKVCache, or one whose heads are shared among ranks (ShardedKVCache). Their docstrings count."""

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """Of the whole model."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def head_ranges(self, plane: str) -> tuple[range, ...]:
        """The ranges of a plane's heads that are held together, in order; frames are cut at them."""

    def layers(self, plane: str) -> Any:
        """Only of planes whose heads are not shared among ranks, as those of features are."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def fence(self) -> Any:
        """Marks the work that is queued by now, where a device does it later: for `read` and `write`."""

    def read(
        self, plane: str, layers: range, slots: Slots, after: Any = None, *, heads: range | None = None
    ) -> Bytes: ...

    def write(
        self,
        plane: str,
        layers: range,
        slots: Slots,
        payload: bytes | bytearray | memoryview,
        after: Any = None,
        *,
        heads: range | None = None,
    ) -> None: ...
