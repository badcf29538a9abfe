"""Tables of recurrent states: what a sequence holds, shares and gives back, alone and in random operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from outrider.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError, StatePool, WindowPool
from outrider.engine.kv_cache.planes import MAX_REPLAY, STATE_INTERVAL, LinearAttention, first_kept_token, last_border
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.kv_cache.state_table import SNAPSHOT_TOKENS
from tests.support.pool_integrity import check_pool
from tests.support.sequence_machine import SequenceMachine, Written

STEP = 40
KERNEL = 4
WINDOW = LinearAttention((), 0, 0, 0, KERNEL).group.window


def make_pool(*, num_blocks=200, window_blocks=100, slots=20, block_size=16, step=STEP):
    shared = {"block_size": block_size, "hash_seed": b"seed"}
    rows = WindowPool(window=WINDOW, max_step_tokens=step, first_block=num_blocks, num_blocks=window_blocks, **shared)
    return BlockPool(num_blocks=num_blocks, windows=[rows, StatePool(num_blocks=slots, **shared)], **shared)


def compute(kv, token_ids, *, step=STEP):
    """Computes tokens in steps, as a node does, and returns the positions at which states were written."""
    written = []
    while kv.num_tokens < len(token_ids):
        kv.reserve(len(token_ids))
        num_rows = min(step, len(token_ids) - kv.num_tokens)
        written += [position for position, _ in kv.plan_states(num_rows).stores]
        kv.advance(kv.num_tokens + num_rows)
        kv.publish(token_ids)
    return written


def positions(kv):
    return sorted(kv.windows[1]._slots)


def test_a_long_sequence_holds_the_state_it_needs_and_a_slot_for_the_next_one():
    pool = make_pool()
    kv = SequenceKV(pool)
    assert compute(kv, range(100)) == [32, 64, 96]
    kv.reserve(101)
    assert positions(kv) == [96]
    assert kv.windows[1].num_held == 2
    assert kv.has_reserved(101)
    kv.free()
    assert pool.free_by_group == (200, 100, 20)


def test_states_are_before_the_last_token_which_may_be_computed_again():
    kv = SequenceKV(make_pool())
    compute(kv, range(96))
    assert positions(kv)[-1] == 80 == last_border(96)
    kv.truncate(95)
    assert kv.num_tokens == 95


def test_a_long_chunk_leaves_snapshots_for_later_prompts():
    pool = make_pool(step=700)
    kv = SequenceKV(pool)
    assert compute(kv, range(900), step=700) == [256, 512, 688, 768, 896]
    kv.free()
    again = SequenceKV.create(pool, range(600), max_cached_tokens=600)
    assert again.num_tokens == 512 == 2 * SNAPSHOT_TOKENS


def test_states_between_snapshots_are_evicted_first():
    pool = make_pool(slots=5)
    kv = SequenceKV(pool)
    compute(kv, range(720))
    ends = [block_hash for block_hash in kv._hashes[:45] if pool.windows[1].has(block_hash)]
    kept = [(kv._hashes[:45].index(block_hash) + 1) * 16 for block_hash in ends]
    assert kept[1] in range(SNAPSHOT_TOKENS, SNAPSHOT_TOKENS + STEP)  # the first one was there before slots were short
    assert kept[2] in range(kept[1] + SNAPSHOT_TOKENS, kept[1] + SNAPSHOT_TOKENS + STEP)


def test_the_last_state_of_an_ended_sequence_is_evicted_last():
    pool = make_pool(step=700)
    kv = SequenceKV(pool)
    compute(kv, range(900), step=700)
    kv.free()
    states = pool.windows[1]
    states.release(states.allocate(states.num_blocks - 1))
    assert SequenceKV.create(pool, range(950), max_cached_tokens=950).num_tokens == 896


def test_snapshots_hold_no_slots_between_steps():
    """Others may need the slots: a step's snapshots are published, and then held by nobody."""
    pool = make_pool(step=700)
    kv = SequenceKV(pool)
    compute(kv, range(700), step=700)
    assert positions(kv) == [688]
    assert pool.windows[1].num_free_blocks == 20 - 2  # that state, and a slot for the next
    assert SequenceKV.create(pool, range(600), max_cached_tokens=600).num_tokens == 512


def test_every_slot_serves_sequences_that_compute_or_wait():
    """Sequences hold two slots each from the first on, so none need be kept back for those that run."""
    pool = make_pool(slots=8)
    waiting = [SequenceKV(pool) for _ in range(4)]
    for num_others, kv in enumerate(waiting):
        assert kv.windows_fit(50, arriving=50, kept_back=num_others)
        kv.reserve(50, arriving=50)
    assert not SequenceKV(pool).windows_fit(50, arriving=50)
    for kv in waiting:
        kv.advance(50)
        kv.reserve(51)
        assert kv.plan_states(1).position == 48


def test_no_slot_for_a_fork_is_an_error_that_changes_nothing():
    pool = make_pool(slots=4)
    kv = SequenceKV(pool)
    compute(kv, range(50))
    kv.reserve(51)
    kv.fork().reserve(51)
    third = kv.fork()
    free = pool.free_by_group
    with pytest.raises(NoFreeBlocksError):
        third.reserve(51)
    assert pool.free_by_group == free


def test_drafts_are_limited_so_that_the_next_step_can_replay_them():
    kv = SequenceKV(make_pool())
    compute(kv, range(31))
    kv.reserve(32)
    most = kv.max_reserved(200)
    kv.reserve(most)
    assert not kv.has_reserved(most + 1)
    assert kv.plan_states(1).stores == ()
    kv.truncate(most)  # all are accepted
    assert kv.num_tokens == most
    kv.reserve(most + 1)
    assert most - kv.plan_states(1).position == MAX_REPLAY


