"""The blocks of a KV cache that one transfer fills, by token position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.engine.kv_cache.base import Slots, slots_of
from outrider.engine.ranks.sharded_cache import KVCache
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
        self, kv_cache: KVCache, block_ids: Sequence[int], are_held: Callable[[], bool] = lambda: True
    ) -> None:
        """`are_held`: whether the blocks still have what is read. It is called after each read."""
        self._kv_cache: Any = kv_cache  # Any, as the type of payload depends on the cache
        self._slots = slots_of(block_ids, len(block_ids) * kv_cache.block_size, kv_cache.block_size)
        self._reserved = kv_cache.fence()
        self.are_held = are_held

    def write(self, region: Region, payload: Payload) -> None:
        """Writes bytes [layers, tokens, heads, head_dim]. Regions must be within bounds, and disjoint."""
        self._kv_cache.write(
            region.plane, region.layers, self._slots_of(region), payload, self._reserved, heads=region.heads
        )

    def read(self, region: Region, after: Any = None) -> memoryview:
        """Reads bytes [layers, tokens, heads, head_dim] after the cache's fence `after`; None: reads at once."""
        slots = self._slots_of(region)
        return memoryview(self._kv_cache.read(region.plane, region.layers, slots, after, heads=region.heads))

    def take(self, region: Region, after: Any) -> Any:
        """Waits for `after`, then returns what `read` reads as DeviceRows, which are still to be copied."""
        return self._kv_cache.take(region.plane, region.layers, self._slots_of(region), after, heads=region.heads)

    def _slots_of(self, region: Region) -> Slots:
        return self._slots[region.tokens.start : region.tokens.stop]
