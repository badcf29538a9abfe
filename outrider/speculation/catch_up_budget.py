"""Limits the prefix rows in one forward of a draft model, as drafts of other sequences wait for it."""

from __future__ import annotations

LEAST_ROWS = 16
"""Fewer cost about as much."""

FIRST_ROWS = 64
"""Until a row's cost is measured."""

SMOOTHING = 0.2


class CatchUpBudget:
    """A time limit, converted to rows by their measured cost."""

    def __init__(self, *, max_rows: int, seconds: float) -> None:
        """At most `max_rows`, and as many as take about `seconds`."""
        self._max_rows = max_rows
        self._seconds = seconds
        self._row_seconds = 0.0  # running mean; 0: none was seen

    @property
    def num_rows(self) -> int:
        """For the next forward."""
        affordable = self._seconds / self._row_seconds if self._row_seconds > 0.0 else FIRST_ROWS
        return int(min(self._max_rows, max(affordable, LEAST_ROWS)))

    def observe(self, num_rows: int, seconds: float) -> None:
        """Records a forward with prefix rows. One of few rows says little about the cost of a row, and is ignored."""
        if num_rows < LEAST_ROWS:
            return
        weight = SMOOTHING if self._row_seconds > 0.0 else 1.0
        self._row_seconds += weight * (seconds / num_rows - self._row_seconds)
