from __future__ import annotations

import hashlib

import pytest

from outrider.engine.kv_cache import block_hashes
from outrider.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError
from outrider.engine.kv_cache.sequence_kv import SequenceKV

BLOCK = 4


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=8, block_size=BLOCK, hash_seed=b"model")


def computed(pool: BlockPool, token_ids: list[int]) -> SequenceKV:
    """A sequence whose KV is there for all of `token_ids`."""
    kv = SequenceKV.create(pool, token_ids, max_cached_tokens=len(token_ids))
    kv.reserve(len(token_ids))
    kv.advance(len(token_ids))
    return kv


def test_a_new_sequence_without_cached_prefix_holds_nothing(pool):
    kv = SequenceKV.create(pool, [1, 2, 3, 4, 5], max_cached_tokens=4)
    assert (kv.block_ids, kv.num_tokens, kv.num_cached_tokens) == ([], 0, 0)


def test_reserving_takes_as_many_blocks_as_it_says(pool):
    kv = SequenceKV.create(pool, [], max_cached_tokens=0)
    for num_tokens, num_blocks in [(1, 1), (4, 1), (5, 2), (9, 3), (9, 3)]:
        needed = kv.num_blocks_needed(num_tokens)
        before = pool.num_free_blocks
        assert kv.reserve(num_tokens) == []
        assert before - pool.num_free_blocks == needed
        assert len(kv.block_ids) == num_blocks
        assert kv.capacity == num_blocks * BLOCK


def test_reserving_says_nothing_about_validity(pool):
    kv = SequenceKV.create(pool, [], max_cached_tokens=0)
    kv.reserve(6)
    assert kv.num_tokens == 0
    kv.advance(6)
    assert kv.num_tokens == 6


def test_validity_cannot_go_beyond_the_blocks(pool):
    kv = SequenceKV.create(pool, [], max_cached_tokens=0)
    kv.reserve(4)
    with pytest.raises(AssertionError):
        kv.advance(5)
    with pytest.raises(AssertionError):
        kv.truncate(5)


def test_a_reservation_that_does_not_fit_changes_nothing(pool):
    held = pool.allocate(6)
    kv = computed(pool, [1, 2, 3])
    table = kv.block_ids.copy()
    with pytest.raises(NoFreeBlocksError):
        kv.reserve(3 + 2 * BLOCK)
    assert kv.block_ids == table
    pool.check_integrity([held, table])


def test_truncating_frees_whole_blocks_past_it(pool):
    kv = SequenceKV.create(pool, [], max_cached_tokens=0)
    kv.reserve(11)
    kv.truncate(5)
    assert kv.num_tokens == 5
    assert len(kv.block_ids) == 2
    kv.truncate(4)
    assert len(kv.block_ids) == 1
    pool.check_integrity([kv.block_ids])


def test_releasing_slack_keeps_what_is_valid(pool):
    kv = computed(pool, [1, 2, 3, 4, 5])
    kv.reserve(16)
    kv.release_beyond(6)
    assert (len(kv.block_ids), kv.num_tokens) == (2, 5)
    with pytest.raises(AssertionError):
        kv.release_beyond(4)


def test_a_sequence_finds_what_another_published(pool):
    tokens = list(range(10))
    first = computed(pool, tokens)
    first.publish(tokens)
    second = SequenceKV.create(pool, tokens, max_cached_tokens=9)
    assert second.block_ids == first.block_ids[:2]
    assert second.num_tokens == second.num_cached_tokens == 8
    pool.check_integrity([first.block_ids, second.block_ids])


def test_what_one_tenant_published_no_other_finds(pool):
    tokens = list(range(8))

    def found(salt):
        return SequenceKV.create(pool, tokens, max_cached_tokens=8, cache_salt=salt).num_cached_tokens

    kv = SequenceKV.create(pool, tokens, max_cached_tokens=8, cache_salt=b"alice")
    kv.reserve(8)
    kv.advance(8)
    kv.fork().publish(tokens)  # a copy keeps the salt
    assert [found(salt) for salt in (b"alice", b"bob", b"")] == [8, 0, 0]


def test_nothing_unpublished_is_ever_found(pool):
    tokens = list(range(8))
    kv = computed(pool, tokens)
    assert SequenceKV.create(pool, tokens, max_cached_tokens=8).num_tokens == 0
    kv.free()
    assert SequenceKV.create(pool, tokens, max_cached_tokens=8).num_tokens == 0


def test_only_valid_tokens_are_published(pool):
    tokens = list(range(12))
    kv = SequenceKV.create(pool, tokens, max_cached_tokens=0)
    kv.reserve(12)
    kv.advance(7)
    kv.publish(tokens)
    assert pool.num_cached_blocks == 1


