"""A device that computes beside its host: forward passes are queued, and done when a result is read. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.support.fake_engine import ScriptedModel, ScriptedModelRunner, ScriptedRows
from tests.support.fake_kv_cache import ScriptedKVCache


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
        snapshot = [
            ScriptedRows(
                tuple(row.token_ids), row.start_position, tuple(row.block_ids), row.num_logits, tuple(row.parents)
            )
            for row in rows
        ]
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
