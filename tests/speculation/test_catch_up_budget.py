from __future__ import annotations

from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.row_budget import FIRST_ROWS, MIN_PREFIX_ROWS, RowBudget
from tests.draft_node.simulated_pair import ScriptedForward
from tests.support.fake_clock import FakeClock


def test_rows_are_what_the_time_allows_by_what_they_have_cost():
    budget = RowBudget(max_prefix_rows=512, prefix_seconds=0.1)
    assert budget.num_prefix_rows == FIRST_ROWS
    budget.observe(FIRST_ROWS, 1, FIRST_ROWS * 0.002)
    assert budget.num_prefix_rows == 50
    for _ in range(60):
        budget.observe(50, 1, 50 * 0.001)
    assert 95 <= budget.num_prefix_rows <= 100


def test_there_is_a_least_and_a_most():
    slow, quick = (RowBudget(max_prefix_rows=512, prefix_seconds=0.1) for _ in range(2))
    slow.observe(64, 1, 64.0)
    quick.observe(64, 1, 0.0001)
    assert (slow.num_prefix_rows, quick.num_prefix_rows) == (MIN_PREFIX_ROWS, 512)
    assert RowBudget(max_prefix_rows=8, prefix_seconds=0.1).num_prefix_rows == 8


def test_few_rows_say_nothing():
    budget = RowBudget(max_prefix_rows=512, prefix_seconds=0.1)
    budget.observe(MIN_PREFIX_ROWS - 1, 1, 30.0)
    assert budget.num_prefix_rows == FIRST_ROWS


def test_what_rows_cost_is_learnt_beside_drafts_of_several_tokens():
    """Such a call may be several forwards. Its time says at most too much."""
    clock = FakeClock()
    forward = ScriptedForward(clock)
    forward.max_tokens = 8
    proposer = DraftModelProposer(forward, ProposerInfo(name="scripted"), clock=clock)
    start = SequenceStart(
        options=RequestOptions(sampling=SamplingParams(seed=1, max_tokens=999)), sample=0, prompt_length=9
    )
    long, short = [5] * 1000, [7]
    while len(short) < 20:
        short.append(7)
        proposer.propose([ProposalRequest(1, long, 0, start), ProposalRequest(2, short, 4, start)])
    assert max(num_rows for _, num_rows in forward.calls) > 2 * FIRST_ROWS
