"""When the parts of a call were in work: chunks that were computed, KV that was pushed."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

from outrider.prefill import MAX_TIMED_PARTS


class TimedPart(NamedTuple):
    start: float  # monotonic seconds, as the next
    end: float
    amount: int  # tokens, or bytes


def add_part(parts: list[TimedPart], part: TimedPart) -> None:
    """What there is no room for is added to the last part."""
    if len(parts) < MAX_TIMED_PARTS:
        parts.append(part)
    else:
        last = parts[-1]
        parts[-1] = TimedPart(last.start, max(last.end, part.end), last.amount + part.amount)


class PushedParts:
    """What a push has sent, part by part, and when its receiver had it.

    The push's thread adds; acknowledgements come in the order of the frames, from another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[TimedPart] = []
        self._waiting: deque[tuple[int, int]] = deque()  # of parts that are not acknowledged: (index, last frame)
        self._acknowledged = (0, 0.0)  # the newest frame, and when

    def add(self, start: float, num_bytes: int, *, last_frame: int) -> None:
        """A part has been sent. `last_frame`: its number, from 1, among all frames of the push."""
        with self._lock:
            frame, at = self._acknowledged
            add_part(self._parts, TimedPart(start, at if frame >= last_frame else start, num_bytes))
            if frame < last_frame:
                self._waiting.append((len(self._parts) - 1, last_frame))

    def acknowledge(self, frame: int) -> None:
        """This frame, and those before it."""
        now = time.monotonic()
        with self._lock:
            self._acknowledged = (frame, now)
            self._end(frame, now)

    def settle(self, committed_at: float) -> tuple[TimedPart, ...]:
        """All of them. The answer to a commit acknowledges every frame."""
        with self._lock:
            if self._waiting:
                self._end(self._waiting[-1][1], committed_at)
            return tuple(self._parts)

    def _end(self, frame: int, now: float) -> None:
        while self._waiting and self._waiting[0][1] <= frame:
            index, _ = self._waiting.popleft()
            self._parts[index] = self._parts[index]._replace(end=now)
