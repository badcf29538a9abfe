"""Devices that queue forward passes and compute them when a result is read or a test asks for it. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.fake_engine import ScriptedModel, ScriptedModelRunner, ScriptedRows
from tests.support.fake_kv_cache import ScriptedKVCache
from tests.support.waiting import PATIENCE_SECONDS


class ScriptedDevice:
    """Replaces a ScriptedModelRunner. `on_launch` and `on_wait` are called in the host's thread.

    A pass reads and writes the cache as late as possible, when the host waits for its results. If the host changes the
    blocks of a running step in between, the cache's own checks therefore notice the change.
    """

    is_asynchronous = True

    def __init__(self, runner: ScriptedModelRunner) -> None:
        self._runner = runner
        self._queued: list[tuple[Sequence[ScriptedRows], LaterLogits]] = []
        self.on_launch: Callable[[], None] = lambda: None  # called when a pass is queued
        self.on_wait: Callable[[], None] = lambda: None  # called when results are read; returns when the device is done

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
        """Returns at once. It reads the rows now, because a real pass's input is laid out before the pass is queued."""
        snapshot = snapshot_of(rows)
        logits = LaterLogits(self, sum(row.num_logits for row in snapshot))
        self._queued.append((snapshot, logits))
        self.on_launch()
        if not len(logits):
            self.finish()  # nobody will read the results
        return logits

    def finish(self) -> None:
        """Computes the queued passes in order."""
        while self._queued:
            rows, logits = self._queued.pop(0)
            logits.values = self._runner.forward(rows)


def snapshot_of(rows: Sequence[ScriptedRows]) -> list[ScriptedRows]:
    return [
        ScriptedRows(
            tuple(row.token_ids),
            row.start_position,
            tuple(row.block_ids),
            row.num_logits,
            tuple(row.parents),
            row.adapter,
        )
        for row in rows
    ]


class SteppedDevice:
    """Replaces a ScriptedModelRunner, and computes the next pass when a test calls `compute`.

    It reports layers when they are queued, before anything is in the cache. Reads wait for the fences of `cache`.
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
        """Returns at once, unless the rows need logits."""
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
        """Waits until a pass is queued, and computes it."""
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
    """A fence that is done when the passes launched before it are."""

    def __init__(self, device: SteppedDevice, num_passes: int) -> None:
        self._device = device
        self._num_passes = num_passes

    def synchronize(self) -> None:
        self._device.wait_until_computed(self._num_passes)


class DeviceKVCache:
    """A ScriptedKVCache whose reads wait for the queued writes of its device."""

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
    """Pseudo logits that can be read once the device has computed them.  # [num_logits][vocab_size]"""

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
