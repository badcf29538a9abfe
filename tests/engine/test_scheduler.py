from __future__ import annotations

from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.scheduler import EngineSequence, StepPlan
from tests.engine.schedules import NEW_TOKEN, check, decoding, make_scheduler, rows_of, run, waiting


def test_where_no_logits_are_needed_a_cached_prompt_is_ready_when_admitted():
    scheduler = make_scheduler()
    first = waiting(scheduler, 1, num_tokens=8)
    run(scheduler.plan())
    scheduler.remove(first)
    second = EngineSequence(key=2, token_ids=first.token_ids[:8], arrival=2, needs_logits=False)
    scheduler.add(second)
    plan = scheduler.plan()
    assert plan.admitted == (second,)
    assert plan.scheduled == ()
    assert second.num_uncomputed == 0


def test_a_prompt_waits_until_a_step_has_rows_for_it_and_finds_what_others_published_meanwhile():
    scheduler = make_scheduler(rows=8)
    first = waiting(scheduler, 1, num_tokens=20)
    second = EngineSequence(key=2, token_ids=first.token_ids[:], arrival=2)
    scheduler.add(second)
    for num_left in (20, 12):
        assert first.num_uncomputed == num_left
        plan = scheduler.plan()
        assert rows_of(plan) == [(1, 8, 0)]
        assert (second.kv, scheduler.num_waiting) == (None, 1)
        run(plan)
        first.kv.publish(first.token_ids)
    plan = scheduler.plan()
    assert plan.admitted == (second,)
    assert (second.num_cached_tokens, rows_of(plan)) == (16, [(1, 4, 0), (2, 4, 0)])


def test_a_prompt_of_a_higher_priority_does_not_wait_for_the_rows_of_others():
    scheduler = make_scheduler(rows=8)
    waiting(scheduler, 1, num_tokens=20)
    run(scheduler.plan())
    urgent = waiting(scheduler, 2, num_tokens=20, priority=1)
    plan = scheduler.plan()
    assert plan.admitted == (urgent,)
    assert rows_of(plan) == [(2, 8, 0)]


def test_a_sequence_with_its_newest_token_to_feed_does_not_wait_for_prompts():
    scheduler = make_scheduler(rows=8)
    waiting(scheduler, 1, num_tokens=20)
    run(scheduler.plan())
    kv = SequenceKV.create(scheduler._pool, [], max_cached_tokens=0)
    kv.reserve(3)
    kv.advance(3)
    scheduler.add(EngineSequence(key=2, token_ids=[1002] * 4, arrival=2, kv=kv))
    assert rows_of(scheduler.plan()) == [(2, 1, 0), (1, 7, 0)]


# --- admission and preemption ---------------------------------------------------------------


def test_the_waiting_are_ordered_by_priority_then_age():
    scheduler = make_scheduler()
    for key, priority in [(1, 0), (2, 5), (3, 0), (4, 5), (5, -1)]:
        waiting(scheduler, key, priority=priority)
    assert [s.key for s in scheduler._waiting] == [2, 4, 1, 3, 5]
    assert [s.key for s in scheduler.plan().admitted] == [2, 4, 1, 3, 5]


def test_no_more_run_than_allowed():
    scheduler = make_scheduler(max_running=2)
    for key in range(4):
        waiting(scheduler, key)
    assert [s.key for s in scheduler.plan().admitted] == [0, 1]
    scheduler.remove(scheduler.running[0])
    assert [s.key for s in scheduler.plan().admitted] == [2]


def test_a_small_sequence_does_not_overtake_the_head():
    scheduler = make_scheduler(num_blocks=4)
    decoding(scheduler, 1, num_tokens=8)
    waiting(scheduler, 2, num_tokens=12)
    waiting(scheduler, 3, num_tokens=1)
    assert scheduler.plan().admitted == ()
    assert [s.key for s in scheduler._waiting] == [2, 3]
    check(scheduler)


def test_one_block_for_each_running_sequence_is_kept_back():
    for num_blocks, admitted in [(4, 0), (5, 1)]:
        scheduler = make_scheduler(num_blocks=num_blocks)
        decoding(scheduler, 1)
        decoding(scheduler, 2)
        waiting(scheduler, 3, num_tokens=4)
        assert len(scheduler.plan().admitted) == admitted


def test_an_empty_engine_admits_what_just_fits():
    scheduler = make_scheduler(num_blocks=2, kept_back=5)
    waiting(scheduler, 1, num_tokens=8)
    assert len(scheduler.plan().admitted) == 1


