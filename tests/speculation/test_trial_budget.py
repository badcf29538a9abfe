from __future__ import annotations

from outrider.speculation.trial_budget import MAX_DEBT, TrialBudget


def test_a_trial_overdraws_by_a_bounded_time_however_long_there_was_none():
    budget = TrialBudget(0.005)
    for _ in range(30_000):
        budget.earn(0.02)
    assert not budget.allows_debt(0.02 * (MAX_DEBT + 1))
    assert budget.allows_debt(0.02 * MAX_DEBT)
    assert not budget.allows_debt(0.02), "the limit is used up"
