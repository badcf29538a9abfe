"""Whether drafts are asked for, by the rates with and without them."""

from __future__ import annotations

import random

import pytest

from outrider.speculation.drafting_trial import DraftingTrial


def run(trial, num_steps, *, asking, plain=(1, 0.010), num_sequences=1, noise=0.1, seed=1):
    """(tokens, seconds) of a step when asking and when not. The share of the plain rate that came out."""
    chosen = random.Random(seed)
    tokens = seconds = 0.0
    for _ in range(num_steps):
        num_tokens, step_seconds = asking if trial.is_asking else plain
        tokens, seconds = tokens + num_tokens, seconds + step_seconds
        trial.observe(
            num_tokens=num_tokens * num_sequences,
            num_sequences=num_sequences,
            seconds=step_seconds * chosen.uniform(1 - noise, 1 + noise),
        )
    return (tokens / seconds) / (plain[0] / plain[1])


@pytest.mark.parametrize("asking", [(1, 0.012), (2, 0.030), (1, 0.0104), (3, 0.060)])
def test_a_drafter_that_does_not_pay_is_asked_no_longer(asking):
    trial = DraftingTrial()
    run(trial, 200, asking=asking)
    assert not trial.is_asking
    assert run(trial, 10_000, asking=asking) > 0.98


@pytest.mark.parametrize("asking", [(2, 0.012), (3, 0.020), (1.2, 0.010)])
def test_a_drafter_that_pays_goes_on_being_asked(asking):
    trial = DraftingTrial()
    run(trial, 200, asking=asking)
    assert trial.is_asking
    best = asking[0] / asking[1] * 0.010
    assert run(trial, 10_000, asking=asking) > 0.98 * best


def test_the_first_trial_of_a_drafter_that_costs_much_is_short():
    assert run(DraftingTrial(), 1000, asking=(1, 0.050)) > 0.97


def test_a_drafter_that_begins_to_pay_is_found():
    trial = DraftingTrial()
    run(trial, 400, asking=(1, 0.020))
    assert not trial.is_asking
    run(trial, 4000, asking=(3, 0.012))
    assert trial.is_asking


def test_a_machine_that_stalls_now_and_then_decides_nothing():
    trial = DraftingTrial()
    for number in range(3000):
        seconds = 1.0 if number % 200 == 30 else (0.016 if trial.is_asking else 0.010)
        trial.observe(num_tokens=2 if trial.is_asking else 1, num_sequences=1, seconds=seconds)
    assert trial.is_asking


def test_a_drafter_that_brings_no_token_is_not_asked_however_fast_the_machine_became():
    trial = DraftingTrial()
    num_asked = 0
    for _ in range(3000):
        num_asked += trial.is_asking
        trial.observe(num_tokens=1, num_sequences=1, seconds=0.008 if trial.is_asking else 0.010)
    assert 0 < num_asked < 200  # in trials


def test_batches_of_other_sizes_are_compared_by_what_they_cost():
    trial = DraftingTrial()
    for number in range(3000):
        num_sequences = 1 if trial.is_asking else 16  # a larger batch makes more tokens anyway
        seconds = 0.010 * (num_sequences + 15) / 16 * (1.6 if trial.is_asking else 1.0)
        num_tokens = num_sequences * (2 if trial.is_asking else 1)
        trial.observe(num_tokens=num_tokens, num_sequences=num_sequences, seconds=seconds)
        if number == 200:
            assert trial.is_asking


def test_steps_without_sequences_say_nothing():
    trial = DraftingTrial()
    for _ in range(1000):
        trial.observe(num_tokens=0, num_sequences=0, seconds=1.0)
    assert not trial.is_asking
