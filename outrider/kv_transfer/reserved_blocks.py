"""The blocks of a KV cache that one transfer fills, by token position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.engine.kv_cache.base import Slots, slots_of
from outrider.engine.ranks.sharded_cache import KVCache
from outrider.kv_transfer.base import Payload, Region


class ReservedBlocks:
    """What one transfer writes to. Called from any thread; made by the engine thread after the blocks were allocated.

    Safe beside running forwards: reserved blocks are in no running sequence's block table, and whoever
    frees them has waited for the copies under way. Work that was queued before the reservation may use
    them still, so writes wait for it: one fence for all frames. Neither method blocks on the token loop; an
    exception fails the transfer.
    """

    def __init__(self, kv_cache: KVCache, block_ids: Sequence[int]) -> None:
        self._kv_cache: Any = kv_cache  # whose transfers have payloads of its kind
        self._slots = slots_of(block_ids, len(block_ids) * kv_cache.block_size, kv_cache.block_size)
        self._reserved = kv_cache.fence()

    def write(self, region: Region, payload: Payload) -> None:
        """[layers, tokens, heads, head_dim] bytes whose bounds, length and checksum were checked; disjoint regions."""
        self._kv_cache.write(
            region.plane, region.layers, self._slots_of(region), payload, self._reserved, heads=region.heads
        )

    def read(self, region: Region, after: Any = None) -> memoryview:
        """[layers, tokens, heads, head_dim] bytes as of `after`, a fence of the cache, or of now."""
        slots = self._slots_of(region)
        return memoryview(self._kv_cache.read(region.plane, region.layers, slots, after, heads=region.heads))

    def take(self, region: Region, after: Any) -> Any:
        """What `read` gives, as DeviceBytes on the GPU that has the cache. The host does not wait for it."""
        return self._kv_cache.take(region.plane, region.layers, self._slots_of(region), after, heads=region.heads)

    def _slots_of(self, region: Region) -> Slots:
        return self._slots[region.tokens.start : region.tokens.stop]
