"""The engine thread's time by part of a step. Always on: it is a few clock reads a step. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from outrider.profile import Part


class StepClock:
    """Nanoseconds by part of a step. Engine thread only.

    `mark(part)` counts all time since the last mark as that part, so that parts add up to the time that has passed.
    """

    __slots__ = ("_last", "_now", "_spent")

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        """`now`: nanoseconds of a monotonic clock."""
        self._now = now
        self._spent: dict[str, int] = {}
        self._last = now()

    def mark(self, part: Part) -> int:
        """The time since the last mark belongs to `part`; returns it."""
        now = self._now()
        passed, self._last = now - self._last, now
        self._spent[part] = self._spent.get(part, 0) + passed
        return passed

    def move(self, nanoseconds: int, *, source: Part, target: Part) -> None:
        """Counts some of the time marked as `source` as `target`: time that a callee has measured itself."""
        moved = min(nanoseconds, self._spent.get(source, 0))
        self._spent[source] = self._spent.get(source, 0) - moved
        self._spent[target] = self._spent.get(target, 0) + moved

    def take(self) -> dict[str, int]:
        """Nanoseconds by part since the last `take` or `restart`."""
        spent, self._spent = self._spent, {}
        return spent

    def restart(self) -> None:
        """Forgets what has passed since the last `take`."""
        self._spent = {}
        self._last = self._now()


class ForwardPhases:
    """Splits forward passes into named phases, measured inside native kernels. Engine thread only.

    This one splits none: torch's operations are in a trace, and some devices only queue.
    """

    def start(self) -> None:
        """Forwards are measured from here on."""

    def take(self) -> Mapping[str, int]:
        """Nanoseconds by phase of the forwards since the last `take`; callbacks between layers are not in them."""
        return {}

    def stop(self) -> None:
        """As before `start`. Idempotent."""