def test_a_refused_head_is_not_hashed_again_until_there_is_more_room(monkeypatch):
    scheduler = make_scheduler(num_blocks=8)
    running = [decoding(scheduler, key) for key in range(4)]
    head = waiting(scheduler, 9, num_tokens=20)
    calls = []
    real_match = scheduler._pool.match_prefix
    monkeypatch.setattr(scheduler._pool, "match_prefix", lambda *a, **k: calls.append(1) or real_match(*a, **k))
    for _ in range(3):
        scheduler.plan()
    assert len(calls) == 1
    for sequence in running[:3]:
        scheduler.remove(sequence)
    assert scheduler.plan().admitted == (head,)


def test_the_lowest_priority_is_preempted_then_the_latest():
    scheduler = make_scheduler(num_blocks=4)
    for key, priority in [(1, 5), (2, 0), (3, 0), (4, 5)]:
        decoding(scheduler, key, num_tokens=4, priority=priority)
    run(scheduler.plan())
    plan = scheduler.plan()  # each sequence needs a second block, and none is free
    assert [s.key for s in plan.preempted] == [3, 2]
    assert [item.sequence.key for item in plan.scheduled] == [1, 4]
    assert [s.key for s in scheduler._waiting] == [2, 3]
    assert all(s.kv is None and s.num_preemptions == 1 for s in plan.preempted)
    check(scheduler)


def test_nothing_is_admitted_in_a_step_that_preempts():
    scheduler = make_scheduler(num_blocks=4)
    decoding(scheduler, 1, num_tokens=4)
    decoding(scheduler, 2, num_tokens=12)
    waiting(scheduler, 3, num_tokens=1, priority=9)
    assert scheduler.plan().admitted == ()  # a block is kept free for each running sequence
    run(scheduler.plan())
    plan = scheduler.plan()
    assert [s.key for s in plan.preempted] == [2]
    assert plan.admitted == ()


def test_a_preempted_sequence_resumes_ahead_of_new_ones_and_behind_higher_priorities():
    scheduler = make_scheduler(num_blocks=2)
    decoding(scheduler, 5)
    decoding(scheduler, 6)
    waiting(scheduler, 1)
    waiting(scheduler, 7, priority=1)
    run(scheduler.plan())
    assert [s.key for s in scheduler.plan().preempted] == [6]
    assert [s.key for s in scheduler._waiting] == [7, 6, 1]


def test_a_preempted_sequence_comes_back_through_the_prefix_cache():
    scheduler = make_scheduler(num_blocks=8)
    first = decoding(scheduler, 1, num_tokens=16)
    second = decoding(scheduler, 2, num_tokens=16)
    run(scheduler.plan())
    plan = scheduler.plan()
    assert plan.preempted == (second,)
    run(plan)
    scheduler.remove(first)
    plan = scheduler.plan()
    assert plan.admitted == (second,)
    assert second.num_cached_tokens == 12  # the first sequence took its last block
    assert rows_of(plan) == [(2, 5, 0)]
    check(scheduler)


def test_when_others_hold_the_blocks_the_oldest_sits_the_step_out():
    scheduler = make_scheduler(num_blocks=2)
    held = scheduler._pool.allocate(1)  # as a running transfer holds blocks
    sequence = decoding(scheduler, 1, num_tokens=4)
    run(scheduler.plan())
    waiting(scheduler, 2, num_tokens=1)
    plan = scheduler.plan()
    assert plan == StepPlan()
    assert scheduler.running == (sequence,)
    scheduler._pool.release(held)
    assert (1, 1, 0) in rows_of(scheduler.plan())


def test_copies_of_a_preempted_sequence_are_not_made():
    scheduler = make_scheduler(num_blocks=4)
    kv = SequenceKV.create(scheduler._pool, [], max_cached_tokens=0)
    kv.reserve(2)
    kv.advance(2)
    oldest = decoding(scheduler, 0, num_tokens=8, priority=-1)
    for key, table in ((1, kv), (2, kv.fork())):
        scheduler.add_running(EngineSequence(key=key, token_ids=[1, 2, 3], kv=table, arrival=key, priority=5))
    oldest.token_ids.append(NEW_TOKEN)  # needs a third of 4 blocks, of which the forks take 2 when they are copied
    oldest.kv.advance(8)
    plan = scheduler.plan()
    assert [s.key for s in plan.preempted] == [2]
    assert len({destination for _, destination in plan.block_copies}) == len(plan.block_copies)
    assert all(destination in kv.block_ids for _, destination in plan.block_copies)
    check(scheduler)
