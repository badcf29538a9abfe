"""Copies of blocks between a GPU and page-locked main memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch

from outrider.engine.kv_cache.block_copies import BlockCopies
from outrider.engine.kv_cache.copy_price import CopyPrice
from outrider.engine.kv_cache.paged_cache import PagedKVCache

NUM_STAGED = 8
"""Blocks on their way at the same time, in GPU memory that is allocated at start."""


class DeviceBlockCopies(BlockCopies):
    """Does what BlockCopies does, for a GPU. The host never waits, except in `finish`.

    Copies run on a stream of their own, so that blocks leave and arrive while the device computes. On the stream of
    forwards, a block is gathered before later work overwrites it, and scattered before later work reads it. In between
    it is in one of NUM_STAGED parts of GPU memory, for which the device waits if all are in use. Main memory is used on
    the copy stream only, in the order of calls.
    """

    def __init__(self, cache: PagedKVCache, num_bytes: int, price: CopyPrice) -> None:
        """Raises: ConfigError, and RuntimeError if the driver cannot lock the memory's pages."""
        super().__init__(cache, num_bytes, price)
        device = torch.device(cache.device)
        self._stream, self._forwards = torch.cuda.Stream(device), torch.cuda.default_stream(device)
        self._pending: deque[tuple[int, bool, torch.cuda.Event, torch.cuda.Event]] = deque()  # copies and their timers
        size = max(self.slot_bytes)
        self._staged = cycle(  # blocks in flight, each with an event after the last use
            [(torch.empty(size, dtype=torch.uint8, device=device), torch.cuda.Event()) for _ in range(NUM_STAGED)]
        )
        driver: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(driver.cudaHostRegister(self.memory.ctypes.data, self.memory.nbytes, 0)))

    def save(self, group: int, block_id: int, slot: int) -> None:
        staged, used = next(self._staged)
        self._forwards.wait_event(used)
        for block, part in self._parts(group, block_id, staged):
            part.copy_(block)
        self._stream.wait_stream(self._forwards)
        row = torch.from_numpy(self.rows[group][slot])
        self._copy(row, staged[: len(row)], group, is_load=False)
        used.record(self._stream)
        self._collect_times()

    def load(self, group: int, block_id: int, slot: int) -> None:
        staged, used = next(self._staged)
        self._stream.wait_event(used)
        row = torch.from_numpy(self.rows[group][slot])
        self._copy(staged[: len(row)], row, group, is_load=True)
        self._forwards.wait_stream(self._stream)
        for block, part in self._parts(group, block_id, staged):
            block.copy_(part)
        used.record(self._forwards)
        self._collect_times()

    def finish(self) -> None:
        self._stream.synchronize()
        self._collect_times()

    def _parts(self, group: int, block_id: int, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields a block's content in each plane, and its place in a part of GPU memory."""
        for name, columns in self._columns[group]:
            block: torch.Tensor = self._cache.block(name, block_id)
            yield block, staged[columns].view(block.dtype).view(block.shape)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, group: int, *, is_load: bool) -> None:
        """Copies a block from or to main memory, between two timers."""
        with torch.cuda.stream(self._stream):
            started = self._timer()
            target.copy_(source, non_blocking=True)
            self._pending.append((group, is_load, started, self._timer()))

    def _timer(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _collect_times(self) -> None:
        """Passes on the times of copies that have ended."""
        while self._pending and self._pending[0][3].query():
            group, is_load, started, ended = self._pending.popleft()
            self._price.add_copy(group, started.elapsed_time(ended) / 1e3, is_load=is_load)
