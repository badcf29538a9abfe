from __future__ import annotations

import random

import pytest

from outrider.service.telemetry.recent_sum import RATE_WINDOW_SECONDS
from prefill_node.statistics import PromptTokens
from tests.support.fake_clock import FakeClock


def test_saturation_is_the_share_of_ten_seconds_in_which_tokens_were_outstanding():
    clock = FakeClock(50.0)
    tokens = PromptTokens(clock)
    assert tokens.saturation() == 0.0
    tokens.set_outstanding(1, 30)
    clock.advance(1.0)
    tokens.set_outstanding(2, 10)
    tokens.set_outstanding(1, 0)
    assert tokens.num_outstanding == 10
    clock.advance(1.0)
    assert tokens.saturation() == pytest.approx(0.2)  # of a time that has not ended
    tokens.set_outstanding(2, 0)
    tokens.set_outstanding(2, 0)
    clock.advance(3.0)
    assert tokens.saturation() == pytest.approx(0.2)
    clock.advance(6.0)
    assert tokens.saturation() == pytest.approx(0.1)  # half of that time is longer ago
    clock.advance(1.0)
    assert tokens.saturation() == 0.0
    tokens.set_outstanding(3, 1)
    clock.advance(2 * RATE_WINDOW_SECONDS)
    assert tokens.saturation() == 1.0


def test_saturation_agrees_with_a_count_of_moments():
    chance, clock = random.Random(3), FakeClock()
    tokens = PromptTokens(clock)
    moments = []  # whether busy, of each tenth of a second
    for _ in range(400):
        num_outstanding = chance.choice([0, 0, 5])
        tokens.set_outstanding(7, num_outstanding)
        for _ in range(chance.randrange(12)):
            clock.advance(0.1)
            moments.append(num_outstanding > 0)
        recent = moments[-round(RATE_WINDOW_SECONDS * 10) :]
        assert tokens.saturation() == pytest.approx(sum(recent) / RATE_WINDOW_SECONDS / 10, abs=1e-6)
    assert len(tokens._busy) <= RATE_WINDOW_SECONDS * 10  # what is over is forgotten


def test_computed_tokens_are_those_of_the_last_ten_seconds():
    clock = FakeClock()
    tokens = PromptTokens(clock)
    tokens.add_computed(100)
    clock.advance(8.0)
    tokens.add_computed(50)
    assert tokens.tokens_per_second() == 15.0
    clock.advance(8.0)
    assert tokens.tokens_per_second() == 5.0
