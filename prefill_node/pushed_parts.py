"""The times of the parts that a push has sent."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from outrider.prefill import MAX_TIMED_PARTS, TimedPart


def add_part(parts: list[TimedPart], part: TimedPart) -> None:
    """Appends a part, or merges it into the last one if there are already MAX_TIMED_PARTS."""
    if len(parts) < MAX_TIMED_PARTS:
        parts.append(part)
    else:
        last = parts[-1]
        parts[-1] = TimedPart(last.start_seconds, max(last.end_seconds, part.end_seconds), last.amount + part.amount)


def merge_parts(parts: Iterable[TimedPart]) -> tuple[TimedPart, ...]:
    """Returns parts of several processes in the order of their start, at most MAX_TIMED_PARTS."""
    merged: list[TimedPart] = []
    for part in sorted(parts, key=lambda part: part.start_seconds):
        add_part(merged, part)
    return tuple(merged)


class PushedParts:
    """The parts that a push has sent, with the times of sending and of acknowledgement on the monotonic clock.

    The push's thread adds parts. Acknowledgements come from another thread, in the order of frames.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[TimedPart] = []
        self._waiting: deque[tuple[int, int]] = deque()  # (index, last frame) of parts that are not acknowledged
        self._acknowledged = (0, 0.0)  # the newest acknowledged frame, and the time of its acknowledgement

    def add(self, start: float, num_bytes: int, *, last_frame: int) -> None:
        """Adds a sent part. `last_frame`: the number of its last frame in the push, from 1."""
        with self._lock:
            frame, at = self._acknowledged
            add_part(self._parts, TimedPart(start, at if frame >= last_frame else start, num_bytes))
            if frame < last_frame:
                self._waiting.append((len(self._parts) - 1, last_frame))

    def acknowledge(self, frame: int) -> None:
        """Records that this frame and those before it are acknowledged."""
        now = time.monotonic()
        with self._lock:
            self._acknowledged = (frame, now)
            self._end(frame, now)

    def settle(self, committed_at: float) -> tuple[TimedPart, ...]:
        """Returns all parts. Those not yet acknowledged end at the commit, whose answer acknowledges every frame."""
        with self._lock:
            if self._waiting:
                self._end(self._waiting[-1][1], committed_at)
            return tuple(self._parts)

    def _end(self, frame: int, now: float) -> None:
        while self._waiting and self._waiting[0][1] <= frame:
            index, _ = self._waiting.popleft()
            self._parts[index] = replace(self._parts[index], end_seconds=now)
