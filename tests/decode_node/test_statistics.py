from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from decode_node.statistics import RATE_WINDOW_SECONDS, RecentRates


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
