"""What a service tells the process that started it: JSON lines on an inherited descriptor.

    {"role": "decode_node", "address": "127.0.0.1:40001", "metrics_address": null, "pid": 77}
    {"progress": "weights", "done": 1048576, "total": 270000000}      any number of these
    {"serving": true, "role": …, "address": …, "metrics_address": …, "pid": …, …}
    {"refused": "it computes in bfloat16, …", "address": "127.0.0.1:40002"}             of another service
    {"failed": "cannot start: …"}                                          instead, and the process ends

The first is written when the port is bound, the third when the service serves. The
descriptor's number is in OUTRIDER_ANNOUNCE_FD; without it nothing is announced.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from outrider.errors import OutriderError, describe_error
from outrider.service.telemetry.logging import get_logger

ANNOUNCE_VARIABLE = "OUTRIDER_ANNOUNCE_FD"
PROGRESS_INTERVAL_SECONDS = 0.1
LOG_INTERVAL_SECONDS = 3.0


class Announcer:
    """Writes announcements; a no-op without a descriptor. Thread-safe. A reader that left is no error."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._last_progress = 0.0

    @classmethod
    def from_environment(cls) -> Announcer:
        text = os.environ.get(ANNOUNCE_VARIABLE, "")
        return cls(int(text) if text.isdigit() else None)

    def say(self, **fields: Any) -> None:
        """One line. Fields must be JSON values."""
        if self._descriptor is None:
            return
        line = (json.dumps(fields) + "\n").encode()
        with self._lock:
            try:
                os.write(self._descriptor, line)
            except OSError:  # nobody listens any more: stop announcing
                self._descriptor = None

    def progress(self, stage: str, done: int, total: int) -> None:
        """How far a long start has come, at most ten times a second; fits `open_model(progress=…)`."""
        now = time.monotonic()
        if done < total and now - self._last_progress < PROGRESS_INTERVAL_SECONDS:
            return
        self._last_progress = now
        self.say(progress=stage, done=done, total=total)


class ProgressLog:
    """Lines for whoever watches a log: every few seconds while a stage goes on, and its end if it had any. One thread.

    A stage that is over sooner says nothing.
    """

    def __init__(self) -> None:
        self._log = get_logger("progress")
        self._stage = ""
        self._next_line_at = 0.0
        self._has_spoken = False

    def progress(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._has_spoken = stage, False
            self._next_line_at = now + LOG_INTERVAL_SECONDS
        is_done = 0 < total <= done
        if now < self._next_line_at and not (is_done and self._has_spoken):
            return
        self._has_spoken = not is_done
        self._next_line_at = now + LOG_INTERVAL_SECONDS
        self._log.info(_STAGES.get(stage, stage), stage=stage, done=done, **({"total": total} if total else {}))


_STAGES = {
    "download": "downloading the model",
    "convert": "converting the model",
    "wait": "waiting for another process that gets the model",
    "kernels": "compiling native kernels, once on this machine",
    "weights": "loading the model",
}


def announce_failure(event: str, error: BaseException) -> None:
    """Why this process ends: one line for the process that started it, and one in the log, with an unexpected trace."""
    announce(failed=f"{event}: {describe_error(error)}")
    trace = None if isinstance(error, OutriderError) else error
    _failure_log.error(event, error=describe_error(error), exc_info=trace)


def announce_uncaught_errors() -> None:
    """From now on, an exception that ends the main thread is announced as a failed start."""
    sys.excepthook = lambda _kind, error, _trace: announce_failure("cannot start", error)


def announce_progress(stage: str, done: int, total: int) -> None:
    """Tells the process that started this one, and the log: `open_model(config, progress=announce_progress)`."""
    _process_announcer.progress(stage, done, total)
    _process_log.progress(stage, done, total)


_process_announcer = Announcer.from_environment()
announce = _process_announcer.say
_failure_log = get_logger("service")
_process_log = ProgressLog()