def test_the_prefix_survives_its_sequence(pool):
    tokens = list(range(8))
    kv = computed(pool, tokens)
    kv.publish(tokens)
    blocks = kv.block_ids.copy()
    kv.free()
    kv.free()
    assert kv.block_ids == []
    again = SequenceKV.create(pool, tokens, max_cached_tokens=8)
    assert again.block_ids == blocks
    pool.check_integrity([again.block_ids])


def test_publishing_step_by_step_gives_the_names_of_publishing_at_once(pool):
    tokens = list(range(100, 112))
    kv = SequenceKV.create(pool, tokens, max_cached_tokens=0)
    for end in range(1, 13):
        kv.reserve(end)
        kv.advance(end)
        kv.publish(tokens[:end])
    assert pool.match_prefix(tokens, max_tokens=12) == kv.block_ids


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


def test_forks_share_every_valid_block_and_nothing_else(pool):
    kv = computed(pool, [1, 2, 3, 4, 5])
    kv.reserve(12)
    other = kv.fork()
    assert other.block_ids == kv.block_ids[:2]
    assert other.num_tokens == 5
    pool.check_integrity([kv.block_ids, other.block_ids])


def test_writing_into_a_shared_partial_block_copies_it(pool):
    kv = computed(pool, [1, 2, 3, 4, 5])
    other = kv.fork()
    shared = kv.block_ids[1]
    assert kv.num_blocks_needed(6) == 1
    assert kv.reserve(6) == [(shared, kv.block_ids[1])]
    assert kv.block_ids[1] != shared
    assert kv.block_ids[0] == other.block_ids[0]
    assert other.reserve(6) == []  # the last holder writes in place
    assert other.block_ids[1] == shared
    pool.check_integrity([kv.block_ids, other.block_ids])


def test_a_copy_and_new_blocks_are_reserved_together_or_not_at_all(pool):
    kv = computed(pool, [1, 2, 3, 4, 5])
    other = kv.fork()
    held = pool.allocate(5)
    assert kv.num_blocks_needed(9) == 2
    with pytest.raises(NoFreeBlocksError):
        kv.reserve(9)
    assert kv.block_ids == other.block_ids
    pool.release(held)
    copies = kv.reserve(9)
    assert len(copies) == 1
    assert len(kv.block_ids) == 3
    pool.check_integrity([kv.block_ids, other.block_ids])


def test_a_fork_at_a_block_boundary_copies_nothing(pool):
    kv = computed(pool, [1, 2, 3, 4])
    other = kv.fork()
    assert kv.num_blocks_needed(5) == 1
    assert kv.reserve(5) == other.reserve(5) == []
    assert kv.block_ids[0] == other.block_ids[0]
    assert kv.block_ids[1] != other.block_ids[1]


def test_reserving_what_is_valid_already_copies_nothing(pool):
    kv = computed(pool, [1, 2, 3])
    kv.fork()
    assert kv.num_blocks_needed(3) == 0
    assert kv.reserve(3) == []


def test_a_published_block_that_is_written_again_leaves_the_cache(pool):
    kv = computed(pool, [1, 2, 3, 4])
    kv.publish([1, 2, 3, 4])
    kv.truncate(3)
    kv.reserve(4)
    kv.advance(4)
    assert SequenceKV.create(pool, [1, 2, 3, 4], max_cached_tokens=4).num_tokens == 0
    kv.publish([1, 2, 3, 9])
    assert SequenceKV.create(pool, [1, 2, 3, 9], max_cached_tokens=4).num_tokens == 4


def test_a_published_block_that_others_read_is_copied_before_it_is_written_again(pool):
    kv = computed(pool, [1, 2, 3, 4])
    kv.publish([1, 2, 3, 4])
    reader = SequenceKV.create(pool, [1, 2, 3, 4], max_cached_tokens=4)
    kv.truncate(3)
    assert kv.reserve(4) == [(reader.block_ids[0], kv.block_ids[0])]
    assert SequenceKV.create(pool, [1, 2, 3, 4], max_cached_tokens=4).block_ids == reader.block_ids


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


def test_block_table_follows_every_change_of_the_blocks():
    pool = BlockPool(num_blocks=300, block_size=4, hash_seed=b"", enable_prefix_cache=False)
    kv = SequenceKV.create(pool, [], max_cached_tokens=0)

    def check(*tables: SequenceKV) -> None:
        for table in tables:
            assert table.block_table().tolist() == table.block_ids

    kv.reserve(600)
    check(kv)
    kv.advance(599)
    kv.truncate(42)
    check(kv)
    other = kv.fork()
    check(kv, other)
    assert other.reserve(44), "the shared partial block is copied"
    check(kv, other)
    other.advance(44)
    kv.reserve(80)
    check(kv, other)
    kv.free()
    check(kv, other)
