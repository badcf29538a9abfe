"""A bound on what a receiver has not acknowledged, for all streams to it. Streams take from it in turns (FIFO)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outrider.errors import PeerLostError


class SharedWindow:
    """A window of bytes or of slots. Thread-safe.

    Streams call it with their own lock held, so it calls a stream's `wake` without holding its own.
    """

    def __init__(self, num_bytes: int) -> None:
        self.last_heard = 0.0  # by time.monotonic: of the receiver; of slots, an acknowledgement of one
        self._lock = threading.Lock()
        self._num_bytes = self._num_free = num_bytes
        self._waiting: dict[Callable[[], None], None] = {}  # first come, first served
        self._is_closed = False

    def take(self, num_bytes: int, wake: Callable[[], None]) -> bool:
        """Takes part of the window. False: there is no room; `wake` is called when it is the caller's turn.

        One caller may take more than the whole window, while nobody else has any of it. Raises: PeerLostError once the
        window is closed.
        """
        with self._lock:
            if self._is_closed:
                raise PeerLostError("the node is stopping: it sends no more KV")
            self._waiting.setdefault(wake)
            is_next = next(iter(self._waiting)) == wake
            if not is_next or (num_bytes > self._num_free and self._num_free < self._num_bytes):
                return False
            self._num_free -= num_bytes
            return True

    def leave(self, wake: Callable[[], None]) -> None:
        """Ends the caller's turn, whether or not it has taken any, and wakes the next one."""
        with self._lock:
            self._waiting.pop(wake, None)
        self._wake_next()

    def give_back(self, num_bytes: int) -> None:
        """Returns what has been acknowledged, or will never be, to the window."""
        if num_bytes:
            with self._lock:
                self._num_free += num_bytes
            self._wake_next()

    def close(self) -> None:
        """Gives out no more, and tells those who wait, one after the other."""
        self._is_closed = True
        self._wake_next()

    def hear(self) -> None:
        """Notes that the receiver has said something."""
        self.last_heard = time.monotonic()

    def _wake_next(self) -> None:
        with self._lock:
            following = next(iter(self._waiting), None)
        if following is not None:
            following()
