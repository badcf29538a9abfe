from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from outrider.speculation.step_cost import StepCostModel


def observed(steps, *, num_sequences=1, **options) -> StepCostModel:
    cost = StepCostModel(**options)
    for num_rows, step_seconds in steps:
        cost.observe(num_sequences=num_sequences, num_rows=num_rows, step_seconds=step_seconds)
    return cost


def at(cost, num_rows, *, num_sequences=1):
    return cost.seconds(num_sequences, num_rows)[0]


def noisy(seconds, rows, *, num_steps=300, noise=0.05):
    chosen = random.Random(1)
    for _ in range(num_steps):
        num_rows = chosen.choice(rows)
        yield num_rows, seconds(num_rows) * chosen.uniform(1 - noise, 1 + noise)


def test_a_line_is_found_from_noisy_steps_and_goes_on():
    cost = observed(noisy(lambda rows: 0.030 + 0.003 * rows, [1, 2, 4, 6]))
    assert at(cost, 1) == pytest.approx(0.033, rel=0.05)
    assert at(cost, 6) == pytest.approx(0.048, rel=0.05)
    assert at(cost, 16) == pytest.approx(0.078, rel=0.15)


def test_rows_that_cost_nothing_until_a_cliff_are_found():
    cost = observed(noisy(lambda rows: 0.030 + 0.006 * max(0, rows - 8), [1, 2, 4, 6, 8, 9, 10, 12, 14]))
    assert at(cost, 6) < 1.1 * at(cost, 1)
    assert at(cost, 14) == pytest.approx(0.066, rel=0.1)


def test_stairs_of_a_device_with_graphs_are_found():
    buckets = [1 << power for power in range(8)]
    cost = observed(
        noisy(lambda rows: 0.020 if rows <= 16 else 0.030, [12, 15, 18, 20]), buckets=buckets, num_sequences=8
    )
    found = cost.seconds(8, 10, num_more=20)
    assert found[:7] == pytest.approx([0.020] * 7, rel=0.05)
    assert found[7:] == pytest.approx([0.030] * 14, rel=0.05)


def test_steps_of_one_size_only_leave_the_prior_in_charge():
    cost = observed([(4, 0.040)] * 500)
    assert at(cost, 4) == pytest.approx(0.040, rel=0.01)
    assert at(cost, 5) - at(cost, 4) == pytest.approx(0.040 / (4 + 15), rel=0.05)


def test_sequences_may_cost_something_beside_their_rows():
    cost = StepCostModel()
    chosen = random.Random(1)
    for _ in range(600):
        num_sequences, num_more = chosen.choice([1, 4, 8, 16]), chosen.choice([0, 8, 16])
        rows = num_sequences + num_more
        cost.observe(
            num_sequences=num_sequences, num_rows=rows, step_seconds=0.02 + 0.001 * rows + 0.002 * num_sequences
        )
    assert at(cost, 17, num_sequences=1) == pytest.approx(0.039, rel=0.05)
    assert at(cost, 16, num_sequences=16) == pytest.approx(0.068, rel=0.05)


@pytest.mark.parametrize("steps", [[(1, 0.050), (8, 0.010)] * 20, [(1, 0.001), (10, 0.1)] * 50])
def test_time_is_positive_and_never_falls_with_rows(steps):
    found = observed(steps).seconds(1, 0, num_more=40)
    assert min(found) > 0.0
    assert (np.diff(found) >= 0.0).all()


def test_a_machine_that_changes_is_learnt_anew():
    cost = observed([(1 + i % 4, 0.010) for i in range(200)] + [(1 + i % 4, 0.020) for i in range(400)])
    assert at(cost, 2) == pytest.approx(0.020, rel=0.02)


def test_a_machine_that_becomes_many_times_slower_is_noticed_soon():
    cost = observed([(1 + i % 4, 0.010) for i in range(300)] + [(4, 0.200)] * 20)
    assert at(cost, 4) > 0.030


def test_one_stall_hardly_counts():
    steps = [(1 + i % 4, 0.010 + 0.001 * (i % 4)) for i in range(200)]
    cost = observed([*steps, (1, 5.0)])
    assert at(cost, 1) < 0.0115
    assert at(cost, 4) - at(cost, 1) < 0.0036


def test_nothing_is_known_before_the_first_step_but_that_rows_cost_something():
    cost = StepCostModel()
    assert not cost.is_known
    assert (np.diff(cost.seconds(1, 1, num_more=5)) > 0.0).all()


def test_a_step_that_took_no_time_says_nothing():
    assert not observed([(1, 0.0)] * 10).is_known
    assert at(observed([(1, 0.0), (1, 0.03), (1, 0.0)]), 1) == pytest.approx(0.03)


def test_what_was_not_seen_for_long_is_told():
    cost = observed([(4, 0.03), (6, 0.03), (3, 0.03)] * 30)
    assert cost.unknown_near(4) == (None, None)
    assert cost.unknown_near(6) == (None, 8)
    assert cost.unknown_near(3) == (2, None)
    for _ in range(700):
        cost.observe(num_sequences=1, num_rows=4, step_seconds=0.03)
    assert cost.unknown_near(4) == (3, 6)


def test_steps_grow_by_a_knot_beyond_what_was_seen():
    assert StepCostModel().max_explored_rows() is None
    assert observed([(4, 0.03)]).max_explored_rows() == 6
    cost = observed([(4, 0.03), (24, 0.05)])
    assert cost.max_explored_rows() == 32
    for _ in range(300):
        cost.observe(num_sequences=1, num_rows=4, step_seconds=0.03)
    assert cost.max_explored_rows() == 6


@pytest.mark.parametrize(("saved", "worth"), [(0.3, 0.45), (0.0, 0.05)])
def test_waiting_for_drafts_is_weighed_against_what_a_launch_ahead_saves(saved, worth):
    """Steps of one sequence take a second, and only one step in 33 is not launched ahead."""
    cost = StepCostModel(buckets=[1, 2, 4, 8])
    assert cost.pays_to_wait(0.1, 1)
    assert not cost.pays_to_wait(0.0, 1)
    for step in range(660):
        is_ahead = step % 33 > 0
        cost.observe(num_sequences=1, num_rows=1, step_seconds=1.0 - saved * is_ahead, is_ahead=is_ahead)
    assert at(cost, 1) == pytest.approx(1.0, rel=0.05)
    assert cost.pays_to_wait(worth, 1)
    assert not cost.pays_to_wait(0.5 * saved, 1)


def test_a_device_that_became_slower_is_not_mistaken_for_a_lost_launch_ahead():
    cost = StepCostModel(buckets=[1, 2, 4, 8])
    for step in range(2000):
        is_ahead = step % 33 > 0
        cost.observe(num_sequences=1, num_rows=1, step_seconds=1.0 + step / 1000 - 0.2 * is_ahead, is_ahead=is_ahead)
    assert not cost.pays_to_wait(0.03, 1)
    assert cost.pays_to_wait(0.12, 1)


def test_long_stalls_do_not_outweigh_what_is_known_of_rows():
    model, rows = StepCostModel(), itertools.cycle((1, 1, 2, 3, 4, 6))
    for stall in [1.0] * 300 + [1000.0] * 5 + [1.0] * 120:
        num_rows = next(rows)
        model.observe(num_sequences=1, num_rows=num_rows, step_seconds=0.010 * num_rows * stall)
    one, *_, six = model.seconds(1, 1, num_more=5)
    assert six > 2.5 * one
