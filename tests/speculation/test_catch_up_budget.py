from __future__ import annotations

from outrider.speculation.row_budget import FIRST_ROWS, LEAST_ROWS, CatchUpBudget


def test_rows_are_what_the_time_allows_by_what_they_have_cost():
    budget = CatchUpBudget(max_rows=512, seconds=0.1)
    assert budget.num_rows == FIRST_ROWS
    budget.observe(FIRST_ROWS, FIRST_ROWS * 0.002)
    assert budget.num_rows == 50
    for _ in range(60):
        budget.observe(50, 50 * 0.001)
    assert 95 <= budget.num_rows <= 100


def test_there_is_a_least_and_a_most():
    slow, quick = (CatchUpBudget(max_rows=512, seconds=0.1) for _ in range(2))
    slow.observe(64, 64.0)
    quick.observe(64, 0.0001)
    assert (slow.num_rows, quick.num_rows) == (LEAST_ROWS, 512)
    assert CatchUpBudget(max_rows=8, seconds=0.1).num_rows == 8


def test_few_rows_say_nothing():
    budget = CatchUpBudget(max_rows=512, seconds=0.1)
    budget.observe(LEAST_ROWS - 1, 30.0)
    assert budget.num_rows == FIRST_ROWS
