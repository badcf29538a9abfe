from __future__ import annotations

from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.row_budget import FIRST_ROWS, MIN_CATCH_UP_ROWS, CatchUpBudget
from tests.draft_node.simulated_pair import ScriptedForward
from tests.support.fake_clock import FakeClock


def test_rows_are_what_the_time_allows_by_what_they_have_cost():
    budget = CatchUpBudget(max_rows=512, seconds=0.1)
    assert budget.num_rows == FIRST_ROWS
    budget.observe(FIRST_ROWS, FIRST_ROWS * 0.002)
    assert budget.num_rows == 50
    for _ in range(60):
        budget.observe(50, 50 * 0.001)
    assert 95 <= budget.num_rows <= 100


def test_there_is_a_least_and_a_most():
    slow, quick = (CatchUpBudget(max_rows=512, seconds=0.1) for _ in range(2))
    slow.observe(64, 64.0)
    quick.observe(64, 0.0001)
    assert (slow.num_rows, quick.num_rows) == (MIN_CATCH_UP_ROWS, 512)
    assert CatchUpBudget(max_rows=8, seconds=0.1).num_rows == 8


def test_few_rows_say_nothing():
    budget = CatchUpBudget(max_rows=512, seconds=0.1)
    budget.observe(MIN_CATCH_UP_ROWS - 1, 30.0)
    assert budget.num_rows == FIRST_ROWS


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
