from __future__ import annotations

import pytest

from outrider.bench.speed_model import SpeedModel

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
