"""How a step's rows are divided if logprobs of prompts are requested."""

from __future__ import annotations

from outrider.engine.scheduler import EngineSequence, PromptScoring, StepReservation
from outrider.prefill import MAX_SCORED_ROWS
from tests.engine.schedules import BLOCK, check, decoding, make_scheduler, rows_of, run, waiting

LONG = 3 * MAX_SCORED_ROWS


def scored(scheduler, key, num_tokens=LONG, *, num_unscored=1, needs_logits=True, **fields):
    """Adds a waiting sequence whose prompt is scored, except its first `num_unscored` tokens."""
    token_ids = [1000 + key] * num_tokens
    scoring = PromptScoring(token_ids[num_unscored:], 0)
    sequence = EngineSequence(
        key=key, token_ids=token_ids, arrival=key, scoring=scoring, needs_logits=needs_logits, **fields
    )
    scheduler.add(sequence)
    return sequence


def step(scheduler):
    """Runs a step, which also records the logprobs of the prompts that it scores."""
    plan = scheduler.plan()
    for item in plan.scheduled:
        if item.scored_token_ids:
            item.sequence.score(item.sequence.num_computed, [None] * item.num_rows)
    run(plan)
    check(scheduler)
    return plan


def test_a_scored_prompt_leaves_the_rest_of_the_step_to_others():
    scheduler = make_scheduler(num_blocks=512, rows=4 * MAX_SCORED_ROWS)
    scored(scheduler, 1)
    waiting(scheduler, 2, num_tokens=1000)
    plan = step(scheduler)
    assert rows_of(plan) == [(2, 3 * MAX_SCORED_ROWS, 0), (1, MAX_SCORED_ROWS, 0)]
    assert [len(item.scored_token_ids) for item in plan.scheduled] == [0, MAX_SCORED_ROWS]


def test_drafts_have_the_rows_that_scored_prompts_leave():
    scheduler = make_scheduler(num_blocks=512, rows=8 * MAX_SCORED_ROWS)
    decoding(scheduler, 1)
    for key in (2, 3):
        scored(scheduler, key, 20 * MAX_SCORED_ROWS)
    scheduler.plan()
    room = scheduler.reserve()
    assert room.num_rows == 1 + MAX_SCORED_ROWS
    assert room.max_draft_rows == 7 * MAX_SCORED_ROWS - 1


def test_prompts_are_scored_one_after_the_other():
    scheduler = make_scheduler(num_blocks=512, rows=16 * MAX_SCORED_ROWS)
    scored(scheduler, 1, MAX_SCORED_ROWS // 2 + 1)
    scored(scheduler, 2)
    decoding(scheduler, 3)
    half = MAX_SCORED_ROWS // 2
    assert rows_of(step(scheduler)) == [(3, 1, 0), (1, half, 0), (2, half, 0)]
    assert rows_of(step(scheduler)) == [(1, 1, 0), (3, 1, 0), (2, MAX_SCORED_ROWS, 0)]


def test_rows_that_nobody_asked_to_score_follow_in_other_steps():
    scheduler = make_scheduler(num_blocks=512, rows=256)
    sequence = scored(scheduler, 1, 100, num_unscored=90)
    sequence.scoring = PromptScoring(sequence.token_ids[:10], 0)
    assert rows_of(step(scheduler)) == [(1, 10, 0)]
    assert sequence.scoring is None
    assert rows_of(step(scheduler)) == [(1, 90, 0)]


def test_the_last_row_of_a_prompt_may_be_scored():
    """This happens on a prefill node, which does not compute the prompt's last token."""
    scheduler = make_scheduler()
    sequence = scored(scheduler, 1, 1, num_unscored=0, needs_logits=False)
    plan = scheduler.plan()
    assert [(item.num_rows, len(item.scored_token_ids), item.reaches_end) for item in plan.scheduled] == [(1, 1, True)]
    assert sequence.score(0, ["a"]) == ["a"]
    assert sequence.scoring is None


def test_a_cached_prefix_is_computed_again():
    scheduler = make_scheduler(num_blocks=512)
    for key in (1, 2):  # the prefix cache has blocks for the second one
        sequence = scored(scheduler, key)
        sequence.token_ids[:] = [5] * LONG
        num_rows = 0
        while sequence.scoring is not None:
            num_rows += step(scheduler).num_rows
        assert num_rows == LONG - 1
        step(scheduler)
        scheduler.remove(sequence)
    other = waiting(scheduler, 3, num_tokens=LONG)
    other.token_ids[:] = [5] * LONG
    assert rows_of(scheduler.plan()) == [(3, BLOCK, 0)]  # no row of this prompt is scored


def test_a_preempted_one_takes_no_more_from_the_cache_than_it_has_scored():
    scheduler = make_scheduler(num_blocks=512)
    sequence = scored(scheduler, 1)
    step(scheduler)
    scheduler._preempt(sequence, StepReservation())
    scheduler.remove(sequence)
    other = waiting(scheduler, 2, num_tokens=LONG)
    other.token_ids[:] = sequence.token_ids
    while other.num_uncomputed > 1:  # until the whole prompt is cached
        step(scheduler)
    scheduler.add(sequence)
    step(scheduler)
    assert sequence.num_cached_tokens == MAX_SCORED_ROWS
    assert sequence.scoring.num_done == 2 * MAX_SCORED_ROWS
