"""Measures the engine thread's time by part of a step, at the cost of a few clock reads per step. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from outrider.profile import Part


class StepClock:
    """A clock that counts the nanoseconds of each part of a step. Engine thread only.

    `mark(part)` attributes the time since the last mark to that part, so the parts add up to the elapsed time.
    """

    __slots__ = ("_last", "_now", "_spent")

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        """`now`: returns nanoseconds of a monotonic clock."""
        self._now = now
        self._spent: dict[str, int] = {}
        self._last = now()

    def mark(self, part: Part) -> int:
        """Attributes the time since the last mark to `part`, and returns that time."""
        now = self._now()
        passed, self._last = now - self._last, now
        self._spent[part] = self.spent(part) + passed
        return passed

    def spent(self, part: Part) -> int:
        """Returns the nanoseconds of a part since the last `take` or `restart`."""
        return self._spent.get(part, 0)

    def move(self, nanoseconds: int, *, source: Part, target: Part) -> None:
        """Moves time marked as `source` to `target`. Use it for time that a callee has measured itself."""
        moved = min(nanoseconds, self.spent(source))
        self._spent[source] = self.spent(source) - moved
        self._spent[target] = self.spent(target) + moved

    def take(self) -> dict[str, int]:
        """Returns the nanoseconds by part since the last `take` or `restart`."""
        spent, self._spent = self._spent, {}
        return spent

    def restart(self) -> None:
        """Discards the time since the last `take` and starts again now."""
        self._spent = {}
        self._last = self._now()


class ForwardPhases:
    """A measurement of forward passes by named phase, taken inside native kernels. Engine thread only.

    This default measures no phases: torch's operations appear in a trace instead, and are only queued on a GPU.
    """

    def start(self) -> None:
        """Starts measuring forward passes."""

    def take(self) -> Mapping[str, int]:
        """Returns the nanoseconds of each phase since the last `take`, without callbacks between layers."""
        return {}

    def stop(self) -> None:
        """Stops measuring. Idempotent."""
