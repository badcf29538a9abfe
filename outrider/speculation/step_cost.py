"""Learns while serving how long a step takes, as a function of its sequences and rows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Numbers of rows between which the duration is interpolated linearly."""

PRIOR_BASE_ROWS = 15.0
"""Assumed fixed cost of a step, as a number of rows of equal cost, until steps of different sizes are observed."""

SLOPE_WEIGHT = 0.05
BEND_WEIGHT = 0.5
SEQUENCE_WEIGHT = 1.0
AHEAD_WEIGHT = 0.2
"""Weights of four assumptions, relative to the weight of an observed step: the slope is that of the prior, the line
continues straight, a sequence costs nothing beyond its rows, and a launch ahead saves `AHEAD_SHARE`.
"""

AHEAD_SHARE = 0.05
"""Fraction of a step's duration that a launch before the previous step's commit is assumed to save."""

OUTLIER_FACTOR = 2.0
"""A step counts as at most this many times its expected duration."""

MAX_OUTLIERS = 3
"""Number of consecutive outliers after which further ones count in full, because the machine has become slower."""

FORGETTING = 0.99
"""Factor by which each new step reduces the weight of older ones."""

MAX_SCALE = 1e6
"""Weight of a step, relative to the first one, at which the weights of all steps are divided by it."""

MAX_CURVES = 256
"""Maximum number of results that are kept until the next fit."""

MIN_SHARE = 1e-3
"""Lower bound of expected durations, as a fraction of the mean duration of steps."""

FIT_STEPS = 8
"""Number of steps after which the fit, a small linear system, is solved again, unless a surprise causes it earlier."""

SURPRISE = 0.25
"""A step is a surprise if its duration differs from the expected one by more than this fraction of the expected one."""

MIN_EVIDENCE = 1.5
"""Number of steps, with older ones discounted, after which the duration of steps with about as many rows counts as
known.
"""

SEEN_EVIDENCE = 0.2
"""Number of such steps after which no cliff, i.e. no sudden rise of the duration, is expected up to their size."""

NOISE_RATE = 0.02
"""Weight of each new step in the running mean of errors, each a fraction of the expected duration, at most 1."""

MIN_NOISE = 0.08
"""Mean error from which on the assumptions weigh more, in proportion to the error's square: the noisier steps are, the
less a few of them say. Otherwise one slow step among the first with drafts would stop drafts for hundreds of steps.
"""

Seconds = npt.NDArray[np.float64]


