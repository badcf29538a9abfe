"""Devices that compute beside their host: forward passes are queued, and done when a result is read, or when a test
says so. Torch-free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.fake_engine import ScriptedModel, ScriptedModelRunner, ScriptedRows
from tests.support.fake_kv_cache import ScriptedKVCache
from tests.support.waiting import PATIENCE_SECONDS


class ScriptedDevice:
    """In place of a ScriptedModelRunner. `on_launch` and `on_wait` are called in the host's thread.

    A pass reads and writes the cache as late as it may: when the host waits for its results. So whatever the host
    does to the blocks of a running step in between is found by the cache's own checks.
    """

    is_asynchronous = True

    def __init__(self, runner: ScriptedModelRunner) -> None:
        self._runner = runner
        self._queued: list[tuple[Sequence[ScriptedRows], LaterLogits]] = []
        self.on_launch: Callable[[], None] = lambda: None  # a pass is queued
        self.on_wait: Callable[[], None] = lambda: None  # its results are asked for; returns when the device is done

    @property
    def model(self) -> ScriptedModel:
        return self._runner.model

    @property
    def kv_cache(self) -> ScriptedKVCache:
        return self._runner.kv_cache

    @property
    def is_computing(self) -> bool:
        return bool(self._queued)

    def forward(self, rows: Sequence[ScriptedRows]) -> LaterLogits:
        """Returns at once. ScriptedRows are read now, as the input of a real pass is laid out before it is queued."""
        snapshot = snapshot_of(rows)
        logits = LaterLogits(self, sum(row.num_logits for row in snapshot))
        self._queued.append((snapshot, logits))
        self.on_launch()
        if not len(logits):
            self.finish()  # nobody will ask
        return logits

    def finish(self) -> None:
        """Computes what is queued, in order."""
        while self._queued:
            rows, logits = self._queued.pop(0)
            logits.values = self._runner.forward(rows)


def snapshot_of(rows: Sequence[ScriptedRows]) -> list[ScriptedRows]:
    return [
        ScriptedRows(tuple(row.token_ids), row.start_position, tuple(row.block_ids), row.num_logits, tuple(row.parents))
        for row in rows
    ]


class SteppedDevice:
    """In place of a ScriptedModelRunner: computes the next pass when a test calls `compute`.

    Layers are reported as they are queued, before anything is in the cache; `cache` has fences, for which reads wait.
    """

    is_asynchronous = True

    def __init__(self, runner: ScriptedModelRunner) -> None:
        self._runner = runner
        self._queued: list[Sequence[ScriptedRows]] = []
        self._changed = threading.Condition()
        self.cache = DeviceKVCache(runner.kv_cache, self)
        self.num_launched = 0
        self.num_computed = 0

    def forward(
        self, rows: Sequence[ScriptedRows], *, on_layer_done: Callable[[int], None] | None = None
    ) -> Sequence[Sequence[float]]:
        """Returns at once, unless logits are wanted."""
        with self._changed:
            self._queued.append(snapshot_of(rows))
            self.num_launched += 1
            self._changed.notify_all()
        for layer in range(self._runner.kv_cache.num_layers):
            if on_layer_done is not None:
                on_layer_done(layer)
        if not any(row.num_logits for row in rows):
            return []
        self.fence().synchronize()
        return self.logits

    def compute(self) -> None:
        """The next pass, once it is queued."""
        self.wait_for_launches(self.num_computed + 1)
        self.logits = self._runner.forward(self._queued.pop(0))
        with self._changed:
            self.num_computed += 1
            self._changed.notify_all()

    def wait_for_launches(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_launched >= number, PATIENCE_SECONDS), "no further pass"

    def wait_until_computed(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_computed >= number, PATIENCE_SECONDS), "nobody computes"

    def fence(self) -> DeviceFence:
        return DeviceFence(self, self.num_launched)


class DeviceFence:
    """Behind the passes that were launched before it."""

    def __init__(self, device: SteppedDevice, num_passes: int) -> None:
        self._device = device
        self._num_passes = num_passes

    def synchronize(self) -> None:
        self._device.wait_until_computed(self._num_passes)


class DeviceKVCache:
    """A ScriptedKVCache whose reads wait for what its device has still to write."""

    def __init__(self, cache: ScriptedKVCache, device: SteppedDevice) -> None:
        self._cache = cache
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def fence(self) -> DeviceFence:
        return self._device.fence()

    def read(self, plane: str, layers: range, slots: Any, after: DeviceFence | None = None, **heads: Any) -> Any:
        (after or self.fence()).synchronize()
        return self._cache.read(plane, layers, slots, **heads)


class LaterLogits(Sequence[Sequence[float]]):
    """Pseudo logits that are there once the device has computed.  # [num_logits][vocab_size]"""

    def __init__(self, device: ScriptedDevice, num_logits: int) -> None:
        self._device = device
        self._num_logits = num_logits
        self.values: Sequence[Sequence[float]] | None = None

    def __len__(self) -> int:
        return self._num_logits

    def __getitem__(self, index: int | slice) -> Sequence:
        """Waits for the device."""
        if self.values is None:
            self._device.on_wait()
            self._device.finish()
        assert self.values is not None
        return self.values[index]
