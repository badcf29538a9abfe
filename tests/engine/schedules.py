"""Schedulers in a given state, and checks of their plans."""

from __future__ import annotations

from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.scheduler import EngineSequence, Scheduler, StepPlan
from tests.support.pool_integrity import check_pool

BLOCK = 4
NEW_TOKEN = 7


def make_scheduler(num_blocks: int = 64, *, rows: int = 64, max_running: int = 64, kept_back: int = 1) -> Scheduler:
    pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK, hash_seed=b"model")
    return Scheduler(pool, max_running=max_running, max_rows_per_step=rows, reserve_blocks_per_running=kept_back)


def waiting(scheduler: Scheduler, key: int, num_tokens: int = 4, **fields) -> EngineSequence:
    """Adds a waiting sequence whose tokens differ from those of all other sequences."""
    sequence = EngineSequence(key=key, token_ids=[1000 + key] * num_tokens, arrival=key, **fields)
    scheduler.add(sequence)
    return sequence


def decoding(scheduler: Scheduler, key: int, num_tokens: int = 4, **fields) -> EngineSequence:
    """Adds a running sequence of which only the newest token has not been computed."""
    kv = SequenceKV.create(scheduler._pool, [], max_cached_tokens=0)
    kv.reserve(num_tokens - 1)
    kv.advance(num_tokens - 1)
    sequence = EngineSequence(key=key, token_ids=[1000 + key] * num_tokens, kv=kv, arrival=key, **fields)
    scheduler.add_running(sequence)
    return sequence


def run(plan: StepPlan) -> None:
    """Does what a loop does after its forward pass if every draft is rejected."""
    for item in plan.scheduled:
        sequence = item.sequence
        assert sequence.kv is not None
        assert sequence.kv.capacity >= sequence.num_computed + item.num_rows + item.num_draft_tokens
        if item.reaches_end:
            sequence.token_ids.append(NEW_TOKEN)
            sequence.kv.truncate(len(sequence.token_ids) - 1)
            sequence.kv.publish(sequence.token_ids)
        else:
            sequence.kv.advance(sequence.num_computed + item.num_rows)


def drafts(num_wanted):
    """Returns a function that grants sequences up to `num_wanted` drafts (a number, or one by key), oldest first."""

    def choose(room):
        left, chosen = room.max_draft_rows, {}
        for sequence in room.sequences:
            wanted = num_wanted.get(sequence.key, 0) if isinstance(num_wanted, dict) else num_wanted
            chosen[sequence.key] = min(wanted, left)
            left -= chosen[sequence.key]
        return chosen

    return choose


def plan_with(scheduler: Scheduler, choose, **reclaim) -> StepPlan:
    room = scheduler.reserve(**reclaim)
    return scheduler.assign_rows(room, choose(room))


def rows_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(item.sequence.key, item.num_rows, item.num_draft_tokens) for item in plan.scheduled]


def check(scheduler: Scheduler) -> None:
    tables = [s.kv.block_ids for s in (*scheduler.running, *scheduler._waiting) if s.kv is not None]
    check_pool(scheduler._pool, tables)
