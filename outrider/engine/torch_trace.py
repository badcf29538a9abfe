"""A torch profiler trace of some steps of the engine thread."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class TorchTrace:
    """A trace from construction to `stop`. Call both in the engine thread, since torch records the calling thread."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        self._num_steps = 0
        self._step = self._enter()

    def step_ended(self) -> None:
        """Ends the current step and begins the next. In the trace, a step is one bar, which includes the time since
        the step before it.
        """
        self._num_steps += 1
        self._step.__exit__(None, None, None)
        self._step = self._enter()

    def stop(self) -> None:
        """Stops recording, which takes a while."""
        self._step.__exit__(None, None, None)
        self._profile.stop()

    def export(self) -> bytes:
        """Returns the trace as gzipped Chrome trace JSON. Call it after `stop`, from any thread; slow."""
        with tempfile.TemporaryDirectory(prefix="outrider-trace-") as folder:
            path = Path(folder) / "trace.json.gz"
            self._profile.export_chrome_trace(str(path))
            return path.read_bytes()

    def _enter(self) -> record_function:
        return record_function(f"step {self._num_steps}").__enter__()
