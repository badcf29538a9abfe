"""Standard output and error that neither fail nor block, whatever happens to the disk, terminal or reader behind them.

A full disk, a closed pipe or a stopped reader must not affect the code that writes a log line: neither the request
that the line describes nor the supervisor of other processes.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Never, TextIO

MAX_PENDING_CHARACTERS = 1 << 20
GATHER_SECONDS = 0.01
"""Seconds that a line waits for others, so that a busy process wakes the writer at most a hundred times a second."""
IDLE_SECONDS = 10.0
"""Seconds without output after which a stream's thread ends; the next write starts another."""
DRAIN_SECONDS = 1.0
"""Seconds that a process waits at its end for its last output to be written."""


class LossyStream(io.TextIOBase):
    """A stream that writes in its own thread; lines that cannot be written are dropped and counted. Thread-safe.

    Lines are lost while writing fails, and when `MAX_PENDING_CHARACTERS` characters wait behind a blocked writer.
    """

    encoding = "utf-8"

    def __init__(
        self, write: Callable[[str], object], *, is_terminal: bool = False, descriptor: int | None = None
    ) -> None:
        """`write` writes all of a text or raises; it may block. `descriptor`: the stream's file descriptor, if any."""
        self.on_lost: Callable[[int], object] = lambda number: self.write(f"{number} lines were lost\n")
        """Callback with the number of lost lines; the writer's thread calls it when writing works again."""
        self.num_lost_lines = 0
        self._write = write
        self._is_terminal = is_terminal
        self._descriptor = descriptor
        self._changed = threading.Condition()  # reentrant: a finalizer may write while its thread holds the lock
        self._pending: deque[str] = deque()  # including the text being written
        self._num_pending = 0  # characters
        self._num_unreported = 0  # lost lines that are not yet reported
        self._thread: threading.Thread | None = None

    def isatty(self) -> bool:
        return self._is_terminal

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return super().fileno() if self._descriptor is None else self._descriptor

    def write(self, text: str) -> int:
        """Queues a text. Never raises an OSError, and never waits for the reader."""
        with self._changed:
            if self._pending and self._num_pending + len(text) > MAX_PENDING_CHARACTERS:
                self._lose(text)
                return len(text)
            self._pending.append(text)
            self._num_pending += len(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread is available; the next write tries again
                    self._thread = None
            self._changed.notify_all()
        return len(text)

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Waits until everything is written or lost, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._pending, IDLE_SECONDS):
                    self._thread = None
                    return
            time.sleep(GATHER_SECONDS)
            with self._changed:
                texts = tuple(self._pending)
            for text in texts:
                self._write_or_lose(text)
            with self._changed:
                for text in texts:
                    self._pending.popleft()
                    self._num_pending -= len(text)
                self._changed.notify_all()

    def _write_or_lose(self, text: str) -> None:
        try:
            self._write(text)
        except Exception:  # noqa: BLE001 a foreign stream may raise anything
            self._lose(text)
            return
        if self._num_unreported:
            with self._changed:
                number, self._num_unreported = self._num_unreported, 0
            self.on_lost(number)

    def _lose(self, text: str) -> None:
        num_lines = text.count("\n")
        with self._changed:
            self.num_lost_lines += num_lines
            self._num_unreported += num_lines


class _Descriptor:
    """Writes whole texts to a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ends_within_line = False  # whether the last line is incomplete

    def write(self, text: str) -> None:
        """Writes the whole text. Raises: OSError."""
        rest = memoryview((f"\n{text}" if self._ends_within_line else text).encode(errors="backslashreplace"))
        while rest:
            try:
                num_bytes = os.write(self._descriptor, rest)
            except BlockingIOError:
                select.select((), (self._descriptor,), ())
                continue
            rest, self._ends_within_line = rest[num_bytes:], num_bytes < len(rest)


def lossy(stream: TextIO | None) -> LossyStream:
    """Returns a lossy stream with the same destination. If `stream` is None, as `sys.stderr` is if it
    was closed at the start, everything is discarded.
    """
    if stream is None or stream.closed:
        return LossyStream(len)

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return LossyStream(write, is_terminal=stream.isatty())


def guard_standard_streams() -> None:
    """Makes `sys.stdout` and `sys.stderr` lossy, except streams that a test has put there. Call it first in a process.

    A closed descriptor becomes the null device, so that no file or connection gets its number, to which libraries
    write. If standard error is a pipe or terminal, it no longer blocks libraries either.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
    _unblock(2)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is getattr(sys, f"__{name}__"):
            # Python has no stream if the descriptor was closed at the start; by now its number may be in use again.
            target = descriptor if getattr(sys, name) is not None else os.open(os.devnull, os.O_WRONLY)
            write = _Descriptor(target).write
            setattr(sys, name, LossyStream(write, is_terminal=os.isatty(target), descriptor=target))
    atexit.register(drain_standard_streams)


def _unblock(descriptor: int) -> None:
    """Makes writes to a pipe or terminal non-blocking. Reopens it first, because O_NONBLOCK is a flag of the open file,
    which other processes may share.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        with suppress(OSError):  # the pipe has no reader, or the pipe or terminal belongs to another user
            fresh = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.dup2(fresh, descriptor)
            os.close(fresh)


def num_lost_lines() -> int:
    """Returns the number of lost lines of this process's standard streams, if they are guarded."""
    return sum(stream.num_lost_lines for stream in _guarded())


def drain_standard_streams() -> None:
    """Waits until the output of the standard streams is written, at most `DRAIN_SECONDS` each."""
    for stream in _guarded():
        stream.drain()


def _guarded() -> list[LossyStream]:
    return [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, LossyStream)]


def exit_now(status: int) -> Never:
    """Ends the process after its last log lines, without the interpreter's shutdown."""
    drain_standard_streams()
    os._exit(status)
