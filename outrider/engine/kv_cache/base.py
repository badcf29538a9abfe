"""The interface of a KV cache, in one process or shared among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from outrider.engine.kv_cache.planes import PlaneSpec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class PackedPlane(Protocol):
    """Keys or values in the form that kernels of their own want. Rows go in and out token-major, as bytes."""

    @property
    def layers(self) -> Any:
        """What attention reads of each layer, by its number."""

    def read(self, layers: range, slots: np.ndarray, heads: range) -> np.ndarray:
        """[len(layers) * num_slots * len(heads) * head_dim * itemsize] uint8; slots [num_slots] int64."""

    def write(self, layers: range, slots: np.ndarray, heads: range, rows: np.ndarray) -> None:
        """Writes what `read` gave."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], block_size: int) -> None: ...

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None: ...


class AttentionKernels(Protocol):
    """Kernels that say how keys and values lie in the cache that they attend over."""

    def make_plane(self, plane: PlaneSpec, num_slots: int) -> PackedPlane:
        """Of zeros, whose pages take no memory before they are written."""


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

    def layers(self, plane: str) -> tuple[Tensor, ...]:
        """Only of planes whose heads are not shared among ranks, as those of features are."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def fence(self) -> Any:
        """Marks the work that is queued by now, where a device does it later: for `read` and `write`."""

    def read(
        self, plane: str, layers: range, slots: Tensor, after: Any = None, *, heads: range | None = None
    ) -> np.ndarray: ...

    def write(
        self,
        plane: str,
        layers: range,
        slots: Tensor,
        payload: bytes | bytearray | memoryview,
        after: Any = None,
        *,
        heads: range | None = None,
    ) -> None: ...
