"""Copies of blocks between a cache and main memory, in one process on a CPU or among ranks. Torch-free."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from outrider.engine.kv_cache.base import Bytes
from outrider.engine.kv_cache.copy_price import CopyPrice
from outrider.engine.kv_cache.planes import LayerGroup, PlaneSpec
from outrider.errors import ConfigError


class BlockCache(Protocol):
    """The part of a KV cache that `BlockCopies` needs."""

    planes: tuple[PlaneSpec, ...]
    layer_groups: tuple[LayerGroup, ...]
    num_blocks: int
    window_blocks: tuple[int, ...]
    block_size: int

    def save_block(self, plane: str, block_id: int, row: Bytes) -> None:
        """Copies a block in all layers of a plane to `row`, [block_size * bytes_per_token] uint8, in any layout."""

    def load_block(self, plane: str, block_id: int, row: Bytes) -> None:
        """Copies to a block what `save_block` copied from one."""


class BlockCopies:
    """Implements SlotCopies for caches whose copies are complete when they return: on a CPU, or divided among ranks.

    Each group of layers has slots in proportion to its blocks.
    """

    def __init__(
        self, cache: BlockCache, num_bytes: int, price: CopyPrice, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """Takes at most `num_bytes` of shared memory without a name, which is free again however the process ends. The
        OS commits its pages when they are first written. `now`: seconds of a monotonic clock.

        Raises: ConfigError if these bytes are too few.
        """
        self._cache, self._price, self._now = cache, price, now
        self._planes = [
            [plane.name for plane in cache.planes if plane.window == group.window] for group in cache.layer_groups
        ]
        sizes = {plane.name: plane.bytes_per_token * cache.block_size for plane in cache.planes}
        self.slot_bytes = [sum(sizes[name] for name in names) for names in self._planes]
        num_blocks = (cache.num_blocks, *cache.window_blocks)
        share = num_bytes / sum(num * size for num, size in zip(num_blocks, self.slot_bytes, strict=True))
        self.num_slots = [int(num * share) - 1 for num in num_blocks]  # without the last one, which is for `measure`
        if min(self.num_slots) < 1:
            raise ConfigError(f"kv_cache.host_memory of {num_bytes:,} bytes holds too few blocks: set it higher")
        self.rows = {
            name: _shared_memory((num + 1) * sizes[name]).reshape(num + 1, sizes[name])
            for num, names in zip(self.num_slots, self._planes, strict=True)
            for name in names
        }
        """By plane: [slots, bytes of a block]."""

    def save(self, group: int, block_id: int, slot: int) -> None:
        started = self._now()
        for name in self._planes[group]:
            self._cache.save_block(name, block_id, self.rows[name][slot])
        self._price.add_copy(group, self._now() - started, is_load=False)

    def load(self, group: int, block_id: int, slot: int) -> None:
        started = self._now()
        for name in self._planes[group]:
            self._cache.load_block(name, block_id, self.rows[name][slot])
        self._price.add_copy(group, self._now() - started, is_load=True)

    def measure(self, group: int, block_id: int) -> None:
        self.save(group, block_id, self.num_slots[group])
        self.load(group, block_id, self.num_slots[group])


def _shared_memory(num_bytes: int) -> Bytes:
    descriptor = os.memfd_create("outrider-host-kv")
    try:
        os.ftruncate(descriptor, num_bytes)
        return np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8)
    finally:
        os.close(descriptor)
