"""Random operations of sequences whose evicted blocks move to main memory: no block ever has other tokens' KV."""

from __future__ import annotations

import random

import pytest

from outrider.engine.kv_cache.block_copies import BlockCopies
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.host_store import HostStore
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from tests.support.fake_kv_cache import ScriptedKVCache
from tests.support.host_prices import FixedPrice
from tests.support.pool_integrity import check_pool

BLOCK, NUM_BLOCKS, NUM_SLOTS = 3, 10, 7
MAX_TOKENS = 15
STEMS = [[first, *range(1, MAX_TOKENS)] for first in range(3)]


class Soak:
    """Sequences over a pool and a store that are both too small for them."""

    def __init__(self, seed):
        self.choice = random.Random(seed)
        self.pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK, hash_seed=b"")
        self.cache = ScriptedKVCache(num_blocks=NUM_BLOCKS, block_size=BLOCK)
        self.block_bytes = BLOCK * sum(plane.bytes_per_token for plane in self.cache.planes)
        copies = BlockCopies(self.cache, (NUM_SLOTS + 1) * self.block_bytes, FixedPrice())
        assert copies.num_slots == [NUM_SLOTS]
        self.store = HostStore(copies, FixedPrice())
        self.pool.use_host(self.store)
        self.running, self.preempted, self.num_keys = [], {}, 0

    def start(self, token_ids):
        if self.pool.num_blocks_for(len(token_ids)) > self.pool.num_free_blocks:
            return False
        kv = SequenceKV.create(self.pool, token_ids, max_cached_tokens=len(token_ids) - 1, kept_back=0)
        if not kv.fits(len(token_ids)):
            kv.free()
            return False
        self.write(kv, token_ids)
        self.running.append((kv, token_ids))
        return True

    def write(self, kv, token_ids):
        self.cache.copy_blocks(kv.reserve(len(token_ids)))
        for position in range(kv.num_tokens, len(token_ids)):
            self.cache.write_whole_token(kv.slot(position), token_id=token_ids[position], position=position)
        kv.advance(len(token_ids))
        kv.publish(token_ids)

    def begin(self):
        stem = self.choice.choice(STEMS)
        self.start([*stem[: self.choice.randrange(1, MAX_TOKENS)], self.choice.randrange(2)])

    def grow(self):
        kv, token_ids = self.choice.choice(self.running)
        longer = [*token_ids, self.choice.randrange(2)]
        if len(longer) < NUM_BLOCKS * BLOCK // 2 and kv.fits(len(longer)):
            token_ids[:] = longer
            self.write(kv, token_ids)

    def fork(self):
        kv, token_ids = self.choice.choice(self.running)
        self.running.append((kv.fork(), token_ids.copy()))

    def take(self):
        return self.running.pop(self.choice.randrange(len(self.running)))

    def end(self):
        self.take()[0].free()

    def preempt(self):
        kv, token_ids = self.take()
        self.num_keys += 1
        self.preempted[self.num_keys] = token_ids
        kv.preempt(self.num_keys, token_ids)

    def resume(self):
        key = self.choice.choice(sorted(self.preempted))
        if self.choice.random() < 0.2 or self.start(self.preempted[key]):
            self.pool.forget_preempted(key)
            del self.preempted[key]

    def change_price(self):
        self.store.price.load_pays, self.store.price.save_pays = (self.choice.random() < 0.8 for _ in range(2))

    def step(self):
        operations = [self.begin, self.begin, self.change_price]
        operations += [self.grow, self.fork, self.end, self.end, self.preempt] if self.running else []
        operations += [self.resume] if self.preempted else []
        self.choice.choice(operations)()
        check_pool(self.pool, [kv.block_ids for kv, _ in self.running])
        for kv, token_ids in self.running:
            assert self.cache.context(kv.block_ids, kv.num_tokens) == token_ids
        assert self.store.num_bytes <= NUM_SLOTS * self.block_bytes
        if not self.preempted:
            assert not self.store._num_keepers
            assert not any(self.store._preempted)


@pytest.mark.parametrize("seed", range(4))
def test_sequences_read_their_own_tokens(seed):
    soak = Soak(seed)
    for _ in range(1500):
        soak.step()
    store = soak.store
    assert min(store.num_saved, store.num_loaded, store.num_dropped, store.num_refused) > 20
