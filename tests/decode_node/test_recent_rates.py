from __future__ import annotations

from decode_node.metrics import RecentRates
from outrider.session import SpeculationCounts
from tests.support.fake_clock import FakeClock


def test_rates_are_those_of_the_last_ten_seconds():
    clock = FakeClock(100.0)
    rates = RecentRates(clock)
    assert rates.look_ahead_hit_rate() == rates.mean_acceptance_length() == rates.kv_bytes.per_second() == 0.0
    rates.add_speculation(SpeculationCounts(num_spec_steps=1, num_accepted_draft_tokens=3, num_wanting_steps=6))
    rates.kv_bytes.add(5_000)
    clock.advance(6.0)
    rates.add_speculation(
        SpeculationCounts(num_spec_steps=3, num_accepted_draft_tokens=2, num_wanting_steps=4, num_hit_steps=3)
    )
    rates.kv_bytes.add(7_000)
    assert (rates.look_ahead_hit_rate(), rates.kv_bytes.per_second()) == (0.3, 1_200.0)
    assert rates.mean_acceptance_length() == 1 + 5 / 4
    clock.advance(6.0)
    assert (rates.look_ahead_hit_rate(), rates.kv_bytes.per_second()) == (0.75, 700.0)
    assert rates.mean_acceptance_length() == 1 + 2 / 3
    clock.advance(6.0)
    assert rates.look_ahead_hit_rate() == rates.mean_acceptance_length() == rates.kv_bytes.per_second() == 0.0
