"""The callback that reports the progress of long operations."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total); a total of 0 means that it is unknown.

Stages: "download" (bytes), "convert" (steps), "wait" (bytes that another process has so far), "check" (bytes),
"kernels" (compiled files), "weights" (tensors, or bytes of packed weights), "gpu" (waits for a turn to load on a GPU).
"""


def no_progress(stage: str, done: int, total: int) -> None:
    """Reports nothing."""
