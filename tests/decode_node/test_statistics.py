from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from decode_node.statistics import RecentRates
from outrider.service.telemetry.recent_sum import RATE_WINDOW_SECONDS
from outrider.session import SpeculationCounts
from tests.support.fake_clock import FakeClock


def test_rates_are_those_of_the_last_ten_seconds():
    chance = random.Random(1)
    now, steps = 0.0, []
    rates = RecentRates(clock=lambda: now)
    assert rates.tokens_per_second() == rates.mean_acceptance_length() == 0.0
    for _ in range(300):
        now += chance.choice([0.01, 0.2, 0.2, 3.0])
        stats = SimpleNamespace(
            num_generated_tokens=chance.randrange(9),
            num_drafts=chance.randrange(2),
            num_accepted_draft_tokens=chance.randrange(4),
        )
        rates.add(stats)
        steps.append((now, stats))
        now += chance.choice([0.0, 1.0])
        recent = [stats for at, stats in steps if at >= now - RATE_WINDOW_SECONDS]
        num_drafts = sum(stats.num_drafts for stats in recent)
        accepted = sum(stats.num_accepted_draft_tokens for stats in recent)
        expected = sum(stats.num_generated_tokens for stats in recent) / RATE_WINDOW_SECONDS
        assert rates.tokens_per_second() == pytest.approx(expected)
        assert rates.mean_acceptance_length() == pytest.approx(1 + accepted / num_drafts if num_drafts else 0.0)
    now += 2 * RATE_WINDOW_SECONDS
    assert rates.tokens_per_second() == rates.mean_acceptance_length() == 0.0


def test_the_hit_rate_and_kv_bytes_are_of_the_last_ten_seconds():
    clock = FakeClock(100.0)
    rates = RecentRates(clock)
    assert rates.look_ahead_hit_rate() == rates.kv_bytes_per_second() == 0.0
    rates.add_speculation(SpeculationCounts(num_wanting_steps=6, num_hit_steps=0))
    rates.add_kv_bytes(5_000)
    clock.advance(6.0)
    rates.add_speculation(SpeculationCounts(num_wanting_steps=4, num_hit_steps=3))
    rates.add_kv_bytes(7_000)
    assert (rates.look_ahead_hit_rate(), rates.kv_bytes_per_second()) == (0.3, 1_200.0)
    clock.advance(6.0)
    assert (rates.look_ahead_hit_rate(), rates.kv_bytes_per_second()) == (0.75, 700.0)
    clock.advance(6.0)
    assert rates.look_ahead_hit_rate() == rates.kv_bytes_per_second() == 0.0
