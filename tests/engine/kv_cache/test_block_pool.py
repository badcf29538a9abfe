from __future__ import annotations

import pytest

from outrider.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.errors import CapacityError, InternalError
from tests.support.pool_integrity import check_pool

BLOCK = 4


def make_pool(num_blocks: int = 8, *, seed: bytes = b"model", enable_prefix_cache: bool = True) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=BLOCK, hash_seed=seed, enable_prefix_cache=enable_prefix_cache)


def cache_tokens(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Publishes the full blocks of `token_ids` in the prefix cache, releases them, and returns their ids."""
    kv = computed(pool, token_ids)
    block_ids = kv.block_ids.copy()
    kv.free()
    return block_ids


def computed(pool: BlockPool, token_ids: list[int]) -> SequenceKV:
    kv = SequenceKV(pool)
    kv.reserve(len(token_ids))
    kv.advance(len(token_ids))
    kv.publish(token_ids)
    return kv


def test_allocating_too_many_raises_and_changes_nothing():
    pool = make_pool()
    held = pool.allocate(5)
    with pytest.raises(NoFreeBlocksError, match="4 KV blocks") as caught:
        pool.allocate(4)
    assert isinstance(caught.value, CapacityError)
    assert pool.num_free_blocks == 3
    check_pool(pool, [held])


def test_fresh_memory_is_touched_last():
    pool = make_pool()
    first = pool.allocate(2)
    pool.release(first)
    assert set(pool.allocate(2)) == set(first)


def test_releasing_twice_is_caught():
    pool = make_pool()
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_a_match_holds_whole_blocks_within_max_tokens():
    pool = make_pool()
    tokens = list(range(12))
    cached = cache_tokens(pool, tokens)
    for max_tokens, num_blocks in [(0, 0), (3, 0), (4, 1), (11, 2), (12, 3), (100, 3)]:
        found = pool.match_prefix(tokens, max_tokens=max_tokens)
        assert found == cached[:num_blocks]
        pool.release(found)


def test_models_with_different_seeds_have_different_names():
    one, other = make_pool(seed=b"a").new_hashes(), make_pool(seed=b"b").new_hashes()
    assert one.append([1, 2, 3, 4]) != other.append([1, 2, 3, 4])


def test_equal_tokens_have_other_names_after_other_tokens():
    chain = make_pool().new_hashes()
    tokens = [1, 2, 3, 4] * 2
    assert chain.append(tokens) != chain.append(tokens)


def test_blocks_are_evicted_least_recently_released_first():
    pool = make_pool(num_blocks=3)
    for token in (1, 2, 3):
        cache_tokens(pool, [token] * BLOCK)
    revived = pool.match_prefix([1] * BLOCK, max_tokens=BLOCK)  # used again, so no longer the oldest
    pool.release(revived)
    taken = pool.allocate(1)
    assert pool.match_prefix([2] * BLOCK, max_tokens=BLOCK) == []
    for token in (1, 3):
        pool.release(pool.match_prefix([token] * BLOCK, max_tokens=BLOCK) or pytest.fail(f"{token} was evicted"))
    check_pool(pool, [taken])


def test_a_chain_is_evicted_from_its_end():
    pool = make_pool(num_blocks=3)
    tokens = list(range(12))
    cached = cache_tokens(pool, tokens)
    taken = pool.allocate(1)
    found = pool.match_prefix(tokens, max_tokens=12)
    assert found == cached[:2]
    check_pool(pool, [taken, found])


def test_free_blocks_are_used_before_anything_is_evicted():
    pool = make_pool(num_blocks=3)
    cached = cache_tokens(pool, list(range(8)))
    assert not set(pool.allocate(1)) & set(cached)
    assert set(pool.allocate(1)) < set(cached)


def test_without_prefix_cache_nothing_is_kept():
    pool = make_pool(enable_prefix_cache=False)
    cache_tokens(pool, list(range(8)))
    assert pool.match_prefix(list(range(8)), max_tokens=8) == []
    check_pool(pool, [])


def test_integrity_names_a_leaked_and_a_doubly_owned_block():
    pool = make_pool()
    (block,) = pool.allocate(1)
    check_pool(pool)
    with pytest.raises(InternalError, match=f"block {block}: 0 tables hold it, its count is 1"):
        check_pool(pool, [])
    with pytest.raises(InternalError, match=f"block {block}: 2 tables hold it, its count is 1"):
        check_pool(pool, [[block], [block]])


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lambda pool: pool._ref_counts.__setitem__(pool._free[0], 1),
        lambda pool: pool._block_of.clear(),
        lambda pool: pool._block_of.__setitem__(b"stray", 0),
        lambda pool: pool._evictable.clear(),
    ],
    ids=["twice free", "lost", "free with a count", "hash unknown", "stray hash", "not evictable"],
)
def test_integrity_finds_broken_bookkeeping(break_it):
    pool = make_pool()
    cache_tokens(pool, list(range(8)))
    break_it(pool)
    with pytest.raises(InternalError):
        check_pool(pool)
