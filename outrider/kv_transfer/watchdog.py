"""Progress deadlines for many streams, by one thread.

A peer that is frozen (SIGSTOP) looks alive to TCP: whoever waits for it must be woken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Guard:
    """One deadline that moves with `touch`."""

    def __init__(self, watchdog: Watchdog, seconds: float, on_expired: Callable[[], None]) -> None:
        self._watchdog = watchdog
        self.seconds = seconds
        self.on_expired = on_expired
        self.deadline = time.monotonic() + seconds

    def touch(self) -> None:
        """There was progress. Cheap: one assignment."""
        self.deadline = time.monotonic() + self.seconds

    def stop(self) -> None:
        """No deadline any more. Idempotent."""
        self._watchdog.forget(self)


class Watchdog:
    """Calls `on_expired` once for every guard whose deadline passes, from its own thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._guards: set[Guard] = set()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kv-receiver-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Idempotent; guards that are left never expire."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def watch(self, seconds: float, on_expired: Callable[[], None]) -> Guard:
        """`on_expired` must not block; it may run while `stop` is being called."""
        guard = Guard(self, seconds, on_expired)
        with self._changed:
            self._guards.add(guard)
            self._changed.notify()
        return guard

    def forget(self, guard: Guard) -> None:
        with self._changed:
            self._guards.discard(guard)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_stopped:
                    return
                now = time.monotonic()
                expired = [guard for guard in self._guards if guard.deadline <= now]
                self._guards.difference_update(expired)
                if not expired:
                    nearest = min((guard.deadline for guard in self._guards), default=None)
                    self._changed.wait(None if nearest is None else nearest - now)
            for guard in expired:
                guard.on_expired()
