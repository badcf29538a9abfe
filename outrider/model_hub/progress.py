"""How long work is reported: one callback, whoever does the work."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total): stage is "download" (bytes), "convert" or "weights" (tensors); total 0 is unknown."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Reports nothing."""
