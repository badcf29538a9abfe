"""Checks that every block of a pool is in exactly one state and held by the tables that name it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.errors import InternalError
from outrider.speculation.proposers.draft_model import DraftModelProposer


def check_proposer(proposer: DraftModelProposer) -> None:
    """Raises InternalError unless the pool's blocks are exactly those of the paths."""
    trees = proposer._trees.values()
    check_pool(proposer._forward.pool, [path.kv.block_ids for tree in trees for path in tree.paths])


def check_pool(pool: BlockPool, tables: Iterable[Sequence[int]] | None = None) -> None:
    """Checks every invariant. With `tables`, all existing block tables, it also checks for leaks and double owners.

    Raises InternalError naming the first wrong block.
    """
    free, evictable = set(pool._free), set(pool._evictable)
    if len(free) != len(pool._free):
        raise InternalError("a block is twice in the free list")
    for block_id, count in enumerate(pool._ref_counts):
        block_hash = pool._hash_of[block_id]
        if count < 0 or (block_id in free) != (count == 0 and block_hash is None):
            raise InternalError(f"block {block_id}: free list disagrees with reference count {count}")
        if (block_id in evictable) != (count == 0 and block_hash is not None):
            raise InternalError(f"block {block_id}: eviction list disagrees with reference count {count}")
        if block_hash is not None and pool._block_of.get(block_hash) != block_id:
            raise InternalError(f"block {block_id}: the prefix cache does not know its hash")
    if len(pool._block_of) != sum(block_hash is not None for block_hash in pool._hash_of):
        raise InternalError("the prefix cache names a block that has no hash")
    if pool._num_references != sum(pool._ref_counts):
        raise InternalError("the number of references disagrees with the reference counts")
    if tables is None:
        return
    held = Counter(block_id for table in tables for block_id in table)
    for block_id, count in enumerate(pool._ref_counts):
        if held[block_id] != count:
            raise InternalError(f"block {block_id}: {held[block_id]} tables hold it, its count is {count}")
