from __future__ import annotations

import random

import pytest

from outrider.speculation.ask_cost import IGNORED_CALLS, AskCost


def observed(seconds, asked, *, num_calls=200, noise=0.1):
    """`asked`: possible (depth, sequences, missed tokens of each); every sequence is asked for `depth` tokens."""
    chosen = random.Random(1)
    cost = AskCost()
    for _ in range(num_calls):
        depth, num_sequences, num_missed = chosen.choice(asked)
        cost.observe(
            seconds(depth, num_sequences * depth, num_sequences * num_missed) * chosen.uniform(1 - noise, 1 + noise),
            depth=depth,
            num_sequences=num_sequences,
            num_tokens=num_sequences * depth,
            num_missed=num_sequences * num_missed,
        )
    return cost


def one_by_one(depth, num_tokens, num_missed):
    return 0.002 * depth + 0.0001 * num_tokens + 0.0001 * num_missed


def test_a_forward_for_each_token_is_found():
    cost = observed(one_by_one, [(1, 1, 2), (2, 1, 1), (3, 4, 2), (1, 16, 2), (2, 8, 5)])
    for asked in ((1, 1, 2), (3, 3, 1), (2, 16, 20), (1, 32, 40)):
        assert cost.seconds(*asked) == pytest.approx(one_by_one(*asked), rel=0.15)


def test_a_parallel_heads_further_tokens_are_found_to_cost_next_to_nothing():
    cost = observed(lambda _depth, _tokens, _missed: 0.004, [(1, 1, 2), (3, 1, 2), (5, 1, 2)])
    assert cost.seconds(1, 1, 2) == pytest.approx(0.004, rel=0.1)
    assert cost.seconds(5, 5, 2) == pytest.approx(0.004, rel=0.1)


def test_a_batch_that_was_not_seen_yet_is_taken_to_cost_little_more_than_one_sequence():
    cost = observed(one_by_one, [(1, 1, 2), (2, 1, 1)])
    assert cost.seconds(1, 1, 2) < cost.seconds(1, 16, 32) < 5 * cost.seconds(1, 1, 2)


def test_the_first_calls_of_a_process_and_single_stalls_do_not_count():
    cost = AskCost()
    for call in range(IGNORED_CALLS + 30):
        is_slow = call < IGNORED_CALLS or call == 20
        cost.observe(1.0 if is_slow else 0.002, depth=1, num_sequences=1, num_tokens=1, num_missed=1)
    assert cost.seconds(1, 1, 1) == pytest.approx(0.002, rel=0.1)


def test_where_every_call_has_become_slower_that_is_learnt():
    cost = observed(lambda *_: 0.002, [(1, 1, 1)], num_calls=50)
    for _ in range(100):
        cost.observe(0.02, depth=1, num_sequences=1, num_tokens=1, num_missed=1)
    assert cost.seconds(1, 1, 1) > 0.015


def test_a_lookup_is_cheap_and_a_head_is_not():
    assert AskCost().is_cheap(0.03)
    lookup = observed(lambda _depth, num_tokens, _missed: 2e-6 * num_tokens, [(5, 16, 1)])
    assert lookup.is_cheap(0.03)
    assert not lookup.is_cheap(0.003), "in so short a step it counts"
    assert not observed(one_by_one, [(1, 16, 2)]).is_cheap(0.03)
    assert not observed(lambda *_: 0.001, [(1, 64, 2)]).is_cheap(0.01), "little by sequence, much of the step"


def test_no_share_of_the_time_is_negative():
    cost = observed(lambda depth, _tokens, _missed: 0.006 - 0.001 * depth, [(1, 1, 1), (2, 1, 1), (3, 1, 1)])
    assert cost.seconds(0, 0, 0) >= 0.0
    assert cost.token_seconds() >= 0.0
    assert cost.missed_seconds() >= 0.0
