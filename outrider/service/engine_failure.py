"""What a node does when it cannot compute any more: it ends, and its supervisor starts another process."""

from __future__ import annotations

import os

from outrider.service.telemetry.logging import get_logger

EXIT_ENGINE_FAILED = 70  # EX_SOFTWARE

_log = get_logger("engine")


def end_process(error: Exception) -> None:
    """A bug of ours, or a lost rank: whatever the state is now, it must not be served from."""
    _log.error("the engine failed; the process ends", error=str(error), exc_info=error)
    os._exit(EXIT_ENGINE_FAILED)
