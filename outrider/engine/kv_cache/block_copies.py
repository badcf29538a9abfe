"""Copies of blocks between a cache and main memory, in one process on a CPU or among ranks. Torch-free."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np

from outrider.engine.kv_cache.copy_price import CopyPrice
from outrider.errors import ConfigError


class BlockCopies:
    """Copies blocks between a KVCache and slots of main memory, and tells the copies' times to a CopyPrice.

    Each group of layers has slots in proportion to its blocks. Here, a copy is complete when its method returns, as on
    a CPU or among ranks.
    """

    def __init__(
        self, cache: Any, num_bytes: int, price: CopyPrice, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """Takes at most `num_bytes` of anonymous memory, which is free again however the process ends. The OS commits
        its pages when they are first written. `now`: seconds of a monotonic clock.

        Raises: ConfigError if these bytes are too few, or more than the OS grants.
        """
        self._cache, self._price, self._now = cache, price, now
        num_blocks, self.slot_bytes = (cache.num_blocks, *cache.window_blocks), block_bytes(cache)
        share = num_bytes / sum(num * size for num, size in zip(num_blocks, self.slot_bytes, strict=True))
        self.num_slots = [int(num * share) - 1 for num in num_blocks]  # by group, without the last, for `measure`
        if min(self.num_slots) < 1:
            raise ConfigError(f"kv_cache.host_memory of {num_bytes:,} bytes holds too few blocks: set it higher")
        shapes = [(num + 1, size) for num, size in zip(self.num_slots, self.slot_bytes, strict=True)]
        ends = list(accumulate(map(math.prod, shapes)))
        try:
            self.memory = np.frombuffer(mmap.mmap(-1, ends[-1]), dtype=np.uint8)
        except OSError as error:  # the OS may limit what is reserved, besides what is free
            raise ConfigError(f"kv_cache.host_memory of {num_bytes:,} bytes: {error.strerror}: set it lower") from error
        parts = np.split(self.memory, ends[:-1])
        self.rows = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        """The memory by group: [slots, bytes of a block in all its planes]."""
        self._columns: list[list[tuple[str, slice]]] = []  # by group, those of each plane
        for group in cache.layer_groups:
            planes = [plane for plane in cache.planes if plane.window == group.window]
            ends = list(accumulate(plane.bytes_per_token * cache.block_size for plane in planes))
            spans = zip([0, *ends], ends, strict=False)
            self._columns.append([(plane.name, slice(*span)) for plane, span in zip(planes, spans, strict=True)])

    def save(self, group: int, block_id: int, slot: int) -> None:
        """Copies a block to a slot. Work that begins or is queued afterwards may overwrite the block."""
        started = self._now()
        for name, columns in self._columns[group]:
            self._cache.save_block(name, block_id, self.rows[group][slot, columns])
        self._price.add_copy(group, self._now() - started, is_load=False)

    def load(self, group: int, block_id: int, slot: int) -> None:
        """Copies a slot to a block. Work that begins or is queued afterwards may read the block."""
        started = self._now()
        for name, columns in self._columns[group]:
            self._cache.load_block(name, block_id, self.rows[group][slot, columns])
        self._price.add_copy(group, self._now() - started, is_load=True)

    def measure(self, group: int, block_id: int) -> None:
        """Copies a block out and in again, which changes nothing. No other work may use it meanwhile."""
        self.save(group, block_id, self.num_slots[group])
        self.load(group, block_id, self.num_slots[group])

    def finish(self) -> None:
        """Waits for all copies, so that their times count."""


def block_bytes(cache: Any) -> list[int]:
    """Returns the bytes of a block of each group of layers, in all its planes."""
    return [
        cache.block_size * sum(plane.bytes_per_token for plane in cache.planes if plane.window == group.window)
        for group in cache.layer_groups
    ]
