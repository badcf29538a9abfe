"""A pool whose blocks are divided among ranks: where sequences go, and what is free."""

from __future__ import annotations

import pytest

from outrider.engine.kv_cache.block_pool import NoFreeBlocksError
from outrider.engine.kv_cache.divided_pool import DividedPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.scheduler import EngineSequence, Scheduler

BLOCK_SIZE, NUM_BLOCKS = 4, 8
TOKENS = list(range(100, 116))


def make_pool(**settings):
    return DividedPool(2, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, hash_seed=b"seed", **settings)


def create(pool, tokens=TOKENS, salt=b"", *, num_reserved=None):
    kv = SequenceKV.create(pool, tokens, max_cached_tokens=len(tokens), cache_salt=salt)
    kv.reserve(len(tokens) if num_reserved is None else num_reserved)
    return kv


def rank_of(kv):
    (rank,) = {block // NUM_BLOCKS for block in kv.block_ids}
    return rank


def test_blocks_have_numbers_of_all_ranks_and_a_fork_stays_on_its_rank():
    pool = make_pool()
    first, second = create(pool), create(pool)
    assert (first.block_ids, second.block_ids) == ([0, 1, 2, 3], [8, 9, 10, 11])
    assert (pool.num_blocks, pool.num_blocks_together) == (16, 8)
    assert (pool.free_by_group, pool.num_free_blocks, pool.num_free_in_scarcest) == ((4, 4), 8, 8)
    second.advance(6)
    fork = second.fork()
    assert fork.shares_pool(second)
    assert not fork.shares_pool(first)
    ((source, copy),) = fork.reserve(7)
    assert (source // NUM_BLOCKS, copy // NUM_BLOCKS) == (1, 1)
    for kv in (first, second, fork):
        kv.free()
    assert pool.free_by_group == (8, 8)


def test_a_sequence_goes_to_its_prefix_unless_that_rank_has_more_to_do():
    pool = make_pool()
    busy, holder = create(pool, [1] * 4), create(pool)
    holder.advance(len(TOKENS))
    holder.publish(TOKENS)
    assert (rank_of(busy), rank_of(holder)) == (0, 1)
    same = create(pool)
    assert (rank_of(same), same.num_cached_tokens) == (1, 16)
    others = [create(pool, [at] * 8) for at in (2, 3)]
    assert [*map(rank_of, others)] == [0, 0]
    again = create(pool)  # rank 1 has one free block more, and the prefix
    assert rank_of(again) == 1
    grown = create(pool, [5] * 16)
    assert rank_of(grown) == 1, "it does not fit rank 0, which has three free blocks"
    elsewhere = create(pool, num_reserved=12)
    assert (rank_of(elsewhere), elsewhere.num_cached_tokens) == (1, 16)


@pytest.mark.parametrize(("num_left", "expected"), [((7, 9), 1), ((4, 7), 0)])
def test_blocks_of_a_prefix_make_room_only_if_they_are_in_use(num_left, expected):
    pool = DividedPool(2, num_blocks=16, block_size=BLOCK_SIZE, hash_seed=b"seed")
    for part, num_free in zip(pool.parts, num_left, strict=True):
        holder = SequenceKV(part)
        holder.reserve(len(TOKENS))
        holder.advance(len(TOKENS))
        holder.publish(TOKENS)
        if expected == 1 or part is pool.parts[1]:
            holder.free()
        part.allocate(part.num_free_blocks - num_free)
    kv = create(pool, [*TOKENS, *[1] * 16])
    assert (kv.block_ids[0] // 16, kv.num_cached_tokens) == (expected, 16)


def test_blocks_are_kept_back_for_those_who_run_on_the_same_rank():
    pool = make_pool()
    scheduler = Scheduler(pool, max_running=8, max_rows_per_step=64, reserve_blocks_per_running=2)
    for key in range(3):
        kv = SequenceKV(pool.parts[1])
        kv.reserve(4)
        scheduler.add_running(EngineSequence(key=key, token_ids=[key] * 4, arrival=key, kv=kv))
    waiting = EngineSequence(key=3, token_ids=[3] * 28, arrival=3)
    scheduler.add(waiting)
    assert scheduler.plan().admitted == (waiting,)
    assert rank_of(waiting.kv) == 0


def test_all_with_one_prefix_do_not_go_to_one_rank():
    pool = DividedPool(2, num_blocks=40, block_size=BLOCK_SIZE, hash_seed=b"seed")
    counts = [0, 0]
    for tail in range(8):
        tokens = [*TOKENS, *[tail] * 12]
        kv = create(pool, tokens)
        kv.advance(len(tokens))
        kv.publish(tokens)
        counts[kv.block_ids[0] // 40] += 1
    assert min(counts) >= 3


def test_salts_and_a_disabled_prefix_cache_share_nothing():
    pool = make_pool()
    holder = create(pool, salt=b"one")
    holder.advance(len(TOKENS))
    holder.publish(TOKENS)
    assert create(pool, salt=b"two").num_cached_tokens == 0
    assert create(make_pool(enable_prefix_cache=False)).num_cached_tokens == 0


def test_a_sequence_has_no_more_blocks_than_one_rank():
    pool = make_pool()
    with pytest.raises(NoFreeBlocksError):
        create(pool, [7] * (NUM_BLOCKS * BLOCK_SIZE + 1))
    assert pool.free_by_group == (8, 8)


def test_a_sequence_that_waits_starts_in_any_rank_that_gets_room():
    pool = make_pool()
    holder = create(pool)
    holder.advance(len(TOKENS))
    holder.publish(TOKENS)
    scheduler = Scheduler(pool, max_running=8, max_rows_per_step=64, reserve_blocks_per_running=0)
    running = [EngineSequence(key=key, token_ids=[key] * size, arrival=key) for key, size in ((1, 16), (2, 32))]
    waiting = EngineSequence(key=3, token_ids=[*TOKENS, *TOKENS], arrival=3)
    waiting.kv = SequenceKV.create(pool, waiting.token_ids, max_cached_tokens=31)
    holder.free()
    for sequence in (*running, waiting):
        if sequence.kv is None:
            sequence.kv = SequenceKV(pool.parts[sequence.key - 1])
        scheduler.add(sequence)
    assert scheduler.plan().admitted == tuple(running)
    assert waiting.kv is None
    scheduler.remove(running[1])
    assert scheduler.plan().admitted == (waiting,)
    assert rank_of(waiting.kv) == 1


def test_a_sequence_without_room_displaces_only_those_of_its_rank():
    pool = make_pool()
    scheduler = Scheduler(pool, max_running=8, max_rows_per_step=64, reserve_blocks_per_running=0)
    sequences = [EngineSequence(key=key, token_ids=[key] * 16, arrival=key) for key in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    plan = scheduler.plan()
    assert [rank_of(sequence.kv) for sequence in sequences] == [0, 1, 0, 1]
    for sequence in sequences:
        sequence.kv.advance(16)
    sequences[0].token_ids.append(9)
    plan = scheduler.plan()
    assert plan.preempted == (sequences[2],)
    assert pool.free_by_group == (3, 0)
