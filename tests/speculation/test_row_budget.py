"""How wide a forward of the look-ahead may be."""

from __future__ import annotations

import random

import pytest

from outrider.speculation.row_budget import MAX_ROWS, RowBudget


def row_budget() -> RowBudget:
    return RowBudget(max_prefix_rows=512, prefix_seconds=0.1)


def rows_after(seconds_of, *, num_forwards=400, share=1.0, noise=0.0) -> int:
    budget, chosen = row_budget(), random.Random(1)
    for _ in range(num_forwards):
        num_rows = budget.num_more(0, share=share)
        budget.observe(num_rows, num_rows, seconds_of(num_rows) * (1.0 + noise * chosen.expovariate(1.0)))
        budget.observe(1, 1, seconds_of(1) * (1.0 + noise * chosen.expovariate(1.0)))
    return budget.num_more(0, share=share)


def test_a_device_that_does_not_mind_gets_as_many_as_there_are():
    assert rows_after(lambda _: 0.002) == MAX_ROWS


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_where_rows_cost_time_a_forward_takes_about_twice_as_long_as_the_smallest(noise):
    assert rows_after(lambda num_rows: 0.010 + 0.001 * (num_rows - 1), noise=noise) in (7, 15)


def test_a_size_that_was_slow_once_is_tried_again():
    budget = row_budget()
    for _ in range(10):
        budget.observe(1, 1, 0.001)
        budget.observe(2, 2, 0.1)
    assert budget.num_more(0, share=1.0) == 1
    for _ in range(2000):
        budget.observe(1, 1, 0.001)
    assert budget.num_more(0, share=1.0) > 1


def test_beside_rows_that_somebody_waits_for_there_is_room_where_it_costs_little():
    budget = row_budget()
    for num_rows in (20, 40):
        budget.observe(num_rows, num_rows, 0.001 * num_rows)
    assert budget.num_more(20, share=0.25) == 11
    assert budget.num_more(31, share=0.25) == 0
