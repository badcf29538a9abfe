"""The blocks of a KV cache that one transfer fills, by token position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.engine.kv_cache.base import Slots, slots_of
from outrider.engine.kv_cache.sequence_kv import GroupTable
from outrider.engine.ranks.commands import KvRequest
from outrider.engine.ranks.sharded_cache import KVCache, ShardedKVCache
from outrider.kv_transfer.base import Payload, Region


class ReservedBlocks:
    """The blocks that one transfer writes to.

    The engine thread creates this object after allocating the blocks; any thread may use it.

    Forwards may run at the same time: reserved blocks are in no running sequence's block table, and they are freed only
    after all copies have ended. GPU work that was queued before the reservation may still use the blocks, so writes
    wait for that work, with one fence for all frames. No method waits for the token loop. An exception fails the
    transfer.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        block_ids: Sequence[int],
        are_held: Callable[[], bool] = lambda: True,
        *,
        windows: Sequence[GroupTable] = (),
    ) -> None:
        """`are_held`: whether the blocks still have what is read. It is called after each read. `windows`: the blocks
        of layers with a sliding window, and the states.
        """
        self._kv_cache: Any = kv_cache  # Any, as the type of payload depends on the cache
        num_tokens = len(block_ids) * kv_cache.block_size
        self._slots = {0: slots_of(block_ids, num_tokens, kv_cache.block_size)}
        self._slots.update((table.pool.window, np.full(num_tokens, -1)) for table in windows)
        self._windows = {plane.name: plane.window for plane in kv_cache.planes if plane.window} if windows else {}
        self.update(windows)
        self._reserved = kv_cache.fence()
        self.are_held = are_held

    def update(self, windows: Sequence[GroupTable]) -> None:
        """Notes the blocks that have been reserved in these tables. Those noted before must still have what is read."""
        for table in windows:
            table.fill_slots(self._slots[table.pool.window])

    def write(self, region: Region, payload: Payload) -> None:
        """Writes bytes [layers, tokens, heads, head_dim]. Regions must be within bounds, and disjoint."""
        self._kv_cache.write(
            region.plane, region.layers, self._slots_of(region), payload, self._reserved, heads=region.heads
        )

    def read(self, region: Region, after: Any = None) -> memoryview:
        """Reads bytes [layers, tokens, heads, head_dim] after the cache's fence `after`; None: reads at once."""
        slots = self._slots_of(region)
        return memoryview(self._kv_cache.read(region.plane, region.layers, slots, after, heads=region.heads))

    def parts(self, region: Region, after: Any) -> Iterator[tuple[int, Region, KvRequest | None]]:
        """Yields the parts of a region that are in different ranks: the rank, the part, and the request that reads it
        there after the cache's fence `after`; None if there are no other ranks.
        """
        if not isinstance(self._kv_cache, ShardedKVCache):
            yield 0, region, None
            return
        slots = self._slots_of(region)
        for share, request in self._kv_cache.parts(region.plane, region.layers, slots, region.heads, after):
            layers, _, heads = share.place
            yield share.rank, replace(region, layers=region.layers[layers], heads=region.heads[heads]), request

    def take(self, region: Region, after: Any) -> Any:
        """Waits for `after`, then returns what `read` reads as DeviceRows, which are still to be copied."""
        return self._kv_cache.take(region.plane, region.layers, self._slots_of(region), after, heads=region.heads)

    def _slots_of(self, region: Region) -> Slots:
        return self._slots[self._windows.get(region.plane, 0)][region.tokens.start : region.tokens.stop]
