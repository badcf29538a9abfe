"""Copies of blocks between a GPU and page-locked main memory."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from outrider.engine.kv_cache.block_copies import BlockCopies
from outrider.engine.kv_cache.copy_price import CopyPrice
from outrider.engine.kv_cache.paged_cache import PagedKVCache


class DeviceBlockCopies(BlockCopies):
    """Does what BlockCopies does, for a GPU. The host never waits.

    Copies run on a stream of their own, so that blocks leave and arrive while the device computes. On the stream of
    forwards, a block is gathered before later work overwrites it, and scattered before later work reads it. Main memory
    is used on the copy stream only, in the order of calls.
    """

    def __init__(self, cache: PagedKVCache, num_bytes: int, price: CopyPrice) -> None:
        """Raises: ConfigError, and RuntimeError if the driver cannot lock the memory's pages."""
        super().__init__(cache, num_bytes, price)
        self._block, self._device = cache.block, torch.device(cache.device)
        self._stream = torch.cuda.Stream(self._device)
        self._forwards = torch.cuda.default_stream(self._device)
        self._pending: deque[tuple[int, bool, torch.cuda.Event, torch.cuda.Event]] = deque()  # copies and their timers
        driver: Any = torch.cuda.cudart()
        for rows in self.rows.values():
            torch.cuda.check_error(int(driver.cudaHostRegister(rows.ctypes.data, rows.nbytes, 0)))

    def save(self, group: int, block_id: int, slot: int) -> None:
        taken = {
            name: self._block(name, block_id).clone(memory_format=torch.contiguous_format)
            for name in self._planes[group]
        }
        self._stream.wait_stream(self._forwards)
        with torch.cuda.stream(self._stream):
            started = self._timer()
            for name, part in taken.items():
                row = torch.from_numpy(self.rows[name][slot])
                row.copy_(part.view(-1).view(torch.uint8), non_blocking=True)
                part.record_stream(self._stream)
            self._pending.append((group, False, started, self._timer()))
        self._collect_times()

    def load(self, group: int, block_id: int, slot: int) -> None:
        arrived = {}
        with torch.cuda.stream(self._stream):
            started = self._timer()
            for name in self._planes[group]:
                arrived[name] = torch.from_numpy(self.rows[name][slot]).to(self._device, non_blocking=True)
            self._pending.append((group, True, started, self._timer()))
        self._forwards.wait_stream(self._stream)
        for name, part in arrived.items():
            block = self._block(name, block_id)
            block.copy_(part.view(block.dtype).view(block.shape))
            part.record_stream(self._forwards)
        self._collect_times()

    def measure(self, group: int, block_id: int) -> None:
        """Does what BlockCopies.measure does. The host waits for the copies, so that their times count at once."""
        super().measure(group, block_id)
        self._stream.synchronize()
        self._collect_times()

    def _timer(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _collect_times(self) -> None:
        """Passes on the times of copies that have ended."""
        while self._pending and self._pending[0][3].query():
            group, is_load, started, ended = self._pending.popleft()
            self._price.add_copy(group, started.elapsed_time(ended) / 1e3, is_load=is_load)
