"""A flow-control window that all streams to one receiver share. It is granted in the order of requests (FIFO)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outrider.errors import PeerLostError


class SharedWindow:
    """A window, in bytes or in slots, that bounds what a receiver has not acknowledged. Thread-safe.

    Streams call the window with their own locks held, so the window calls `wake` without holding its lock.
    """

    def __init__(self, num_bytes: int) -> None:
        self.last_heard = 0.0  # time.monotonic of the receiver's last message; for slots, of the last acknowledgement
        self._lock = threading.Lock()
        self._num_bytes = self._num_free = num_bytes
        self._waiting: dict[Callable[[], None], None] = {}  # first come, first served
        self._is_closed = False

    def take(self, num_bytes: int, wake: Callable[[], None]) -> bool:
        """Takes part of the window. Returns False if the caller must wait; `wake` is called when it may try again.

        If nothing of the window is taken, one caller may take more than the whole window. Raises: PeerLostError after
        `close`.
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
        """Removes the caller from the queue, whether or not `take` has succeeded, and wakes the next one."""
        with self._lock:
            self._waiting.pop(wake, None)
        self._wake_next()

    def give_back(self, num_bytes: int) -> None:
        """Returns to the window bytes or slots that have been acknowledged, or that never will be."""
        if num_bytes:
            with self._lock:
                self._num_free += num_bytes
            self._wake_next()

    def close(self) -> None:
        """Makes `take` raise PeerLostError from now on, and wakes the waiting callers one after the other."""
        self._is_closed = True
        self._wake_next()

    def hear(self) -> None:
        """Records that a message has come from the receiver."""
        self.last_heard = time.monotonic()

    def _wake_next(self) -> None:
        with self._lock:
            following = next(iter(self._waiting), None)
        if following is not None:
            following()
