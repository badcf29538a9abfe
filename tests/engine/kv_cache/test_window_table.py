"""Tables of sliding windows: what a sequence holds, shares and gives back, alone and in random operations."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from outrider.engine.kv_cache import block_pool, planes
from outrider.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError, WindowPool, max_held_blocks
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from tests.support.pool_integrity import check_pool
from tests.support.sequence_machine import SequenceMachine, Written

BLOCK = 4
WINDOW = 10
STEP = 8
KEPT = 8
NUM_BLOCKS, WINDOW_BLOCKS = 40, 20


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    """Makes sequences keep their windows from multiples of 8 tokens on, so that short texts slide."""
    for module in (planes, block_pool):
        monkeypatch.setattr(module, "KEPT_TOKENS", KEPT)


def make_pool(num_blocks=NUM_BLOCKS, window_blocks=WINDOW_BLOCKS):
    window = WindowPool(
        window=WINDOW,
        max_step_tokens=STEP,
        first_block=num_blocks,
        num_blocks=window_blocks,
        block_size=BLOCK,
        hash_seed=b"seed",
    )
    return BlockPool(num_blocks=num_blocks, block_size=BLOCK, hash_seed=b"seed", windows=[window])


def compute(kv, token_ids, *, until=None):
    """Computes the KV of the tokens in steps, as a node does."""
    end = len(token_ids) if until is None else until
    while kv.num_tokens < end:
        kv.reserve(end)
        kv.advance(min(kv.num_tokens + STEP, end))
        kv.publish(token_ids)


def held(kv):
    (table,) = kv.windows
    return len(table.block_ids) - table.first


def first_token(kv):
    (table,) = kv.windows
    return table.first * BLOCK


def test_a_long_sequence_holds_its_window_and_one_step():
    pool = make_pool()
    kv = SequenceKV(pool)
    compute(kv, range(100))
    assert len(kv.block_ids) == 25
    assert first_token(kv) <= 100 - WINDOW < 100 <= kv.capacity
    assert held(kv) <= max_held_blocks(WINDOW, STEP, BLOCK) == 7
    kv.reserve(101)
    assert first_token(kv) == 88  # the row at 100 sees tokens from 91 on; one more, in whole pieces of 8, is kept
    kv.free()
    assert pool.free_by_group == (NUM_BLOCKS, WINDOW_BLOCKS)


def test_a_prompt_needs_no_further_blocks_after_its_admission():
    """A prefill node never preempts. A sequence that shares blocks with others has them reserved all the same."""
    pool = make_pool(window_blocks=14)
    first = SequenceKV(pool)
    compute(first, range(60), until=24)
    second = SequenceKV.create(pool, list(range(60)), max_cached_tokens=24)
    assert second.num_tokens == 24
    assert second.fits(60)
    for kv in (first, second):
        kv.reserve(60)
    assert pool.free_by_group[1] == 0
    assert not SequenceKV(pool).fits(1)
    for kv in (first, second):
        compute(kv, range(60))  # raises NoFreeBlocksError if a block is missing


def test_a_prefix_is_taken_if_its_last_window_is_there():
    pool = make_pool()
    kv = SequenceKV(pool)
    compute(kv, range(48))
    kv.free()
    again = SequenceKV.create(pool, list(range(60)), max_cached_tokens=60)
    assert again.num_tokens == 48
    assert first_token(again) == 32
    assert held(again) == 4
    shorter = SequenceKV.create(pool, list(range(30)), max_cached_tokens=30)
    assert shorter.num_tokens == 28
    shorter.free()
    again.free()
    others = SequenceKV(pool)  # takes all window blocks
    others.reserve(28)
    SequenceKV(pool).reserve(28)
    SequenceKV(pool).reserve(24)
    assert SequenceKV.create(pool, list(range(60)), max_cached_tokens=60).num_tokens == 0


def test_no_prefix_is_taken_if_sharing_would_take_blocks_that_others_have_reserved():
    pool = make_pool(window_blocks=8)
    kv = SequenceKV(pool)
    compute(kv, range(40))
    kv.reserve(60)
    assert pool.free_by_group[1] == 1
    assert SequenceKV.create(pool, list(range(60)), max_cached_tokens=60).num_tokens == 0
    check_pool(pool, [kv.block_ids])


def test_a_fork_copies_the_last_block_in_every_group():
    pool = make_pool()
    kv = SequenceKV(pool)
    compute(kv, range(26))
    other = kv.fork()
    copies = other.reserve(27)
    assert copies == [
        (kv.block_ids[6], other.block_ids[6]),
        (NUM_BLOCKS + kv.windows[0].block_ids[6], NUM_BLOCKS + other.windows[0].block_ids[6]),
    ]
    assert other.slots_of_groups(26) == [
        other.block_ids[6] * BLOCK + 2, (NUM_BLOCKS + other.windows[0].block_ids[6]) * BLOCK + 2,
    ]  # fmt: skip
    assert kv.reserve(27) == []


def test_a_sequence_without_its_window_starts_anew():
    pool = make_pool()
    kv = SequenceKV(pool)
    compute(kv, range(80))
    kv.truncate(79)
    assert kv.num_tokens == 79  # the last token is computed again
    kv.truncate(60)
    assert kv.num_tokens == kv.num_cached_tokens == 0
    compute(kv, range(80))
    assert kv.num_tokens == 80


def test_tokens_that_arrive_get_the_blocks_that_a_sequence_keeps():
    pool = make_pool()
    kv = SequenceKV(pool)
    kv.reserve(80, arriving=80)
    assert (first_token(kv), held(kv)) == (64, 4)
    assert not kv.windows[0].sees_all(0)
    kv.advance(80)
    kv.publish(range(80))
    assert SequenceKV.create(pool, list(range(90)), max_cached_tokens=90).num_tokens == 80
    kv.free()
    lost = SequenceKV(pool)
    lost.reserve(80, arriving=80)
    lost.truncate(lost.num_tokens)  # the transfer has failed
    compute(lost, range(100, 180))
    assert held(lost) <= 7
    assert first_token(lost) <= 80 - WINDOW


def test_only_blocks_that_arrived_whole_are_published():
    """A block begins before the tokens that arrive if its size does not divide where windows begin."""
    pool = make_pool()
    kv = SequenceKV(pool)
    (table,) = kv.windows
    kv.reserve(80, arriving=80)
    table._first_token += 1
    kv.advance(80)
    kv.publish(range(80))
    assert table.pool.num_blocks - len(table.pool._free) == 4
    assert len(table.pool._block_of) == 3


class WindowMachine(SequenceMachine):
    """Random operations in any order. Every row sees its own window, and no block is lost or has two owners."""

    def __init__(self) -> None:
        super().__init__(make_pool(num_blocks=24, window_blocks=14))
        self.content: dict[int, tuple[int, int]] = {}  # (position, token) by slot; windows after the others

    @rule(num_tokens=st.integers(0, 60), kind=st.integers(0, 1), data=st.data())
    def create(self, num_tokens, kind, data):
        token_ids = [kind] * num_tokens
        kv = SequenceKV.create(self.pool, token_ids, max_cached_tokens=data.draw(st.integers(0, num_tokens)))
        self.sequences.append(Written(kv, token_ids[: kv.num_tokens]))

    @precondition(lambda self: self.sequences)
    @rule(kind=st.integers(0, 1), num=st.integers(1, 40), num_rejected=st.integers(0, 4), data=st.data())
    def write_and_keep_some(self, kind, num, num_rejected, data):
        """Writes tokens in steps, and rolls back some of the last step's."""
        sequence = data.draw(st.sampled_from(self.sequences))
        kv, end = sequence.kv, sequence.kv.num_tokens + num
        while kv.num_tokens < end:
            free, fits = self.pool.free_by_group, kv.fits(end)
            try:
                copies = kv.reserve(end)
            except NoFreeBlocksError:
                assert not fits
                assert self.pool.free_by_group == free
                return
            assert fits
            assert kv.has_reserved(end)
            before = dict(self.content)
            for source, destination in copies:
                for offset in range(BLOCK):
                    self.content[destination * BLOCK + offset] = before.get(source * BLOCK + offset, (-1, -1))
            start, stop = kv.num_tokens, min(kv.num_tokens + STEP, end)
            for position in range(start, stop):
                for slot, pool in zip(kv.slots_of_groups(position), (self.pool, *self.pool.windows), strict=True):
                    assert not pool.is_shared(slot // BLOCK - getattr(pool, "first_block", 0))
                    self.content[slot] = (position, kind)
            kept = max(start, stop - num_rejected) if stop == end else stop
            kv.truncate(kept)
            sequence.token_ids += [kind] * (kept - start)
            if stop == end:
                return
            kv.publish(sequence.token_ids)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def receive(self, data):
        """Tokens of one kind arrive after those that are there, or their transfer fails."""
        sequence = data.draw(st.sampled_from(self.sequences))
        kv, start = sequence.kv, sequence.kv.num_tokens
        end = start + data.draw(st.integers(1, 60))
        if start % BLOCK or not (
            kv.num_blocks_needed(end) <= self.pool.num_free_blocks and kv.windows_fit(end, arriving=end)
        ):
            return
        kv.reserve(end, arriving=end)
        if data.draw(st.booleans()):
            kv.truncate(start)
            del sequence.token_ids[kv.num_tokens :]
            return
        first = max(start, planes.first_kept_token(end, WINDOW))
        for position in range(start, end):
            slot, in_window = kv.slots_of_groups(position)
            self.content[slot] = (position, 1)
            if position >= first:
                self.content[in_window] = (position, 1)
        kv.advance(end)
        sequence.token_ids += [1] * (end - start)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def publish_or_release(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        if data.draw(st.booleans()):
            sequence.kv.publish(sequence.token_ids)
        else:
            sequence.kv.release_beyond(sequence.kv.num_tokens)

    @invariant()
    def the_pools_are_whole(self):
        (window,) = self.pool.windows
        tables = [table for sequence in self.sequences for table in sequence.kv.windows]
        check_pool(self.pool, [sequence.kv.block_ids for sequence in self.sequences])
        check_pool(window, [table.block_ids[table.first :] for table in tables])
        references = sum(len(table.block_ids) - table.first for table in tables)
        assert window.num_free_blocks == window.num_blocks - references

    @invariant()
    def every_row_sees_its_own_tokens(self):
        for sequence in self.sequences:
            kv, token_ids = sequence.kv, sequence.token_ids
            assert kv.num_tokens == len(token_ids)
            for position, token_id in enumerate(token_ids):
                slot, in_window = kv.slots_of_groups(position)
                assert self.content[slot] == (position, token_id)
                if position > kv.num_tokens - WINDOW:
                    assert self.content[in_window] == (position, token_id)


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
