"""How a step's rows are shared among sequences, drafts and prompts."""

import time

import pytest

from tests.engine.schedules import (
    BLOCK,
    NEW_TOKEN,
    check,
    decoding,
    drafts,
    make_scheduler,
    plan_with,
    rows_of,
    run,
    waiting,
)

STEPS = {
    "decodes come first and a chunk fills the rest": ({"rows": 8}, (1, 2), [20], {}, [(1, 1, 0), (2, 1, 0), (3, 6, 0)]),
    "several prompts share a step": ({"rows": 16}, (), [6, 6, 6], {}, [(1, 6, 0), (2, 6, 0), (3, 4, 0)]),
    "drafts are granted beside the newest token": ({}, (1, 2), [], {1: 5}, [(1, 1, 5), (2, 1, 0)]),
    "drafts stop at the row budget": (
        {"rows": 10}, (1, 2, 3, 4), [], 5, [(1, 1, 5), (2, 1, 1), (3, 1, 0), (4, 1, 0)],
    ),
    "drafts leave half of the budget to a chunk": (
        {"rows": 18}, (1, 2), [100], 9, [(1, 1, 8), (2, 1, 0), (3, 8, 0)],
    ),
    "a short chunk leaves the rest to drafts": ({"rows": 18}, (1,), [3], {1: 20}, [(1, 1, 14), (2, 3, 0)]),
    "drafts that do not fit the blocks are fewer": ({"num_blocks": 3}, (1, 2), [], 6, [(1, 1, 4), (2, 1, 0)]),
}  # fmt: skip


@pytest.mark.parametrize(("room", "running", "prompts", "wanted", "rows"), STEPS.values(), ids=STEPS.keys())
def test_rows_of_a_step(room, running, prompts, wanted, rows):
    scheduler = make_scheduler(**room)
    for key in running:
        decoding(scheduler, key)
    for key, num_tokens in enumerate(prompts, start=len(running) + 1):
        waiting(scheduler, key, num_tokens=num_tokens, priority=9)
    plan = plan_with(scheduler, drafts(wanted))
    assert rows_of(plan) == rows
    assert plan.num_rows == sum(num_rows + num_drafts for _, num_rows, num_drafts in rows)
    assert plan.preempted == ()


def test_who_has_more_than_the_newest_token_to_feed_verifies_nothing():
    """Drafts would only guess at text that is already known."""
    scheduler = make_scheduler(rows=8)
    waiting(scheduler, 1, num_tokens=20)
    waiting(scheduler, 2, num_tokens=2)
    room = scheduler.reserve()
    assert (room.sequences, room.max_draft_rows) == ([], 0)
    assert rows_of(scheduler.assign_rows(room, {})) == [(1, 8, 0)]


def test_what_there_is_room_for_is_told_with_what_the_step_does_besides():
    scheduler = make_scheduler(rows=18)
    both = [decoding(scheduler, 1), decoding(scheduler, 2)]
    prompt = waiting(scheduler, 3, num_tokens=5)
    room = scheduler.reserve()
    assert (room.sequences, room.prompts, room.max_draft_rows, room.num_rows) == (both, [prompt], 11, 7)


def test_room_for_drafts_is_taken_back_before_anything_is_preempted():
    scheduler = make_scheduler(num_blocks=3)
    first = decoding(scheduler, 1, num_tokens=4)
    second = decoding(scheduler, 2, num_tokens=4)
    plan = plan_with(scheduler, drafts({1: 4}))
    for item in plan.scheduled:  # as in a loop that keeps the drafts' block
        item.sequence.token_ids.append(NEW_TOKEN)
        item.sequence.kv.advance(4)
    first.token_ids.pop()
    first.kv.truncate(3)
    first.kv.reserve(8)
    plan = plan_with(scheduler, drafts(4))
    assert plan.preempted == ()
    assert rows_of(plan) == [(1, 1, 0), (2, 1, 3)]
    assert len(second.kv.block_ids) == 2
    check(scheduler)


def test_more_decodes_than_rows_take_turns():
    scheduler = make_scheduler(rows=4)
    for key in range(10):
        decoding(scheduler, key)
    served = []
    for _ in range(5):
        plan = scheduler.plan()
        assert plan.num_rows == 4
        served += [item.sequence.key for item in plan.scheduled]
        run(plan)
    assert sorted(served) == sorted([*range(10)] * 2)


def test_a_prompt_makes_progress_beside_any_number_of_decodes():
    scheduler = make_scheduler(rows=4)
    for key in range(10):
        decoding(scheduler, key)
    prompt = waiting(scheduler, 99, num_tokens=6)
    for _ in range(6):
        plan = plan_with(scheduler, drafts(8))
        assert plan.num_rows == 4
        run(plan)
    assert prompt.num_uncomputed == 1


def test_removing_works_anywhere_and_twice():
    scheduler = make_scheduler()
    running, queued = decoding(scheduler, 1), waiting(scheduler, 2)
    for sequence in (running, running, queued, queued):
        scheduler.remove(sequence)
    assert not scheduler.has_work
    check(scheduler)


@pytest.mark.parametrize("add", [waiting, decoding])
def test_what_can_never_fit_must_not_be_added(add):
    add(make_scheduler(num_blocks=8), 1, num_tokens=8 * BLOCK)
    with pytest.raises(AssertionError):
        add(make_scheduler(num_blocks=8), 1, num_tokens=8 * BLOCK + 1)


def test_a_plan_of_64_sequences_costs_little_and_nothing_by_length():
    """Takes the best processor time of many runs, so that a busy machine does not matter. The goal is 0.3 ms."""
    scheduler = make_scheduler(num_blocks=16384, rows=512)
    for key in range(64):
        decoding(scheduler, key, num_tokens=900)
    best = float("inf")
    for _ in range(30):
        started = time.thread_time()
        plan = plan_with(scheduler, drafts(4))
        best = min(best, time.thread_time() - started)
        run(plan)
    assert best < 0.0015
