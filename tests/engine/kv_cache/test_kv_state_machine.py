"""Random operations in any order: every sequence reads its own tokens, and no block is lost or has two owners."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from outrider.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from tests.support.fake_kv_cache import ScriptedKVCache
from tests.support.pool_integrity import check_pool
from tests.support.sequence_machine import SequenceMachine, Written

NUM_BLOCKS = 12
BLOCK = 3
TOKENS = st.integers(0, 1)  # two values, so that prefixes are often equal


class KVMachine(SequenceMachine):
    def __init__(self) -> None:
        super().__init__(BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK, hash_seed=b"seed"))
        self.cache = ScriptedKVCache(num_blocks=NUM_BLOCKS, block_size=BLOCK, num_layers=1)

    @rule(token_ids=st.lists(TOKENS, max_size=12), data=st.data())
    def create(self, token_ids, data):
        max_cached = data.draw(st.integers(0, len(token_ids)))
        kv = SequenceKV.create(self.pool, token_ids, max_cached_tokens=max_cached)
        assert kv.num_tokens <= max_cached
        self.sequences.append(Written(kv, token_ids[: kv.num_tokens]))

    @precondition(lambda self: self.sequences)
    @rule(token_ids=st.lists(TOKENS, min_size=1, max_size=8), num_rejected=st.integers(0, 4), data=st.data())
    def write_and_keep_some(self, token_ids, num_rejected, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        kv, start = sequence.kv, sequence.kv.num_tokens
        end = start + len(token_ids)
        needed, free, table = kv.num_blocks_needed(end), self.pool.num_free_blocks, kv.block_ids.copy()
        try:
            copies = kv.reserve(end)
        except NoFreeBlocksError:
            assert needed > free
            assert kv.block_ids == table
            return
        assert free - self.pool.num_free_blocks == needed
        self.cache.copy_blocks(copies)
        for position, token_id in enumerate(token_ids, start=start):
            block_id = kv.block_ids[position // BLOCK]
            assert not self.pool.is_shared(block_id)
            self.cache.write_whole_token(block_id * BLOCK + position % BLOCK, token_id=token_id, position=position)
        kept = max(start, end - num_rejected)
        kv.truncate(kept)
        sequence.token_ids += token_ids[: kept - start]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def reserve_ahead(self, data):
        kv = data.draw(st.sampled_from(self.sequences)).kv
        if kv.num_blocks_needed(kv.num_tokens + BLOCK) <= self.pool.num_free_blocks:
            self.cache.copy_blocks(kv.reserve(kv.num_tokens + BLOCK))
        if data.draw(st.booleans()):
            kv.release_beyond(kv.num_tokens)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def publish(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        sequence.kv.publish(sequence.token_ids)

    @invariant()
    def the_pool_is_whole(self):
        check_pool(self.pool, [sequence.kv.block_ids for sequence in self.sequences])

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for sequence in self.sequences:
            assert sequence.kv.num_tokens == len(sequence.token_ids)
            assert sequence.kv.block_table().tolist() == sequence.kv.block_ids
            assert self.cache.context(sequence.kv.block_ids, sequence.kv.num_tokens) == sequence.token_ids


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
