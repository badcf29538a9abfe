"""Limits the rows of a draft model's forward: those of prefixes by time, those of a look-ahead to what adds little."""

from __future__ import annotations

SMOOTHING = 0.2
OUTLIER_FACTOR = 3.0
"""A forward's duration counts as at most this many times the mean."""

RETRY = 0.995
"""Factor by which the means of larger sizes shrink at each forward, so that a size that was slow is tried again."""

MAX_ROWS = 64

MIN_CATCH_UP_ROWS = 16
"""Prefix rows of a forward, at least: fewer cost about as much."""

FIRST_ROWS = 64
"""Prefix rows of a forward until the cost of a row is measured."""


class RowBudget:
    """Running means of the duration of forwards, by size: 1 row, 2 to 3, 4 to 7 and so on. Not thread-safe.

    Sizes are compared and not fitted to a line: on a device most sizes cost the same and then one costs twice, and on a
    busy machine durations scatter more than the number of rows explains.
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
        """Returns how many rows may join others without lengthening the forward by more than this share.

        Sizes whose duration is unknown are tried one after the other.

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
    """Limits prefix rows, for which drafts of other sequences wait, to a duration, by the measured cost of a row."""

    def __init__(self, *, max_rows: int, seconds: float) -> None:
        """Allows as many rows as take about `seconds`, at most `max_rows`."""
        self._max_rows = max_rows
        self._seconds = seconds
        self._row_seconds = 0.0  # running mean; 0: none was seen

    @property
    def num_rows(self) -> int:
        """The number of prefix rows allowed in the next forward."""
        affordable = self._seconds / self._row_seconds if self._row_seconds > 0.0 else FIRST_ROWS
        return int(min(self._max_rows, max(affordable, MIN_CATCH_UP_ROWS)))

    def observe(self, num_rows: int, seconds: float) -> None:
        """Records a forward with prefix rows. A forward of few rows is ignored: it says little about a row's cost."""
        if num_rows < MIN_CATCH_UP_ROWS:
            return
        weight = SMOOTHING if self._row_seconds > 0.0 else 1.0
        self._row_seconds += weight * (seconds / num_rows - self._row_seconds)
