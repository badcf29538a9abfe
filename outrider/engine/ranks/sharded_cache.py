"""Rank 0's view of the paged KV cache of a model whose heads are divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from outrider.engine.kv_cache.base import Bytes, Slots, slots_of_blocks
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import find_plane
from outrider.engine.ranks.commands import CommandMark, KvRequest, MoveSlots
from outrider.engine.ranks.group import RankGroup
from outrider.errors import InternalError

if TYPE_CHECKING:
    from outrider.engine.kv_cache.tensor_planes import Fence


def split_heads(num_heads: int, num_ranks: int) -> tuple[range, ...]:
    """Returns each rank's heads: equal ranges, in order, as transformers splits the rows of a projection.

    Raises: ValueError if the heads do not divide evenly.
    """
    if num_heads % num_ranks:
        raise ValueError(f"{num_heads} heads cannot be divided evenly among {num_ranks} ranks")
    size = num_heads // num_ranks
    return tuple(range(first, first + size) for first in range(0, num_heads, size))


@dataclass(frozen=True, slots=True)
class HeadShare:
    """One rank's part of a range of heads."""

    rank: int
    local: range  # indices among the rank's own heads
    place: range  # indices within the requested range


def shares_of(heads: range, ranges: Sequence[range]) -> Iterator[HeadShare]:
    """Yields the part of `heads` that each rank holds, in the order of heads. `ranges`: the heads of every rank."""
    for rank, held in enumerate(ranges):
        start, end = max(heads.start, held.start), min(heads.stop, held.stop)
        if start < end:
            yield HeadShare(
                rank,
                local=range(start - held.start, end - held.start),
                place=range(start - heads.start, end - heads.start),
            )


@dataclass(frozen=True, slots=True)
class RankFence:
    """A fence after all work that has been sent to the ranks so far."""

    mark: CommandMark
    local: Fence | None


class ShardedKVCache:
    """A cache whose blocks have the same numbers in every rank. Each rank stores its heads; only rank 0 has features.

    All ranks copy blocks and move slots in the order of steps. Another rank may still be working on a step or on copies
    that rank 0 has finished. So reads and writes of that rank's heads wait until it has caught up with rank 0.
    """

    def __init__(self, local: PagedKVCache, ranks: RankGroup) -> None:
        """`local`: the cache of rank 0's heads."""
        self.local = local
        self._ranks = ranks
        self.num_blocks = local.num_blocks
        self.window_blocks = local.window_blocks
        self.layer_groups = local.layer_groups
        self.block_size = local.block_size
        self.device = local.device
        self.copies = None  # None, because other ranks' frames pass through main memory
        self.planes = tuple(
            plane if plane.is_feature else replace(plane, num_heads=plane.num_heads * ranks.size)
            for plane in local.planes
        )

    def head_ranges(self, plane: str) -> tuple[range, ...]:
        """Returns each rank's heads, in order; for features, one range, since only rank 0 stores them."""
        spec = find_plane(self.planes, plane)
        return split_heads(spec.num_heads, 1 if spec.is_feature else self._ranks.size)

    def layers(self, plane: str) -> Any:
        """Returns the layers of a plane that only rank 0 has."""
        assert find_plane(self.planes, plane).is_feature
        return self.local.layers(plane)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.move_slots(slots_of_blocks(pairs, self.block_size))

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            with self._ranks.running(MoveSlots(tuple(pairs))):
                self.local.move_slots(pairs)

    def fence(self) -> RankFence:
        return RankFence(self._ranks.reached, self.local.fence())

    def read(
        self, plane: str, layers: range, slots: Slots, after: RankFence | None = None, *, heads: range | None = None
    ) -> Bytes:
        """Does what PagedKVCache.read does, for the heads of all ranks. Raises: RankLostError, InternalError."""
        heads = find_plane(self.planes, plane).checked_heads(heads)
        fence = after or self.fence()
        parts = []
        for share in shares_of(heads, self.head_ranges(plane)):
            if share.rank == 0:
                part = self.local.read(plane, layers, slots, fence.local, heads=share.local)
            else:
                request = KvRequest(plane=plane, layers=layers, slots=slots, heads=share.local, after=fence.mark)
                part = np.frombuffer(self._ranks.ask(share.rank, request), dtype=np.uint8)
            parts.append(part.reshape(len(layers), slots.size, -1))
        return parts[0].reshape(-1) if len(parts) == 1 else np.concatenate(parts, axis=2).reshape(-1)

    def write(
        self,
        plane: str,
        layers: range,
        slots: Slots,
        payload: bytes | bytearray | memoryview,
        after: RankFence | None = None,
        *,
        heads: range | None = None,
    ) -> None:
        """Writes bytes in the format of `read`; each rank gets its own heads. Raises: InternalError, RankLostError."""
        heads = find_plane(self.planes, plane).checked_heads(heads)
        view = memoryview(payload).cast("B")
        num_cells = len(layers) * slots.size
        head_bytes = find_plane(self.planes, plane).bytes_per_head
        if view.nbytes != num_cells * len(heads) * head_bytes:
            raise InternalError(
                f"{view.nbytes} bytes do not fit {num_cells} cells of {len(heads)} heads in plane {plane}"
            )
        if not num_cells:
            return
        cells = np.frombuffer(view, dtype=np.uint8).reshape(num_cells, -1)
        fence = after or self.fence()
        for share in shares_of(heads, self.head_ranges(plane)):
            part = cells[:, share.place.start * head_bytes : share.place.stop * head_bytes].tobytes()
            if share.rank == 0:
                self.local.write(plane, layers, slots, part, fence.local, heads=share.local)
            else:
                request = KvRequest(
                    plane=plane, layers=layers, slots=slots, heads=share.local, after=fence.mark, payload=part
                )
                self._ranks.ask(share.rank, request)


KVCache: TypeAlias = PagedKVCache | ShardedKVCache
"""The cache of a model that runs in one process, or of a model whose heads are divided among ranks."""