class StepCostModel:
    """T(sequences, rows), a step's duration: piecewise linear in rows with the knots `KNOTS`, plus a time per sequence,
    minus what is saved if the step is launched before the previous one is committed.

    It is fitted by least squares with exponential forgetting. A weak assumption keeps the line straight between the
    numbers of rows that were observed. So the model learns a cliff (a sudden rise) from the first steps beyond the
    cliff, and forgets it after a few hundred steps that stay below the cliff. T never falls as rows are added. Not
    thread-safe.
    """

    def __init__(self, *, buckets: Sequence[int] = ()) -> None:
        """`buckets`: ascending numbers of rows to which a GPU's graphs pad smaller steps; empty: there are no graphs.

        Steps with more rows than the last bucket are not padded.
        """
        self._buckets = tuple(buckets)
        self._knots = (*self._buckets, *(knot for knot in KNOTS if not buckets or knot > buckets[-1]))
        size = len(self._knots) + 2  # the last two entries: a sequence, a launch ahead
        self._weight = 0.0
        self._noise = 0.0  # running mean of errors
        self._mean_rows = 0.0
        self._mean_seconds = 0.0
        # Sums over all steps. Instead of shrinking them, each step weighs more than the one before it: `_scale`.
        self._scale = 1.0
        self._squares = np.zeros((size, size))
        self._products = np.zeros(size)
        self._assumptions = _assumptions(self._knots)
        self._found: list[float] | None = None  # the last fit
        self._curves: dict[tuple[int, int, int], list[float]] = {}  # results of `seconds` since the last fit
        self._num_unfitted = 0  # steps since the last fit
        self._num_outliers = 0  # consecutive outliers

    @property
    def is_known(self) -> bool:
        """Whether a step has been observed."""
        return self._weight > 0.0

    def observe(self, *, num_sequences: int, num_rows: int, step_seconds: float, is_ahead: bool = False) -> None:
        """Learns from one step. A duration far above the expected one is clipped; a zero one is ignored.

        `is_ahead`: whether the step was launched before the previous one was committed.
        """
        if step_seconds <= 0.0:  # the clock did not advance
            return
        place, share = self._place(num_rows)
        is_surprise = False
        if self.is_known:
            expected = self._expected(num_sequences, place, share, is_ahead=is_ahead)
            most_seconds = OUTLIER_FACTOR * expected
            self._num_outliers = self._num_outliers + 1 if step_seconds > most_seconds else 0
            if self._num_outliers <= MAX_OUTLIERS:
                step_seconds = min(step_seconds, most_seconds)
            error = abs(step_seconds - expected) / expected
            is_surprise = error > SURPRISE
            self._noise += NOISE_RATE * (min(error, 1.0) - self._noise)
        self._weight = FORGETTING * self._weight + 1.0
        self._mean_rows += (self._padded(num_rows) - self._mean_rows) / self._weight
        self._mean_seconds += (step_seconds - self._mean_seconds) / self._weight
        self._scale /= FORGETTING
        if self._scale > MAX_SCALE:
            self._squares /= self._scale
            self._products /= self._scale
            self._scale = 1.0
        inputs = [(place, 1.0 - share), (place + 1, share), (len(self._knots), float(num_sequences))]
        inputs += [(len(self._knots) + 1, 1.0)] if is_ahead else []
        for row, one in inputs:
            weight = self._scale * one
            self._products[row] += weight * step_seconds
            for column, other in inputs:
                self._squares[row, column] += weight * other
        self._num_unfitted += 1
        if is_surprise or self._weight < FIT_STEPS or self._num_unfitted >= FIT_STEPS:
            self._found = None

    def seconds(self, num_sequences: int, num_rows: int, *, num_more: int = 0) -> list[float]:
        """Returns the expected durations of steps with `num_rows`, `num_rows` + 1 … `num_rows` + `num_more` rows, none
        of which is launched ahead.

        There are num_more + 1 values, positive and never falling. Before any step is observed, their unit is arbitrary.
        """
        found, asked = self._fitted() if self.is_known else [], (num_sequences, num_rows, num_more)
        if asked not in self._curves:
            rows: Sequence[float] = range(num_rows, num_rows + num_more + 1)
            if self._buckets:
                rows = [self._padded(row) for row in rows]
            if not found:
                return [row + PRIOR_BASE_ROWS for row in rows]
            seconds = np.interp(rows, self._knots, found[:-2]) + found[-2] * num_sequences
            rising = np.maximum.accumulate(np.maximum(seconds, MIN_SHARE * self._mean_seconds))
            if len(self._curves) >= MAX_CURVES:
                self._curves.clear()
            self._curves[asked] = rising.tolist()
        return self._curves[asked]

    def pays_to_wait(self, num_tokens: float, num_sequences: int) -> bool:
        """Returns whether accepted draft tokens are worth more than the time that a launch ahead saves.

        `num_tokens`: expected number of accepted draft tokens of all sequences together, minus the price of their rows.
        """
        if not self.is_known:
            return num_tokens > 0.0
        saved_seconds = -self._fitted()[-1]
        return num_tokens * self.seconds(num_sequences, num_sequences)[0] > saved_seconds * num_sequences

    def is_known_at(self, num_rows: int) -> bool:
        """Returns whether the duration of steps of about this many rows is known from recent steps."""
        place, share = self._place(num_rows)
        return self._evidence(place + round(share)) >= MIN_EVIDENCE

    def max_explored_rows(self) -> int | None:
        """Returns the most rows to try in a step: one knot beyond the largest seen recently; None before any step.

        The duration of larger steps is unknown, because a line that is assumed to continue straight shows no cliff.
        """
        last = len(self._knots) - 1
        for place in range(last, -1, -1):
            if self._evidence(place) >= SEEN_EVIDENCE:
                return self._knots[min(place + 1, last)]
        return None

    def unknown_near(self, num_rows: int) -> tuple[int | None, int | None]:
        """Returns the next smaller and the next larger knot, or None in place of one whose duration is known."""
        place, share = self._place(num_rows)
        above = place + 1 + (share >= 1.0)
        is_above_unknown = above < len(self._knots) and self._evidence(above) < MIN_EVIDENCE
        below = place - (share <= 0.0)
        is_below_unknown = below >= 0 and self._evidence(below) < MIN_EVIDENCE
        return (
            self._knots[below] if is_below_unknown else None,
            self._knots[above] if is_above_unknown else None,
        )

    def _evidence(self, place: int) -> float:
        """Returns how many steps of about as many rows as the knot were observed, with older ones discounted."""
        return float(self._squares[place, place]) / self._scale

    def _expected(self, num_sequences: int, place: int, share: float, *, is_ahead: bool) -> float:
        """Returns the expected duration of a step whose number of rows lies between a knot and the next one."""
        found = self._fitted()
        seconds = found[place] + share * (found[place + 1] - found[place]) + found[-2] * num_sequences
        seconds += found[-1] if is_ahead else 0.0
        return max(seconds, MIN_SHARE * self._mean_seconds)

    def _fitted(self) -> list[float]:
        if self._found is None:
            self._found = self._solve().tolist()
            self._curves.clear()
            self._num_unfitted = 0
        return self._found

    def _solve(self) -> Seconds:
        """Returns [num_knots + 2]: the seconds of a step at each knot, then the additional seconds per sequence and of
        a step that is launched ahead.
        """
        scale = self._mean_seconds  # the equations are solved in units of the mean duration
        assumed = max(1.0, self._noise / MIN_NOISE) ** 2  # relative weight of the assumptions
        squares = self._squares / self._scale + assumed * self._assumptions
        products = self._products / (scale * self._scale)
        # Between the two knots around the mean number of rows, the prior's slope is assumed as well.
        place, _ = self._place(self._mean_rows)
        width = self._knots[place + 1] - self._knots[place]
        weight = assumed * SLOPE_WEIGHT * (self._mean_rows / width) ** 2
        rise = weight * width / (self._mean_rows + PRIOR_BASE_ROWS)
        for one, sign in ((place, -1.0), (place + 1, 1.0)):
            products[one] += sign * rise
            squares[one, one] += weight
            squares[one, 2 * place + 1 - one] -= weight
        products[-1] -= assumed * AHEAD_WEIGHT * AHEAD_SHARE
        found: Seconds = scale * np.asarray(np.linalg.solve(squares, products), dtype=np.float64)
        found[:-2] = np.maximum.accumulate(found[:-2])
        return found

    def _padded(self, num_rows: float) -> float:
        place = bisect_left(self._buckets, num_rows)
        return self._buckets[place] if place < len(self._buckets) else num_rows

    def _place(self, num_rows: float) -> tuple[int, float]:
        """Returns the index of the knot at or before `num_rows`, and the fraction of the way to the next one."""
        num_rows = self._padded(num_rows)
        knots = self._knots
        place = min(max(bisect_right(knots, num_rows) - 1, 0), len(knots) - 2)
        share = (num_rows - knots[place]) / (knots[place + 1] - knots[place])
        return place, min(max(share, 0.0), 1.0)


def _assumptions(knots: Sequence[int]) -> Seconds:
    """Returns [num_knots + 2, num_knots + 2]: what the assumptions about bends, sequences and launches ahead add to the
    squares.

    A bend is weighted by the number of rows at its knot. So a curve of the same shape, relative to the step's duration,
    has the same weight at any number of rows.
    """
    size = len(knots) + 2
    squares = np.zeros((size, size))
    before = np.zeros(size)
    for place, width in enumerate(np.diff(knots)):
        rise = np.zeros(size)  # the segment's slope as a combination of the unknowns
        rise[place], rise[place + 1] = -1.0 / width, 1.0 / width
        if place:
            bend = knots[place] * (rise - before)
            squares += BEND_WEIGHT * np.outer(bend, bend)
        before = rise
    squares[-2, -2], squares[-1, -1] = SEQUENCE_WEIGHT, AHEAD_WEIGHT
    return squares
