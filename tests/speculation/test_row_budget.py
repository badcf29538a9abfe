"""How many rows of prefixes and of the look-ahead a forward may have."""

from __future__ import annotations

import random

import pytest

from outrider.request import SamplingParams
from outrider.speculation.proposers.base import ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.row_budget import FIRST_ROWS, MAX_ROWS, MIN_PREFIX_ROWS, RowBudget
from tests.draft_node.simulated_pair import ScriptedForward
from tests.speculation.asking import start_of
from tests.support.fake_clock import FakeClock


def row_budget() -> RowBudget:
    return RowBudget(max_prefix_rows=512, prefix_seconds=0.1)


def rows_after(seconds_of, *, num_forwards=400, share=1.0, noise=0.0) -> int:
    budget, chosen = row_budget(), random.Random(1)
    for _ in range(num_forwards):
        num_rows = budget.num_more(0, share=share)
        budget.observe(num_rows, num_rows, seconds_of(num_rows) * (1.0 + noise * chosen.expovariate(1.0)))
        budget.observe(1, 1, seconds_of(1) * (1.0 + noise * chosen.expovariate(1.0)))
    return budget.num_more(0, share=share)


def test_a_device_that_does_not_mind_gets_as_many_as_there_are():
    assert rows_after(lambda _: 0.002) == MAX_ROWS


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_where_rows_cost_time_a_forward_takes_about_twice_as_long_as_the_smallest(noise):
    assert rows_after(lambda num_rows: 0.010 + 0.001 * (num_rows - 1), noise=noise) in (7, 15)


def test_a_size_that_was_slow_once_is_tried_again():
    budget = row_budget()
    for _ in range(10):
        budget.observe(1, 1, 0.001)
        budget.observe(2, 2, 0.1)
    assert budget.num_more(0, share=1.0) == 1
    for _ in range(2000):
        budget.observe(1, 1, 0.001)
    assert budget.num_more(0, share=1.0) > 1


def test_beside_rows_that_somebody_waits_for_there_is_room_where_it_costs_little():
    budget = row_budget()
    for num_rows in (20, 40):
        budget.observe(num_rows, num_rows, 0.001 * num_rows)
    assert budget.num_more(20, share=0.25) == 11
    assert budget.num_more(31, share=0.25) == 0


def test_rows_are_what_the_time_allows_by_what_they_have_cost():
    budget = row_budget()
    assert budget.num_prefix_rows == FIRST_ROWS
    budget.observe(FIRST_ROWS, 1, FIRST_ROWS * 0.002)
    assert budget.num_prefix_rows == 50
    for _ in range(60):
        budget.observe(50, 1, 50 * 0.001)
    assert 95 <= budget.num_prefix_rows <= 100


def test_there_is_a_least_and_a_most():
    slow, quick = (row_budget() for _ in range(2))
    slow.observe(64, 1, 64.0)
    quick.observe(64, 1, 0.0001)
    assert (slow.num_prefix_rows, quick.num_prefix_rows) == (MIN_PREFIX_ROWS, 512)
    assert RowBudget(max_prefix_rows=8, prefix_seconds=0.1).num_prefix_rows == 8


def test_few_rows_say_nothing():
    budget = row_budget()
    budget.observe(MIN_PREFIX_ROWS - 1, 1, 30.0)
    assert budget.num_prefix_rows == FIRST_ROWS


def test_what_rows_cost_is_learnt_beside_drafts_of_several_tokens():
    """A call may include several forwards then, so its duration may exceed one forward's, but is never shorter."""
    clock = FakeClock()
    forward = ScriptedForward(clock)
    forward.max_tokens = 8
    proposer = DraftModelProposer(forward, ProposerInfo(name="scripted"), clock=clock)
    start = start_of(SamplingParams(seed=1, max_tokens=999), prompt_length=9)
    long, short = [5] * 1000, [7]
    while len(short) < 20:
        short.append(7)
        proposer.propose([ProposalRequest(1, long, 0, start), ProposalRequest(2, short, 4, start)])
    assert max(num_rows for _, num_rows in forward.calls) > 2 * FIRST_ROWS
