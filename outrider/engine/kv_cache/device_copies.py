"""Copies of blocks between a GPU and page-locked main memory."""

from __future__ import annotations

from collections import deque
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
        self._block, self._device = cache.block, torch.device(cache.device)
        self._stream = torch.cuda.Stream(self._device)
        self._forwards = torch.cuda.default_stream(self._device)
        self._pending: deque[tuple[int, bool, torch.cuda.Event, torch.cuda.Event]] = deque()  # copies and their timers
        # Blocks in flight by plane, each with an event after the last use.
        self._staged = cycle(
            [
                (
                    {
                        name: torch.empty_like(self._view(name, 0), memory_format=torch.contiguous_format)
                        for name in self.rows
                    },
                    torch.cuda.Event(),
                )
                for _ in range(NUM_STAGED)
            ]
        )
        driver: Any = torch.cuda.cudart()
        for rows in self.rows.values():
            torch.cuda.check_error(int(driver.cudaHostRegister(rows.ctypes.data, rows.nbytes, 0)))

    def save(self, group: int, block_id: int, slot: int) -> None:
        staged, used = next(self._staged)
        self._forwards.wait_event(used)
        for name in self._planes[group]:
            staged[name].copy_(self._view(name, block_id))
        self._stream.wait_stream(self._forwards)
        with torch.cuda.stream(self._stream):
            started = self._timer()
            for name in self._planes[group]:
                self._row(name, slot).copy_(staged[name].view(-1).view(torch.uint8), non_blocking=True)
            self._pending.append((group, False, started, self._timer()))
        used.record(self._stream)
        self._collect_times()

    def load(self, group: int, block_id: int, slot: int) -> None:
        staged, used = next(self._staged)
        self._stream.wait_event(used)
        with torch.cuda.stream(self._stream):
            started = self._timer()
            for name in self._planes[group]:
                staged[name].view(-1).view(torch.uint8).copy_(self._row(name, slot), non_blocking=True)
            self._pending.append((group, True, started, self._timer()))
        self._forwards.wait_stream(self._stream)
        for name in self._planes[group]:
            self._view(name, block_id).copy_(staged[name])
        used.record(self._forwards)
        self._collect_times()

    def finish(self) -> None:
        self._stream.synchronize()
        self._collect_times()

    def _view(self, name: str, block_id: int) -> torch.Tensor:
        block: torch.Tensor = self._block(name, block_id)
        return block

    def _row(self, name: str, slot: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[name][slot])

    def _timer(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _collect_times(self) -> None:
        """Passes on the times of copies that have ended."""
        while self._pending and self._pending[0][3].query():
            group, is_load, started, ended = self._pending.popleft()
            self._price.add_copy(group, started.elapsed_time(ended) / 1e3, is_load=is_load)
