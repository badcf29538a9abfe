"""How much a receiver may leave unacknowledged: one bound for all streams to it, used in turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outrider.errors import PeerLostError


class SharedWindow:
    """Bytes, or slots. Thread-safe; it calls `wake` of a stream without its own lock, and a stream calls it under its
    own.
    """

    def __init__(self, num_bytes: int) -> None:
        self.last_heard = 0.0  # by time.monotonic: of the receiver; of slots, an acknowledgement of one
        self._lock = threading.Lock()
        self._num_bytes = self._num_free = num_bytes
        self._waiting: dict[Callable[[], None], None] = {}  # first come, first served
        self._is_closed = False

    def take(self, num_bytes: int, wake: Callable[[], None]) -> bool:
        """False: `wake` is called when it is the caller's turn. More than the whole window is lent to one alone.

        Raises: PeerLostError once it is closed.
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
        """The caller waits no more, whether or not it has taken any: the next one's turn."""
        with self._lock:
            self._waiting.pop(wake, None)
        self._wake_next()

    def give_back(self, num_bytes: int) -> None:
        """What has been acknowledged, or will never be."""
        if num_bytes:
            with self._lock:
                self._num_free += num_bytes
            self._wake_next()

    def close(self) -> None:
        """Nothing is given out any more; whoever waits is told, one after the other."""
        self._is_closed = True
        self._wake_next()

    def hear(self) -> None:
        self.last_heard = time.monotonic()

    def _wake_next(self) -> None:
        with self._lock:
            following = next(iter(self._waiting), None)
        if following is not None:
            following()
