"""Prints a cluster's events as human-readable lines."""

from __future__ import annotations

import threading
import time
from typing import TextIO

from outrider.cluster.child import ClusterEvent, EventKind
from outrider.lossy_stream import LossyStream

BAR_WIDTH = 24
REDRAW_SECONDS = 0.1
LINE_SECONDS = 2.0
"""Seconds between two progress lines of a stage if the output is not a terminal, for example a container's log."""
STILL_SECONDS = 10.0
"""Seconds between two such lines if the figures of the stage do not change."""


class EventPrinter:
    """Prints one line for each change. While weights load, a terminal shows a bar; other outputs get a line every
    two seconds. Thread-safe.
    """

    def __init__(self, stream: TextIO | LossyStream) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._lock = threading.Lock()
        self._bars: dict[str, tuple[ClusterEvent, float]] = {}  # last event and stage's start time, by process
        self._drawn_at = 0.0
        self._drawn: ClusterEvent | None = None
        self._bar_length = 0

    def show(self, event: ClusterEvent) -> None:
        """Prints the event, unless it reports a failed start, which `wait_serving` raises to its caller."""
        if event.kind is EventKind.FAILED:
            return
        if event.kind is EventKind.PROGRESS:
            self._show_progress(event)
            return
        with self._lock:
            self._bars.pop(event.name, None)
        self.say(f"{event.name:<10} {event.kind.value} {event.message}".rstrip())

    def progress(self, name: str, stage: str, done: int, total: int) -> None:
        """Prints the progress of work in this process."""
        self.show(ClusterEvent(kind=EventKind.PROGRESS, name=name, message=stage, done=done, total=total))

    def say(self, text: str) -> None:
        with self._lock:
            self._clear_bar()
            self._stream.write(text + "\n")
            self._stream.flush()

    def _show_progress(self, event: ClusterEvent) -> None:
        is_done = 0 < event.total <= event.done
        now = time.monotonic()
        with self._lock:
            before, began_at = self._bars.get(event.name, (None, now))
            if before is None or before.message != event.message:
                before, began_at = None, now
            self._bars[event.name] = event, began_at
            if is_done:
                del self._bars[event.name]
        if is_done:
            took = f" in {now - began_at:.0f} s" if now - began_at >= 1 else ""
            self.say(f"{event.name:<10} {event.message} {_amount(event)}{took}")
        elif not self._is_terminal:
            patience = STILL_SECONDS if event == self._drawn else LINE_SECONDS
            if before is None:
                self._drawn_at, self._drawn = now, event
                self.say(f"{event.name:<10} {event.message} …")
            elif (event.done or event.total) and now - self._drawn_at >= patience:
                self._drawn_at, self._drawn = now, event
                self.say(f"{event.name:<10} {event.message} {_amount(event)}, {now - began_at:.0f} s …")
        elif now - self._drawn_at >= REDRAW_SECONDS:
            with self._lock:
                self._draw_bars()

    def _draw_bars(self) -> None:
        self._clear_bar()
        now = time.monotonic()
        line = "   ".join(
            f"{name} {event.message} {_bar(event)} {now - began_at:.0f} s"
            for name, (event, began_at) in self._bars.items()
        )
        self._stream.write(line)
        self._stream.flush()
        self._bar_length, self._drawn_at = len(line), now

    def _clear_bar(self) -> None:
        if self._bar_length:
            self._stream.write("\r" + " " * self._bar_length + "\r")
            self._bar_length = 0


def _bar(event: ClusterEvent) -> str:
    if event.total <= 0:
        return _amount(event)
    filled = round(BAR_WIDTH * min(event.done / event.total, 1.0))
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {_amount(event)}"


def _amount(event: ClusterEvent) -> str:
    """Formats bytes as MiB; small counts are left as they are."""
    if max(event.done, event.total) >= 1 << 20:
        done, total, unit = f"{event.done / (1 << 20):.1f}", f"{event.total / (1 << 20):.1f}", " MiB"
    else:
        done, total, unit = str(event.done), str(event.total), ""
    return f"{done}{unit}" if event.total <= 0 else f"{done}/{total}{unit}"
