"""Limits the rows of a draft model's forward: of prefixes by their time, of paths to what adds little."""

from __future__ import annotations

SMOOTHING = 0.2
OUTLIER_FACTOR = 3.0
"""A forward's time counts as at most this many times the mean."""

RETRY = 0.995
"""Means of larger sizes shrink by this factor at each forward, so that a size that was slow once is tried again."""

MAX_ROWS = 64

MIN_CATCH_UP_ROWS = 16
"""Of prefixes: fewer cost about as much."""

FIRST_ROWS = 64
"""Of prefixes, until a row's cost is measured."""


class RowBudget:
    """Running means of the time of forwards, by size: 1 row, 2 to 3, 4 to 7 and so on. Not thread-safe.

    Sizes are compared with each other and not fitted to a line: on a device most sizes cost the same and then one costs
    twice, and on a busy machine times scatter more than rows explain.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}  # seconds, by bit length of the number of rows

    def observe(self, num_rows: int, seconds: float) -> None:
        """Records one forward."""
        size = num_rows.bit_length()
        mean = self._means.get(size, seconds)
        self._means[size] = mean + SMOOTHING * (min(seconds, OUTLIER_FACTOR * mean) - mean)
        for larger in [each for each in self._means if each > size]:
            self._means[larger] *= RETRY

    def num_more(self, num_rows: int, *, share: float) -> int:
        """Rows that may join so many others and lengthen the forward by at most this share; sizes are tried in turn.

        `num_rows` 0: beside the smallest forward there is, at least one row.
        """
        size = max(1, num_rows).bit_length()
        known = [seconds for each, seconds in self._means.items() if each <= size]
        limit = (1.0 + share) * min(known, default=float("inf"))
        while size < MAX_ROWS.bit_length() and self._means.get(size + 1, 0.0) <= limit:
            size += 1
            if size not in self._means:
                break  # learn this one first
        return max(int(not num_rows), min((1 << size) - 1, MAX_ROWS) - num_rows)


class CatchUpBudget:
    """Of prefix rows, as drafts of other sequences wait for them: a time limit, converted by their measured cost."""

    def __init__(self, *, max_rows: int, seconds: float) -> None:
        """At most `max_rows`, and as many as take about `seconds`."""
        self._max_rows = max_rows
        self._seconds = seconds
        self._row_seconds = 0.0  # running mean; 0: none was seen

    @property
    def num_rows(self) -> int:
        """For the next forward."""
        affordable = self._seconds / self._row_seconds if self._row_seconds > 0.0 else FIRST_ROWS
        return int(min(self._max_rows, max(affordable, MIN_CATCH_UP_ROWS)))

    def observe(self, num_rows: int, seconds: float) -> None:
        """Records a forward with prefix rows. One of few rows says little about the cost of a row, and is ignored."""
        if num_rows < MIN_CATCH_UP_ROWS:
            return
        weight = SMOOTHING if self._row_seconds > 0.0 else 1.0
        self._row_seconds += weight * (seconds / num_rows - self._row_seconds)
