"""How many rows of prefixes one forward of a draft model may have: drafts of other sequences wait for it."""

from __future__ import annotations

import math

LEAST_ROWS = 16
"""So few cost hardly more than one."""

FIRST_ROWS = 64
"""Before it is known what a row costs."""

SMOOTHING = 0.2


class CatchUpBudget:
    """A time, counted in rows by what they have cost so far."""

    def __init__(self, *, max_rows: int, seconds: float = math.inf) -> None:
        """At most `max_rows`, and as many as take about `seconds`."""
        self._max_rows = max_rows
        self._seconds = seconds
        self._row_seconds = 0.0  # running mean; 0: none was seen

    @property
    def num_rows(self) -> int:
        """For the next forward."""
        if self._row_seconds > 0.0:
            affordable = self._seconds / self._row_seconds
        else:
            affordable = FIRST_ROWS if self._seconds < math.inf else math.inf
        return int(min(self._max_rows, max(affordable, LEAST_ROWS)))

    def observe(self, num_rows: int, seconds: float) -> None:
        """A forward with rows of prefixes. One with few rows says little about what a row costs, and is left out."""
        if num_rows < LEAST_ROWS:
            return
        weight = SMOOTHING if self._row_seconds > 0.0 else 1.0
        self._row_seconds += weight * (seconds / num_rows - self._row_seconds)
