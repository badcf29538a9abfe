"""Limits the rows of a draft model's forward. Prefix rows may take only a limited time, and look-ahead rows may
lengthen the forward only a little.
"""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of each new duration in a running mean."""

OUTLIER_FACTOR = 3.0
"""A forward that takes more than this many times the mean duration counts as exactly that long."""

RETRY = 0.995
"""Factor by which each forward shrinks the mean durations of larger sizes, so that a once slow size is tried again."""

MAX_ROWS = 64
"""Number of rows in a forward up to which look-ahead rows may be added."""

MIN_PREFIX_ROWS = 16
"""The limit of prefix rows in a forward is at least this number, because fewer rows would take about as long."""

FIRST_ROWS = 64
"""Limit of prefix rows in a forward until the cost of a row has been measured."""


class RowBudget:
    """Limits the rows of a drafter's forwards according to measured durations. Not thread-safe.

    While prefix rows are computed, the drafts of other sequences wait. So prefix rows may take only a limited time,
    which is estimated from the mean cost of a row.

    Look-ahead rows are added only if they lengthen a forward little, judged by the mean durations of forwards of each
    size: 1 row, 2 to 3 rows, 4 to 7 rows and so on. The mean durations are compared directly, not fitted to a line,
    because on a GPU most sizes take the same time until one takes twice as long, and on a busy machine durations
    scatter more than the number of rows explains.
    """

    def __init__(self, *, max_prefix_rows: int, prefix_seconds: float) -> None:
        """Allows as many prefix rows as fit into about `prefix_seconds`, at most `max_prefix_rows`."""
        self._max_prefix_rows = max_prefix_rows
        self._prefix_seconds = prefix_seconds
        self._row_seconds = 0.0  # mean seconds per row of forwards with prefix rows; 0 before the first
        self._means: dict[int, float] = {}  # mean seconds of a forward with one row per path, by num_rows.bit_length()

    def observe(self, num_rows: int, num_paths: int, seconds: float, *, num_forwards: int = 1) -> None:
        """Records one forward, and the further ones of its rollout, which have one row per path.

        `num_rows`: rows of the first forward, without those of tokens that a path assumes or has decided.
        """
        if num_rows > num_paths:
            if num_rows >= MIN_PREFIX_ROWS:  # a smaller forward says little about the cost of a row
                # If the duration includes a rollout, the estimate is too high, which is safe.
                weight = SMOOTHING if self._row_seconds > 0.0 else 1.0
                self._row_seconds += weight * (seconds / num_rows - self._row_seconds)
        else:
            size, seconds = num_rows.bit_length(), seconds / num_forwards
            mean = self._means.get(size, seconds)
            self._means[size] = mean + SMOOTHING * (min(seconds, OUTLIER_FACTOR * mean) - mean)
            for larger in [each for each in self._means if each > size]:
                self._means[larger] *= RETRY

    @property
    def num_prefix_rows(self) -> int:
        """The number of prefix rows allowed in the next forward."""
        affordable = self._prefix_seconds / self._row_seconds if self._row_seconds > 0.0 else FIRST_ROWS
        return int(min(self._max_prefix_rows, max(affordable, MIN_PREFIX_ROWS)))

    def num_more(self, num_rows: int, *, share: float) -> int:
        """Returns how many rows may be added to a forward of `num_rows` rows.

        These rows lengthen the forward by at most the fraction `share`. At most one size of unknown duration is allowed
        at a time, so that it is measured before larger ones. If `num_rows` is 0, the forward is compared with one of
        the smallest size, and at least 1 is returned.
        """
        size = max(1, num_rows).bit_length()
        known = [seconds for each, seconds in self._means.items() if each <= size]
        limit = (1.0 + share) * min(known, default=float("inf"))
        while size < MAX_ROWS.bit_length() and self._means.get(size + 1, 0.0) <= limit:
            size += 1
            if size not in self._means:
                break  # measure this size before larger ones are allowed
        return max(int(not num_rows), min((1 << size) - 1, MAX_ROWS) - num_rows)
