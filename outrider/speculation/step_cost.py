"""How long a step takes as a function of its rows, learnt while serving."""

from __future__ import annotations

PRIOR_BASE_ROWS = 15.0
"""Until row counts have varied, a step's fixed cost is taken for that of so many rows."""

PRIOR_WEIGHT = 1.0
"""Weight of that prior, in units of (rows apart) squared."""

OUTLIER_FACTOR = 3.0
"""A step that takes longer than this many times the expected counts as this many times."""


class StepCostModel:
    """T(rows) = base + slope · rows by least squares with exponential forgetting.

    The closed form of recursive least squares, on centred moments; what it forgets when
    row counts stop varying is kept out of trouble by a prior on the slope. The slope is
    never negative and the base never below zero, so T is monotone. Not thread-safe.
    """

    def __init__(self, *, forgetting: float = 0.99) -> None:
        self._forgetting = forgetting
        self._weight = 0.0
        self._mean_rows = 0.0
        self._mean_seconds = 0.0
        self._variance = 0.0  # weighted sum of squared deviations of rows
        self._covariance = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a step has been observed at all."""
        return self._weight > 0.0

    def observe(self, *, num_rows: int, step_seconds: float) -> None:
        """Learns from one step. A step of several times the expected time is clipped."""
        if self._weight >= 4.0:
            step_seconds = min(step_seconds, OUTLIER_FACTOR * self.seconds(num_rows))
        self._weight = self._forgetting * self._weight + 1.0
        gain = 1.0 / self._weight
        off_rows = num_rows - self._mean_rows
        self._mean_rows += gain * off_rows
        off_seconds = step_seconds - self._mean_seconds
        self._mean_seconds += gain * off_seconds
        self._variance = self._forgetting * self._variance + (1.0 - gain) * off_rows * off_rows
        self._covariance = self._forgetting * self._covariance + (1.0 - gain) * off_rows * off_seconds

    @property
    def seconds_per_row(self) -> float:
        """Slope of T, at least 0; 0 before the first step."""
        if not self.is_known:
            return 0.0
        prior = self._mean_seconds / (self._mean_rows + PRIOR_BASE_ROWS)
        slope = (self._covariance + PRIOR_WEIGHT * prior) / (self._variance + PRIOR_WEIGHT)
        return min(max(slope, 0.0), self._mean_seconds / max(self._mean_rows, 1.0))

    def seconds(self, num_rows: float) -> float:
        """Expected time of a step with `num_rows` rows; 0 before the first step."""
        return max(self._mean_seconds + self.seconds_per_row * (num_rows - self._mean_rows), 0.0)
