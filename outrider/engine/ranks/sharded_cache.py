"""Rank 0's view of the paged KV cache of a model whose heads or layers are divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from outrider.engine.kv_cache.base import Bytes, Slots, slots_of, slots_of_blocks
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec, find_plane
from outrider.engine.ranks.commands import CommandMark, KvRequest, MoveSlots
from outrider.engine.ranks.group import RankGroup
from outrider.errors import InternalError

if TYPE_CHECKING:
    from outrider.engine.kv_cache.tensor_planes import Fence
    from outrider.engine.model_spec import ModelSpec


def split_heads(num_heads: int, num_ranks: int) -> tuple[range, ...]:
    """Returns each rank's heads: equal ranges, in order, as transformers splits the rows of a projection.

    Raises: ValueError if the heads do not divide evenly.
    """
    if num_heads % num_ranks:
        raise ValueError(f"{num_heads} heads cannot be divided evenly among {num_ranks} ranks")
    size = num_heads // num_ranks
    return tuple(range(first, first + size) for first in range(0, num_heads, size))


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a range of layers and heads."""

    rank: int
    layers: range  # numbered as in the rank's own cache
    heads: range  # same
    place: tuple[slice, slice | Slots, slice]  # the part's layers, tokens and heads within the requested range


def shares_of(layers: range, heads: range, held: Sequence[tuple[range, range]]) -> Iterator[Share]:
    """Yields the parts that ranks hold, in the order of ranks. `held`: the layers and heads of every rank."""
    for rank, ranges in enumerate(held):
        wanted = (layers, heads)
        common = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(wanted, ranges, strict=True)]
        if all(common):
            own = [_counted_from(each.start, part) for each, part in zip(ranges, common, strict=True)]
            at = [_counted_from(each.start, part) for each, part in zip(wanted, common, strict=True)]
            place = slice(at[0].start, at[0].stop), slice(None), slice(at[1].start, at[1].stop)
            yield Share(rank, own[0], own[1], place)


def _counted_from(first: int, numbers: range) -> range:
    return range(numbers.start - first, numbers.stop - first)


@dataclass(frozen=True, slots=True)
class RankFence:
    """A fence after all work that has been sent to the ranks so far."""

    mark: CommandMark
    local: Fence | None


