"""Messages from a service to the process that started it: JSON lines on an inherited file descriptor.

    {"role": "decode_node", "address": "127.0.0.1:40001", "metrics_address": null, "pid": 77}
    {"progress": "weights", "done": 1048576, "total": 270000000}      any number of these
    {"serving": true, "role": …, "address": …, "metrics_address": …, "pid": …, …}
    {"refused": "it computes in bfloat16, …", "address": "127.0.0.1:40002"}       about another service
    {"failed": "cannot start: …"}                         instead of "serving"; the process then ends

The first line is written when the port is bound, the third when the service is serving. The
descriptor's number is in the variable OUTRIDER_ANNOUNCE_FD; without this variable, nothing is announced.
"""

from __future__ import annotations

import contextlib
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


_text = os.environ.get(ANNOUNCE_VARIABLE, "")
_descriptor = int(_text) if _text.isdigit() else None
_lock = threading.Lock()
_failure_log = get_logger("service")


def announce(**fields: Any) -> None:
    """Writes one line if there is a parent process that reads it. Fields must be JSON values. Thread-safe. A closed
    pipe is ignored.
    """
    if _descriptor is not None:
        line = (json.dumps(fields) + "\n").encode()
        with _lock, contextlib.suppress(OSError):
            os.write(_descriptor, line)


class Progress:
    """Reports the progress of a long start. The parent process gets at most ten reports a second. The log gets a line
    every few seconds during a stage, and a last line at the end of a stage that had such lines. Used by one thread.
    """

    def __init__(self) -> None:
        self._log = get_logger("progress")
        self._stage = ""
        self._announced_at = 0.0
        self._next_line_at = 0.0
        self._has_spoken = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._announced_at >= PROGRESS_INTERVAL_SECONDS:
            self._announced_at = now
            announce(progress=stage, done=done, total=total)
        if stage != self._stage:
            self._stage, self._has_spoken = stage, False
            self._next_line_at = now + LOG_INTERVAL_SECONDS
        is_done = 0 < total <= done
        if now < self._next_line_at and not (is_done and self._has_spoken):
            return
        self._has_spoken = not is_done
        self._next_line_at = now + LOG_INTERVAL_SECONDS
        self._log.info(_STAGES.get(stage, stage), stage=stage, done=done, **({"total": total} if total else {}))


announce_progress = Progress()
"""The progress callback for `open_model(config, progress=announce_progress)`."""

_STAGES = {
    "download": "downloading the model",
    "convert": "converting the model",
    "wait": "waiting for another process that gets the model",
    "gpu": "waiting for another node that loads its model on the same GPU",
    "kernels": "compiling native kernels, once on this machine",
    "weights": "loading the model",
}


def announce_failure(event: str, error: BaseException) -> None:
    """Reports to the parent process and the log why this process ends.

    The log also gets the traceback of an unexpected error.
    """
    announce(failed=f"{event}: {describe_error(error)}")
    trace = None if isinstance(error, OutriderError) else error
    _failure_log.error(event, error=describe_error(error), exc_info=trace)


def announce_uncaught_errors() -> None:
    """Installs an excepthook. It announces a failed start if an exception ends the main thread."""
    sys.excepthook = lambda _kind, error, _trace: announce_failure("cannot start", error)
