from __future__ import annotations

import random

import pytest

from outrider.speculation.step_cost import StepCostModel


def observed(steps) -> StepCostModel:
    cost = StepCostModel()
    for num_rows, step_seconds in steps:
        cost.observe(num_rows=num_rows, step_seconds=step_seconds)
    return cost


def test_base_and_slope_are_found_from_noisy_steps():
    noise = random.Random(1)
    rows = [noise.choice([1, 2, 4, 6]) for _ in range(300)]
    cost = observed([(n, (0.030 + 0.003 * n) * noise.uniform(0.95, 1.05)) for n in rows])
    assert cost.seconds_per_row == pytest.approx(0.003, rel=0.25)
    assert cost.seconds(1) == pytest.approx(0.033, rel=0.05)


def test_steps_of_one_size_only_leave_the_prior_in_charge():
    cost = observed([(4, 0.040)] * 500)
    assert cost.seconds(4) == pytest.approx(0.040)
    assert cost.seconds_per_row == pytest.approx(0.040 / (4 + 15), rel=0.01)


def test_time_never_falls_with_rows():
    cost = observed([(1, 0.050), (8, 0.010)] * 20)
    assert cost.seconds_per_row == 0.0
    assert cost.seconds(64) >= cost.seconds(1)


def test_the_fixed_part_is_never_negative():
    cost = observed([(1, 0.001), (10, 0.1)] * 50)
    assert cost.seconds(0) >= 0.0


def test_a_machine_that_changes_is_learnt_anew():
    cost = observed([(1 + i % 4, 0.010) for i in range(200)] + [(1 + i % 4, 0.020) for i in range(400)])
    assert cost.seconds(2) == pytest.approx(0.020, rel=0.02)


def test_one_stall_hardly_counts():
    steps = [(1 + i % 4, 0.010 + 0.001 * (i % 4)) for i in range(200)]
    cost = observed([*steps, (1, 5.0)])
    assert cost.seconds(1) < 0.012
    assert cost.seconds_per_row < 0.0012


def test_nothing_is_known_before_the_first_step():
    cost = StepCostModel()
    assert not cost.is_known
    assert cost.seconds(3) == 0.0
    assert cost.seconds_per_row == 0.0
