from __future__ import annotations

import random

import pytest

from outrider.speculation.ask_cost import FIRST_CALLS, CallCost, Candidate, choose_calls


def observed(seconds, asked, *, num_calls=200, noise=0.1):
    """Returns the cost learnt from `num_calls` calls, which are drawn from `asked` and take `seconds`.

    `asked` has tuples (depth, sequences, unread tokens of each). Every sequence is asked for `depth` tokens.
    """
    chosen = random.Random(1)
    cost = CallCost()
    for _ in range(num_calls):
        depth, num_sequences, num_unread = chosen.choice(asked)
        cost.observe(
            seconds(depth, num_sequences * depth, num_sequences * num_unread) * chosen.uniform(1 - noise, 1 + noise),
            depth=depth,
            num_tokens=num_sequences * depth,
            num_unread=num_sequences * num_unread,
        )
    return cost


def one_by_one(depth, num_tokens, num_unread):
    return 0.002 * depth + 0.0001 * num_tokens + 0.0001 * num_unread


def test_a_forward_for_each_token_is_found():
    cost = observed(one_by_one, [(1, 1, 2), (2, 1, 1), (3, 4, 2), (1, 16, 2), (2, 8, 5)])
    for asked in ((1, 1, 2), (3, 3, 1), (2, 16, 20), (1, 32, 40)):
        assert cost.seconds(*asked) == pytest.approx(one_by_one(*asked), rel=0.2)


def test_a_parallel_heads_further_tokens_are_found_to_cost_next_to_nothing():
    cost = observed(lambda _depth, _tokens, _missed: 0.004, [(1, 1, 2), (3, 1, 2), (5, 1, 2)])
    assert cost.seconds(1, 1, 2) == pytest.approx(0.004, rel=0.15)
    assert cost.seconds(5, 5, 2) < 1.5 * cost.seconds(1, 1, 2)


def test_a_batch_that_was_not_seen_yet_is_taken_to_cost_little_more_than_one_sequence():
    cost = observed(one_by_one, [(1, 1, 2), (2, 1, 1)])
    assert cost.seconds(1, 1, 2) < cost.seconds(1, 16, 32) < 5 * cost.seconds(1, 1, 2)


def call(cost, seconds):
    cost.observe(seconds, depth=1, num_tokens=1, num_unread=1)


@pytest.mark.parametrize("slow", [{0}, {0, 1, 2, 3}, {0, 20}, {FIRST_CALLS}])
def test_the_first_calls_of_a_process_and_single_stalls_do_not_count(slow):
    cost = CallCost()
    for place in range(FIRST_CALLS + 30):
        call(cost, 0.07 if place in slow else 0.002)
    assert cost.seconds(1, 1, 1) == pytest.approx(0.002, rel=0.1)


def test_where_all_first_calls_were_slow_one_quick_call_puts_it_right():
    cost = CallCost()
    for _ in range(FIRST_CALLS + 3):
        call(cost, 0.07)
    call(cost, 0.002)
    assert cost.seconds(1, 1, 1) == pytest.approx(0.002, rel=0.1)


def test_where_every_call_has_become_slower_that_is_learnt():
    cost = observed(lambda *_: 0.002, [(1, 1, 1)], num_calls=50)
    for _ in range(100):
        call(cost, 0.02)
    assert cost.seconds(1, 1, 1) > 0.015


def test_a_clock_that_stands_still_says_nothing():
    cost = CallCost()
    for _ in range(20):
        call(cost, 0.0)
    assert cost.is_cheap(0.01)
    for _ in range(20):
        call(cost, 0.002)
    call(cost, 0.0)
    assert cost.seconds(1, 1, 1) == pytest.approx(0.002)


def test_a_lookup_is_cheap_and_a_head_is_not():
    assert CallCost().is_cheap(0.03)
    lookup = observed(lambda _depth, num_tokens, _missed: 2e-6 * num_tokens, [(5, 16, 1)])
    assert lookup.is_cheap(0.03)
    assert not lookup.is_cheap(0.003), "in so short a step it counts"
    assert not observed(one_by_one, [(1, 16, 2)]).is_cheap(0.03)


def test_no_share_of_the_time_is_negative():
    cost = observed(lambda depth, _tokens, _missed: 0.006 - 0.001 * depth, [(1, 1, 1), (2, 1, 1), (3, 1, 1)])
    nothing = cost.seconds(0, 0, 0)
    assert nothing >= 0.0
    assert min(cost.seconds(*asked) for asked in ((1, 0, 0), (0, 1, 0), (0, 0, 1))) >= nothing


def asked(candidates, *, token_rate=100.0, row_price=0.1):
    """Chooses with forwards of 2 ms, each of which costs one fifth of a token."""
    cost = observed(lambda depth, *_: 0.002 * depth, [(1, 1, 1), (2, 1, 1), (4, 1, 1)], noise=0.0)
    return choose_calls(candidates, cost, token_rate=token_rate, row_price=row_price)


def test_a_proposer_is_asked_where_that_gains_more_than_it_takes():
    good, poor = (0.8, 0.6, 0.2), (0.2, 0.05, 0.01)
    assert asked([Candidate(1, good, 0.0, 1)]) == {1: 2}
    assert asked([Candidate(1, poor, 0.0, 1)]) == {}
    assert asked([Candidate(1, good, 0.0, 1), Candidate(2, poor, 0.0, 1)]) == {1: 2, 2: 1}, "the forward is made anyway"
    assert asked([Candidate(1, good, 1.1, 1)]) == {}, "what is at hand is as good"
    assert asked([Candidate(1, good, 0.0, 1)], token_rate=1000.0) == {}, "many sequences wait for it"
    assert asked([Candidate(1, good, 0.0, 1)], row_price=0.75) == {}, "rows are dear"
    assert asked([Candidate(1, good, 0.0, 50_000)]) == {}, "it would have to read so much first"
    assert asked([Candidate(1, (), 0.0, 1)]) == {}
    assert asked([]) == {}


def test_several_sequences_share_a_forward_that_is_worth_it_for_none():
    assert asked([Candidate(1, (0.25,), 0.0, 1)]) == {}
    assert asked([Candidate(key, (0.25,), 0.0, 1) for key in range(4)]) == dict.fromkeys(range(4), 1)
