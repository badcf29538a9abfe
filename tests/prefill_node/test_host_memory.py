"""Prompts whose blocks were evicted to main memory are pushed without being computed."""

from __future__ import annotations

from outrider.engine.kv_cache.block_copies import BlockCopies
from outrider.engine.kv_cache.host_store import HostStore
from tests.support.host_prices import FixedPrice

PROMPTS = [list(range(first, first + 30)) for first in (100, 200, 300)]


def test_evicted_prompts_come_back(make_rig):
    rig = make_rig(num_blocks=10)
    pool = rig.engine.pool
    store = HostStore(BlockCopies(rig.engine.kv_cache, 1 << 16, FixedPrice()), FixedPrice())
    pool.use_host(store)
    rig.start()
    for tokens in PROMPTS:
        rig.prefill(tokens)
    assert store.num_saved > 7
    for tokens in PROMPTS:
        result, blocks = rig.prefill(tokens)
        assert (result.num_cached_tokens, result.num_computed_tokens) == (28, 2)
        assert rig.decode.cache.context(blocks, 30) == tokens
    assert store.num_loaded >= 14
