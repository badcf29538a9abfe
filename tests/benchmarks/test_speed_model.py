from __future__ import annotations

import pytest

from benchmarks.three_lines.speed_model import SpeedModel, acceptance_of, expected_tokens

MODEL = SpeedModel(acceptance=0.8, num_draft_tokens=8, step_seconds=0.030, token_seconds=0.002)


def test_tokens_of_a_verification_are_the_sum_of_what_each_adds():
    assert MODEL.tokens_per_verification == pytest.approx(sum(0.8**index for index in range(9)))
    certain = SpeedModel(acceptance=1.0, num_draft_tokens=8, step_seconds=1.0, token_seconds=0.0)
    assert certain.tokens_per_verification == 9.0


def test_a_drafter_beside_the_target_takes_time_that_one_ahead_does_not():
    assert MODEL.colocated() == pytest.approx(MODEL.tokens_per_verification * 30 / 46)
    assert MODEL.ahead(1.0) == pytest.approx(MODEL.tokens_per_verification)
    assert MODEL.ahead(0.0) == 1.0


def test_a_drafter_that_is_slower_than_the_target_sets_the_pace():
    slow = SpeedModel(acceptance=0.8, num_draft_tokens=4, step_seconds=0.010, token_seconds=0.004)
    assert slow.ahead(1.0) == pytest.approx(slow.tokens_per_verification / 2)


def test_acceptance_is_found_from_what_it_gives():
    for acceptance in (0.1, 0.5, 0.8, 0.95):
        assert acceptance_of(expected_tokens(acceptance, 5), 5) == pytest.approx(acceptance, abs=1e-6)


def test_rows_and_steps_without_a_draft_cost_what_they_do():
    model = SpeedModel(acceptance=0.8, num_draft_tokens=4, step_seconds=0.02, token_seconds=0.004, verify_seconds=0.03)
    assert model.colocated() == pytest.approx(expected_tokens(0.8, 4) * 0.02 / 0.046)
    assert model.colocated(0.0) == model.ahead(0.0) == pytest.approx(1.0)
    assert model.ahead(1.0) == pytest.approx(expected_tokens(0.8, 4) * 0.02 / 0.03)
