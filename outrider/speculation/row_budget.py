"""Limits the rows of a draft model's forward: prefix rows by their duration, look-ahead rows by what they add to it."""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of each new duration in a running mean."""

OUTLIER_FACTOR = 3.0
"""A longer forward counts as this many times the mean duration."""

RETRY = 0.995
"""Factor by which the means of larger sizes shrink at each forward, so that a size that was slow is tried again."""

MAX_ROWS = 64
"""Maximum number of rows in a forward of a look-ahead."""

MIN_PREFIX_ROWS = 16
"""Minimum limit of prefix rows in a forward: fewer rows would take about as long."""

FIRST_ROWS = 64
"""Limit of prefix rows in a forward before the cost of a row is measured."""


class RowBudget:
    """Limits the rows of a drafter's forwards, by their measured duration. Not thread-safe.

    Drafts of other sequences wait for prefix rows. So these are limited to a duration, by the mean cost of a row.

    Rows of a look-ahead are added only if they lengthen a forward little, by the mean duration of forwards of each
    size: 1 row, 2 to 3, 4 to 7 and so on. Sizes are compared and not fitted to a line: on a GPU most sizes take the
    same time and then one takes twice as long, and on a busy machine durations scatter more than rows explain.
    """

    def __init__(self, *, max_prefix_rows: int, prefix_seconds: float) -> None:
        """Allows as many prefix rows as fit into about `prefix_seconds`, at most `max_prefix_rows`."""
        self._max_prefix_rows = max_prefix_rows
        self._prefix_seconds = prefix_seconds
        self._row_seconds = 0.0  # running mean over forwards with prefix rows; 0: there was none
        self._means: dict[int, float] = {}  # seconds of forwards with one row per path, by the rows' bit length

    def observe(self, num_rows: int, num_paths: int, seconds: float, *, has_rollout: bool = False) -> None:
        """Records one forward. `has_rollout`: the duration includes a rollout."""
        if num_rows > num_paths:
            if num_rows >= MIN_PREFIX_ROWS:  # a smaller forward says little about the cost of a row
                # The duration may include a rollout; then the estimate is too high, which is safe.
                weight = SMOOTHING if self._row_seconds > 0.0 else 1.0
                self._row_seconds += weight * (seconds / num_rows - self._row_seconds)
        elif not has_rollout:
            size = num_rows.bit_length()
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
        """Returns how many rows may be added to a forward of `num_rows`, so that it takes at most `share` longer.

        One size of unknown duration is allowed at a time, to measure it. If `num_rows` is 0, the forward is compared
        with the smallest one, and at least 1 is returned.
        """
        size = max(1, num_rows).bit_length()
        known = [seconds for each, seconds in self._means.items() if each <= size]
        limit = (1.0 + share) * min(known, default=float("inf"))
        while size < MAX_ROWS.bit_length() and self._means.get(size + 1, 0.0) <= limit:
            size += 1
            if size not in self._means:
                break  # this size is measured first
        return max(int(not num_rows), min((1 << size) - 1, MAX_ROWS) - num_rows)
