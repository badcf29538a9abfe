"""How long a proposer takes as a function of what it is asked for, learnt while serving."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IGNORED_CALLS = 2
"""The first ones of a process take longer than any later one."""

FORGETTING = 0.98

CHEAP_SECONDS = 50e-6
"""Of a sequence. To decide whether to ask for so little takes as long."""

CHEAP_SHARE = 0.01
"""Of a step: a call that takes more is not cheap, for however many sequences it is."""

FIT_SECONDS = 100e-6
"""Shorter calls are not looked into."""

SMOOTHING = 0.1

TOKEN_SHARE = 0.1
MISSED_SHARE = 0.03
"""Until calls say otherwise: what a further sequence's draft token, and a token to be read, take beside a forward."""

ASSUMPTION_WEIGHT = 0.05
"""How firmly, against calls."""

FIT_CALLS = 8
"""The fit is made anew after so many calls, and after a surprise."""

SURPRISE = 0.25
"""A call is one that differs from the expected time by more than this share."""

OUTLIER_FACTOR = 2.0
MAX_OUTLIERS = 3
"""As for steps: see `step_cost`."""

Seconds = npt.NDArray[np.float64]


class AskCost:
    """T(depth, tokens, missed) = a call + depth forwards + draft tokens of all sequences + tokens that were missed.

    A head drafts one token of every sequence in a forward; a parallel one drafts all in one, so that its depth comes to
    cost nothing. Non-negative least squares with exponential forgetting. Not thread-safe.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._call_seconds = 0.0  # running mean
        self._sequence_seconds = 0.0  # the same by sequence
        self._squares = np.zeros((4, 4))
        self._products = np.zeros(4)
        self._found: tuple[float, float, float, float] | None = None
        self._num_outliers = 0

    @property
    def is_known(self) -> bool:
        return self._num_calls > IGNORED_CALLS

    def is_cheap(self, step_seconds: float) -> bool:
        """Whether to ask is cheaper than to think about it. So is what was never asked, until it was.

        `step_seconds`: of a plain step.
        """
        return self._sequence_seconds < CHEAP_SECONDS and self._call_seconds <= CHEAP_SHARE * step_seconds

    @property
    def sequence_seconds(self) -> float:
        """Of a call, by sequence, on average: the order in which sources are asked. 0: unknown."""
        return self._sequence_seconds

    def observe(self, seconds: float, *, depth: int, num_sequences: int, num_tokens: int, num_missed: int) -> None:
        """Learns from one draft of at least one sequence, in as many calls as it took."""
        self._num_calls += 1
        if seconds <= 0.0 or not self.is_known:
            return
        each = seconds / num_sequences
        mean = self._sequence_seconds or each
        self._sequence_seconds = mean + SMOOTHING * (min(each, OUTLIER_FACTOR * mean) - mean)
        mean = self._call_seconds or seconds
        self._call_seconds = mean + SMOOTHING * (min(seconds, OUTLIER_FACTOR * mean) - mean)
        if seconds < FIT_SECONDS:
            return
        is_surprise = True
        if self._squares[0, 0]:
            expected = self.seconds(depth, num_tokens, num_missed)
            is_surprise = abs(seconds - expected) > SURPRISE * expected
            self._num_outliers = self._num_outliers + 1 if seconds > OUTLIER_FACTOR * expected else 0
            if self._num_outliers <= MAX_OUTLIERS:
                seconds = min(seconds, OUTLIER_FACTOR * expected)
        asked = np.array([1.0, depth, num_tokens, num_missed])
        self._squares = FORGETTING * self._squares + np.outer(asked, asked)
        self._products = FORGETTING * self._products + seconds * asked
        if is_surprise or self._num_calls % FIT_CALLS == 0:
            self._found = None

    def seconds(self, depth: int, num_tokens: int, num_missed: float) -> float:
        """Of a draft at most `depth` tokens long, `num_tokens` over all sequences, which read so many tokens first."""
        call, forward, token, missed = self._fitted()
        return call + depth * forward + num_tokens * token + num_missed * missed

    def token_seconds(self) -> float:
        """Of a draft token more, in a forward that there is anyway."""
        return self._fitted()[2]

    def missed_seconds(self) -> float:
        """Of a token that the proposer has not read yet."""
        return self._fitted()[3]

    def _fitted(self) -> tuple[float, float, float, float]:
        """Seconds of a call, a forward, a draft token and a missed one."""
        if self._found is None:
            call, forward, token, missed = self._solve().tolist()
            self._found = call, forward, token, missed
        return self._found

    def _solve(self) -> Seconds:
        """[4]"""
        squares = self._squares.copy()
        # What a call takes beside its forwards, and the shares of a forward that its rows are taken for.
        for difference in ((1.0, 0.0, 0.0, 0.0), (0.0, -TOKEN_SHARE, 1.0, 0.0), (0.0, -MISSED_SHARE, 0.0, 1.0)):
            squares += ASSUMPTION_WEIGHT * np.outer(difference, difference)
        kept = [0, 1, 2, 3]
        found = np.zeros(4)
        while kept:
            solved = np.linalg.solve(squares[np.ix_(kept, kept)] + 1e-9 * np.eye(len(kept)), self._products[kept])
            if (solved >= 0.0).all():
                found[kept] = solved
                break
            del kept[int(solved.argmin())]
        return found
