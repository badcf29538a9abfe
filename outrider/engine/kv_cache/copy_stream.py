"""Copies keys and values between a GPU and the host, on a stream beside the forward passes.

Forward passes run on the device's default stream. A fence marks the work queued there; a copy that waits for it comes
after that work and runs beside what follows. Only the thread that asks for a copy waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.kv_cache.base import Bytes, Slots
from outrider.engine.transfer import empty_page_locked, upload

Fence = torch.cuda.Event


class CopyStream:
    """Of one cache. Threads may use it at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def fence(self) -> Fence:
        """After all work that is queued by now."""
        fence = torch.cuda.Event()
        fence.record(torch.cuda.default_stream(self._device))
        return fence

    def gather(self, rows: Tensor, slots: Slots, after: Fence) -> Tensor:
        """Some slots of [layers, slots, width], once `after` is reached: [layers, num_slots, width], page-locked."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            indices = upload(slots, self._device)
            taken = rows.index_select(1, indices)
            host = empty_page_locked(taken.shape, taken.dtype)
            host.copy_(taken, non_blocking=True)
            self._wait()
        return host

    def scatter(self, rows: Tensor, slots: Slots, payload: Bytes, after: Fence) -> None:
        """Writes some slots of [layers, slots, width] once `after` is reached. Later work must not use them.

        `payload` [layers * num_slots * width * itemsize] uint8 may be used again afterwards.
        """
        host = empty_page_locked(payload.shape, torch.uint8)
        host.numpy()[:] = payload
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            indices = upload(slots, self._device)
            values = host.to(self._device, non_blocking=True)
            rows.index_copy_(1, indices, values.view(rows.dtype).view(rows.shape[0], -1, rows.shape[2]))
            self._wait()

    def _wait(self) -> None:
        done = torch.cuda.Event()
        done.record(self._stream)
        done.synchronize()
