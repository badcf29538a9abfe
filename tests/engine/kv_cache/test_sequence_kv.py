from __future__ import annotations

import hashlib

import pytest

from outrider.engine.kv_cache import block_hashes
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from tests.support.pool_integrity import check_pool

BLOCK = 4


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=8, block_size=BLOCK, hash_seed=b"model")


def computed(pool: BlockPool, token_ids: list[int]) -> SequenceKV:
    """Makes a sequence that has the KV of all `token_ids`."""
    kv = SequenceKV.create(pool, token_ids, max_cached_tokens=len(token_ids))
    kv.reserve(len(token_ids))
    kv.advance(len(token_ids))
    return kv


def test_truncating_frees_whole_blocks_past_it(pool):
    kv = SequenceKV.create(pool, [], max_cached_tokens=0)
    kv.reserve(11)
    kv.truncate(5)
    assert kv.num_tokens == 5
    assert len(kv.block_ids) == 2
    kv.truncate(4)
    assert len(kv.block_ids) == 1
    check_pool(pool, [kv.block_ids])


def test_releasing_slack_keeps_what_is_valid(pool):
    kv = computed(pool, [1, 2, 3, 4, 5])
    kv.reserve(16)
    kv.release_beyond(6)
    assert (len(kv.block_ids), kv.num_tokens) == (2, 5)
    with pytest.raises(AssertionError):
        kv.release_beyond(4)


def test_what_one_tenant_published_no_other_finds(pool):
    tokens = list(range(8))

    def found(salt):
        return SequenceKV.create(pool, tokens, max_cached_tokens=8, cache_salt=salt).num_cached_tokens

    kv = SequenceKV.create(pool, tokens, max_cached_tokens=8, cache_salt=b"alice")
    kv.reserve(8)
    kv.advance(8)
    kv.fork().publish(tokens)  # a fork keeps the salt
    assert [found(salt) for salt in (b"alice", b"bob", b"")] == [8, 0, 0]


def test_only_valid_tokens_are_published(pool):
    tokens = list(range(12))
    kv = SequenceKV.create(pool, tokens, max_cached_tokens=0)
    kv.reserve(12)
    kv.advance(7)
    kv.publish(tokens)
    assert pool.match_prefix(tokens, max_tokens=12) == kv.block_ids[:1]


def test_a_step_hashes_only_the_block_that_it_fills(pool, monkeypatch):
    num_bytes: list[int] = []
    real_sha256 = hashlib.sha256

    def counting_sha256(data: bytes) -> hashlib._Hash:
        num_bytes.append(len(data))
        return real_sha256(data)

    tokens = list(range(29))
    kv = computed(pool, tokens)
    kv.publish(tokens)
    monkeypatch.setattr(block_hashes.hashlib, "sha256", counting_sha256)
    for token in range(29, 32):
        tokens.append(token)
        kv.reserve(len(tokens))
        kv.advance(len(tokens))
        kv.publish(tokens)
    assert num_bytes == [32 + 4 * BLOCK]


def test_a_published_block_that_is_written_again_leaves_the_cache(pool):
    kv = computed(pool, [1, 2, 3, 4])
    kv.publish([1, 2, 3, 4])
    kv.truncate(3)
    kv.reserve(4)
    kv.advance(4)
    assert SequenceKV.create(pool, [1, 2, 3, 4], max_cached_tokens=4).num_tokens == 0
    kv.publish([1, 2, 3, 9])
    assert SequenceKV.create(pool, [1, 2, 3, 9], max_cached_tokens=4).num_tokens == 4


def test_a_fork_goes_on_publishing_under_its_own_tokens(pool):
    prompt = [1, 2, 3, 4, 5]
    kv = computed(pool, prompt)
    kv.publish(prompt)
    other = kv.fork()
    for table, tail in ((kv, [6, 7, 8]), (other, [9, 9, 9])):
        table.reserve(8)
        table.advance(8)
        table.publish(prompt + tail)
    assert pool.match_prefix([*prompt, 6, 7, 8], max_tokens=8) == kv.block_ids
    assert pool.match_prefix([*prompt, 9, 9, 9], max_tokens=8) == other.block_ids