class StateMachine(SequenceMachine):
    """Random operations in any order. Every step finds the state and the rows that it needs."""

    block_size, max_rolled_back = 16, 30

    def __init__(self) -> None:
        super().__init__(make_pool(num_blocks=60, window_blocks=36, slots=9, block_size=self.block_size))
        self.rows: dict[int, tuple[int, int]] = {}  # (position, token) by slot
        self.states: dict[int, list[int]] = {}  # the tokens before a state, by slot

    @rule(num_tokens=st.integers(1, 150), kind=st.integers(0, 1))
    def create(self, num_tokens, kind):
        token_ids = [kind] * num_tokens
        kv = SequenceKV.create(self.pool, token_ids, max_cached_tokens=num_tokens)
        self.sequences.append(Written(kv, token_ids[: kv.num_tokens]))

    @precondition(lambda self: self.sequences)
    @rule(kind=st.integers(0, 1), num=st.integers(1, 90), num_drafts=st.integers(0, 60), data=st.data())
    def compute(self, kind, num, num_drafts, data):
        """Computes a prompt in steps, or one token and drafts, of which some are accepted."""
        sequence = data.draw(st.sampled_from(self.sequences))
        kv, end = sequence.kv, sequence.kv.num_tokens + num
        if not kv.fits(end):
            with pytest.raises(NoFreeBlocksError):
                kv.reserve(end)
            return
        while kv.num_tokens < end:
            self.copy(kv.reserve(end))
            start, num_rows = kv.num_tokens, min(STEP, end - kv.num_tokens)
            drafts = min(kv.max_reserved(end + num_drafts) - end, num_drafts) if num == 1 else 0
            if drafts > 0:
                assert not kv.reserve(end + drafts)
                assert kv.has_reserved(end + drafts)
            self.step(sequence, kind, start, start + num_rows)
            num_accepted = data.draw(st.integers(0, max(drafts, 0)))
            for position in range(start, start + num_rows + max(drafts, 0)):
                self.rows[kv.slots_of_groups(position)[1]] = (position, kind)
            kv.truncate(start + num_rows + num_accepted)
            assert kv.num_tokens == start + num_rows + num_accepted
            sequence.token_ids += [kind] * (num_rows + num_accepted)
            kv.publish(sequence.token_ids)

    def copy(self, pairs):
        before, size = dict(self.rows), self.block_size
        for source, to in pairs:
            for offset in range(size):
                self.rows[to * size + offset] = before.get(source * size + offset, (-1, -1))

    def step(self, sequence, kind, start, end):
        """Checks what a step reads, and writes its states."""
        kv, known = sequence.kv, [*sequence.token_ids, *[kind] * (end - start)]
        steps, states = kv.plan_states(end - start), self.pool.windows[1]
        assert 0 <= start - steps.position <= MAX_REPLAY
        assert steps.position == 0 or self.states[steps.slot] == known[: steps.position]
        for position in range(max(steps.position - KERNEL + 1, 0), start):
            assert self.rows[kv.slots_of_groups(position)[1]] == (position, known[position])
        for position, slot in steps.stores:
            assert steps.position < position < end
            assert states._ref_counts[slot] == 1
            assert states._hash_of[slot] is None
            self.states[slot] = known[:position]
        assert max([steps.position, *[position for position, _ in steps.stores]]) == max(
            steps.position, last_border(end)
        )

    @precondition(lambda self: self.sequences)
    @rule(num=st.integers(1, 90), data=st.data())
    def receive(self, num, data):
        """Tokens of one kind arrive after those that are there, or their transfer fails."""
        sequence = data.draw(st.sampled_from(self.sequences))
        kv, start = sequence.kv, sequence.kv.num_tokens
        end = start + num
        if start % self.block_size or not (
            kv.num_blocks_needed(end) <= self.pool.num_free_blocks and kv.windows_fit(end, arriving=end)
        ):
            return
        kv.reserve(end, arriving=end)
        if data.draw(st.booleans()):
            kv.truncate(start)
            del sequence.token_ids[kv.num_tokens :]
            return
        sequence.token_ids += [1] * num
        for position in range(first_kept_token(end, WINDOW), end):
            self.rows[kv.slots_of_groups(position)[1]] = (position, sequence.token_ids[position])
        slots = np.full(end, -1)
        kv.windows[1].fill_slots(slots)
        if last_border(end):
            self.states[slots[end - 1]] = sequence.token_ids[: last_border(end)]
        kv.advance(end)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data):
        kv = data.draw(st.sampled_from(self.sequences)).kv
        data.draw(st.sampled_from([lambda: kv.release_beyond(kv.num_tokens), kv.release_behind]))()

    @invariant()
    def the_pools_are_whole(self):
        window, states = self.pool.windows
        tables = [sequence.kv.windows for sequence in self.sequences]
        check_pool(self.pool, [sequence.kv.block_ids for sequence in self.sequences])
        check_pool(window, [rows.block_ids[rows.first :] for rows, _ in tables])
        check_pool(states, [[*own._slots.values(), *own._spare] for _, own in tables])
        assert states.num_free_blocks == states.num_blocks - sum(own.num_held for _, own in tables)
        assert all(position % STATE_INTERVAL == 0 for _, own in tables for position in own._slots)


class SmallBlocksMachine(StateMachine):
    """The same with two blocks for each interval of states."""

    block_size = 8


TestStateMachine = StateMachine.TestCase
TestSmallBlocksMachine = SmallBlocksMachine.TestCase
TestStateMachine.settings = TestSmallBlocksMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
