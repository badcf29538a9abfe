"""What nodes need of a KV cache, wherever its heads are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from outrider.engine.kv_cache.planes import PlaneSpec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class KVCache(Protocol):
    """A PagedKVCache, or one whose heads are shared among ranks (ShardedKVCache). Their docstrings count."""

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """Of the whole model."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def head_ranges(self) -> tuple[range, ...]:
        """Of every plane, in order, as they are held: frames are cut at them."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def fence(self) -> Any:
        """Marks what has been written by now, for `read`, where writes go on behind the caller's back."""

    def read(
        self, plane: str, layers: range, slots: Tensor, after: Any = None, *, heads: range | None = None
    ) -> np.ndarray: ...

    def write(
        self,
        plane: str,
        layers: range,
        slots: Tensor,
        payload: bytes | bytearray | memoryview,
        *,
        heads: range | None = None,
    ) -> None: ...