class ShardedKVCache:
    """A cache whose blocks have the same numbers in every rank. Each rank stores its heads, or in a pipeline its
    layers; only rank 0 has features.

    All ranks copy blocks and move slots in the order of steps. Another rank may still be working on a step or on copies
    that rank 0 has finished. So reads and writes of that rank's KV wait until it has caught up with rank 0.
    """

    def __init__(
        self, local: PagedKVCache, ranks: RankGroup, whole: ModelSpec | None = None, layers: Sequence[range] = ()
    ) -> None:
        """`local`: rank 0's cache. `whole`, `layers`: in a pipeline, the whole model and each rank's layers of it."""
        self.local = local
        self.ranks = ranks
        self._layers = layers
        self.num_blocks = local.num_blocks
        self.window_blocks = local.window_blocks
        self.state_slots = local.state_slots
        self.layer_groups = local.layer_groups if whole is None else whole.layer_groups
        self.block_size = local.block_size
        self.device = local.device
        self.copies = None  # None, because other ranks' frames pass through main memory
        self.planes = tuple(
            plane if plane.is_feature else replace(plane, num_heads=plane.num_heads * ranks.size)
            for plane in local.planes
        )
        if whole is not None:
            self.planes = whole.planes

    def head_ranges(self, plane: str) -> tuple[range, ...]:
        """Returns the heads that are in different ranks, in order."""
        spec = find_plane(self.planes, plane)
        return split_heads(spec.num_heads, 1 if spec.is_feature or self._layers else self.ranks.size)

    def _shares(self, plane: PlaneSpec, layers: range, slots: Slots, heads: range) -> Iterator[tuple[Share, Slots]]:
        """Yields the parts of a range, with their slots. Raises: InternalError if the range is outside the cache."""
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= plane.num_layers:
            raise InternalError(f"{layers} is outside the {plane.num_layers} layers of plane {plane.name}")
        by_rank = self.head_ranges(plane.name)
        held = [(range(plane.num_layers), own) for own in by_rank]
        if self._layers and not plane.is_feature:
            (group,) = (group for group in self.layer_groups if plane.name in group.plane_names)
            held = [(group.places(own), by_rank[0]) for own in self._layers]
        for share in shares_of(layers, heads, held):
            yield share, slots

    def layers(self, plane: str) -> Any:
        """Returns the layers of a plane that only rank 0 has."""
        assert find_plane(self.planes, plane).is_feature
        return self.local.layers(plane)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.move_slots(slots_of_blocks(pairs, self.block_size))

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            with self.ranks.running(MoveSlots(tuple(pairs))):
                self.local.move_slots(pairs)

    def save_block(self, plane: str, block_id: int, row: Bytes) -> None:
        """Reads a block in all layers to `row`, [block_size * bytes_per_token] uint8. Raises: see `read`."""
        row[:] = self.read(*self._block(plane, block_id))

    def load_block(self, plane: str, block_id: int, row: Bytes) -> None:
        """Writes what `save_block` read. Raises: see `write`."""
        self.write(*self._block(plane, block_id), row.tobytes())

    def _block(self, plane: str, block_id: int) -> tuple[str, range, Slots]:
        layers = range(find_plane(self.planes, plane).num_layers)
        return plane, layers, slots_of([block_id], self.block_size, self.block_size)

    def fence(self) -> RankFence:
        return RankFence(self.ranks.reached, self.local.fence())

    def parts(
        self, plane: str, layers: range, slots: Slots, heads: range, after: RankFence
    ) -> Iterator[tuple[Share, KvRequest]]:
        """Yields each rank's part of a range, and the request that reads this part there. Raises: InternalError."""
        for share, own in self._shares(find_plane(self.planes, plane), layers, slots, heads):
            yield share, KvRequest(plane=plane, layers=share.layers, slots=own, heads=share.heads, after=after.mark)

    def read(
        self, plane: str, layers: range, slots: Slots, after: RankFence | None = None, *, heads: range | None = None
    ) -> Bytes:
        """Does what PagedKVCache.read does, for all ranks. Raises: RankLostError, InternalError."""
        spec = find_plane(self.planes, plane)
        heads = spec.checked_heads(heads)
        fence = after or self.fence()
        cells = np.empty((len(layers), slots.size, len(heads) * spec.bytes_per_head), dtype=np.uint8)
        for share, request in self.parts(plane, layers, slots, heads, fence):
            if share.rank == 0:
                part = self.local.read(plane, share.layers, request.slots, fence.local, heads=share.heads)
            else:
                part = np.frombuffer(self.ranks.ask(share.rank, request), dtype=np.uint8)
            cells[self._bytes_at(share, spec)] = part.reshape(len(share.layers), request.slots.size, -1)
        return cells.reshape(-1)

    def _bytes_at(self, share: Share, plane: PlaneSpec) -> tuple[slice, slice | Slots, slice]:
        layers, slots, heads = share.place
        return layers, slots, slice(heads.start * plane.bytes_per_head, heads.stop * plane.bytes_per_head)

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
        """Writes bytes in the format of `read`; each rank gets its own part. Raises: InternalError, RankLostError."""
        spec = find_plane(self.planes, plane)
        heads = spec.checked_heads(heads)
        view = memoryview(payload).cast("B")
        num_cells = len(layers) * slots.size
        if view.nbytes != num_cells * len(heads) * spec.bytes_per_head:
            raise InternalError(
                f"{view.nbytes} bytes do not fit {num_cells} cells of {len(heads)} heads in plane {plane}"
            )
        if not num_cells:
            return
        cells = np.frombuffer(view, dtype=np.uint8).reshape(len(layers), slots.size, -1)
        fence = after or self.fence()
        for share, request in self.parts(plane, layers, slots, heads, fence):
            part = cells[self._bytes_at(share, spec)].tobytes()
            if share.rank == 0:
                self.local.write(plane, share.layers, request.slots, part, fence.local, heads=share.heads)
            else:
                self.ranks.ask(share.rank, replace(request, payload=part))


class DividedKVCache(ShardedKVCache):
    """A cache whose blocks are divided among ranks: each rank has all layers and heads of as many blocks, numbered
    after those of the rank before. There are no features, and all layers have one block table.
    """

    def __init__(self, local: PagedKVCache, ranks: RankGroup) -> None:
        """`local`: rank 0's cache."""
        super().__init__(local, ranks)
        self.num_ranks = ranks.size
        self.num_blocks = local.num_blocks * ranks.size
        self.planes = local.planes

    def head_ranges(self, plane: str) -> tuple[range, ...]:
        return self.local.head_ranges(plane)

    def _shares(self, plane: PlaneSpec, layers: range, slots: Slots, heads: range) -> Iterator[tuple[Share, Slots]]:
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= plane.num_layers:
            raise InternalError(f"{layers} is outside the {plane.num_layers} layers of plane {plane.name}")
        if slots.size and not 0 <= slots.min() <= slots.max() < self.num_blocks * self.block_size:
            raise InternalError(f"some slots are outside the cache of {self.num_blocks} blocks of {self.block_size}")
        ranks, own = np.divmod(slots, self.local.num_blocks * self.block_size)
        for rank in np.unique(ranks).tolist():
            tokens = np.flatnonzero(ranks == rank)
            place = slice(0, len(layers)), tokens, slice(0, len(heads))
            yield Share(rank, layers, heads, place), own[tokens]

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        size, moves = self.local.num_blocks * self.block_size, [list[tuple[int, int]]() for _ in range(self.num_ranks)]
        for source, destination in pairs:
            rank = source // size
            assert rank == destination // size, "a sequence has all its blocks in one rank"
            moves[rank].append((source % size, destination % size))
        with self.ranks.running(*(MoveSlots(tuple(own)) for own in moves[1:])):
            self.local.move_slots(moves[0])


KVCache: TypeAlias = PagedKVCache | ShardedKVCache
"""The cache of one process, or one whose heads, layers or blocks are divided among ranks."""
