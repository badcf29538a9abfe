"""Limits the time of trials to a small fraction of the time of plain decoding."""

from __future__ import annotations

MAX_CREDIT = 0.2
"""Limit of the time that is saved for trials, in units of the duration of a step without drafts."""

DEBT_FACTOR, MAX_DEBT = 16.0, 256.0
"""A trial may overdraw the budget, i.e. leave a debt, up to a limit. Each step with full credit raises the limit by
`DEBT_FACTOR` times the time that the step earned, to at most `MAX_DEBT` times its duration. So a trial that costs less
comes in bounded time, and the next one comes when the debt is repaid.
"""


class TrialBudget:
    """Time that may be spent on trials, in seconds. Each step without drafts would have earned `share` of its duration.

    It begins with full credit. Not thread-safe.
    """

    __slots__ = ("_max_debt", "_share", "credit")

    def __init__(self, share: float) -> None:
        self._share = share
        self._max_debt = 0.0
        self.credit = float("inf")  # capped by the first step
        """Seconds left; negative after a trial that took longer."""

    def earn(self, plain_seconds: float) -> None:
        """Adds one step's share. `plain_seconds`: the measured duration of a step without drafts, or a part of it."""
        earned, max_credit = self._share * plain_seconds, MAX_CREDIT * plain_seconds
        self.credit += earned
        if self.credit >= max_credit:
            self.credit = max_credit
            self._max_debt = min(self._max_debt + DEBT_FACTOR * earned, MAX_DEBT * plain_seconds)

    def allows_debt(self, seconds: float) -> bool:
        """Returns whether a trial of this duration may overdraw the budget. If so, the limit of debts is used up."""
        is_allowed = seconds <= self.credit + self._max_debt
        if is_allowed:
            self._max_debt = 0.0
        return is_allowed
