from __future__ import annotations

import random

import pytest

from decode_node.metrics import RecentRates
from outrider.service.telemetry.recent_sum import RATE_WINDOW_SECONDS
from outrider.session import SpeculationCounts
from tests.support.fake_clock import FakeClock


def test_rates_are_those_of_the_last_ten_seconds():
    chance = random.Random(1)
    now, steps = 0.0, []
    rates = RecentRates(clock=lambda: now)
    assert rates.tokens.per_second() == rates.mean_acceptance_length() == 0.0
    for _ in range(300):
        now += chance.choice([0.01, 0.2, 0.2, 3.0])
        num_tokens = chance.randrange(9)
        counts = SpeculationCounts(num_spec_steps=chance.randrange(2), num_accepted_draft_tokens=chance.randrange(4))
        rates.tokens.add(num_tokens)
        rates.add_speculation(counts)
        steps.append((now, num_tokens, counts))
        now += chance.choice([0.0, 1.0])
        recent = [(num_tokens, counts) for at, num_tokens, counts in steps if at >= now - RATE_WINDOW_SECONDS]
        num_drafts = sum(counts.num_spec_steps for _, counts in recent)
        accepted = sum(counts.num_accepted_draft_tokens for _, counts in recent)
        expected = sum(num_tokens for num_tokens, _ in recent) / RATE_WINDOW_SECONDS
        assert rates.tokens.per_second() == pytest.approx(expected)
        assert rates.mean_acceptance_length() == pytest.approx(1 + accepted / num_drafts if num_drafts else 0.0)
    now += 2 * RATE_WINDOW_SECONDS
    assert rates.tokens.per_second() == rates.mean_acceptance_length() == 0.0


def test_the_hit_rate_and_kv_bytes_are_of_the_last_ten_seconds():
    clock = FakeClock(100.0)
    rates = RecentRates(clock)
    assert rates.look_ahead_hit_rate() == rates.kv_bytes.per_second() == 0.0
    rates.add_speculation(SpeculationCounts(num_wanting_steps=6, num_hit_steps=0))
    rates.kv_bytes.add(5_000)
    clock.advance(6.0)
    rates.add_speculation(SpeculationCounts(num_wanting_steps=4, num_hit_steps=3))
    rates.kv_bytes.add(7_000)
    assert (rates.look_ahead_hit_rate(), rates.kv_bytes.per_second()) == (0.3, 1_200.0)
    clock.advance(6.0)
    assert (rates.look_ahead_hit_rate(), rates.kv_bytes.per_second()) == (0.75, 700.0)
    clock.advance(6.0)
    assert rates.look_ahead_hit_rate() == rates.kv_bytes.per_second() == 0.0
