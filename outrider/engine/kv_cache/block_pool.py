"""Allocation of KV blocks: reference counts, the prefix cache, eviction. Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from outrider.engine.kv_cache.block_hashes import BlockHashes
from outrider.errors import CapacityError


class NoFreeBlocksError(CapacityError):
    """Raised if an allocation needs more blocks than are free. The pool is then unchanged."""

    reason = "NO_FREE_BLOCKS"


class BlockPool:
    """Blocks 0 … num_blocks - 1, each in exactly one of three states.

    - *used*: its reference count is at least 1; it may be published in the prefix cache as well.
    - *evictable*: its count is 0, but it is still published. A prefix match takes it into use again. If no block is
      free, `allocate` evicts evictable blocks, the least recently released one first.
    - *free*: its count is 0, and it is not published.

    A block enters the prefix cache only through `register`, once its tokens are committed and its KV is complete
    (`SequenceKV.publish`). Not thread-safe: the engine thread owns it. Vocabulary and policy follow vLLM v1's block
    pool.
    """

    def __init__(self, *, num_blocks: int, block_size: int, hash_seed: bytes, enable_prefix_cache: bool = True) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._hash_seed = hash_seed
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # A stack with the lowest ids on top, so that unwritten memory stays uncommitted for as long as possible.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_free_blocks(self) -> int:
        """The number of free and evictable blocks."""
        return len(self._free) + len(self._evictable)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks needed to hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # --- allocation -----------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocates `num_blocks` blocks with a reference count of 1 each; their content is undefined.

        Evicts the least recently released cached blocks if too few are free.

        Raises: NoFreeBlocksError, with nothing changed, if too few blocks are free or evictable.
        """
        if num_blocks > self.num_free_blocks:
            raise NoFreeBlocksError(
                f"{num_blocks} KV blocks are needed, but only {self.num_free_blocks} of {self.num_blocks} are free"
            )
        return [self._take_one() for _ in range(num_blocks)]

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each of these used blocks."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops a reference to each block. At zero a block becomes evictable if it is published, otherwise free.

        Blocks released earlier are evicted earlier. Release a sequence's last block first, because no prefix match can
        use a block without the blocks before it.
        """
        for block_id in block_ids:
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is released twice"
            self._ref_counts[block_id] = count
            if count:
                continue
            if self._hash_of[block_id] is None:
                self._free.append(block_id)
            else:
                self._evictable[block_id] = None

    def is_shared(self, block_id: int) -> bool:
        """Returns whether a block has more than one reference, so that it must be copied before it is written."""
        return self._ref_counts[block_id] > 1

    # --- prefix cache ---------------------------------------------------------------------

    def new_hashes(self, cache_salt: bytes = b"") -> BlockHashes:
        """Returns an empty hash chain with this pool's seed and a tenant's salt."""
        return BlockHashes(hash_seed=self._hash_seed, block_size=self.block_size, cache_salt=cache_salt)

    def match_prefix(
        self, token_ids: Sequence[int], *, max_tokens: int, hashes: BlockHashes | None = None
    ) -> list[int]:
        """Returns the cached blocks of the longest prefix of `token_ids` with at most `max_tokens` tokens, and adds a
        reference to each.

        `hashes`, which must be empty, receives the hashes of the returned blocks.
        """
        if not self.enable_prefix_cache:
            return []
        chain = self.new_hashes() if hashes is None else hashes
        assert len(chain) == 0
        matched: list[int] = []
        for _ in range(min(max_tokens, len(token_ids)) // self.block_size):
            block_id = self._block_of.get(chain.append(token_ids))
            if block_id is None:
                chain.truncate(len(matched))
                break
            if self._ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self._ref_counts[block_id] += 1
            matched.append(block_id)
        return matched

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Publishes a used block under its content hash. If the hash is already published, the first block keeps it."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
        if self._hash_of[block_id] is not None or block_hash in self._block_of:
            return
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id

    def withdraw(self, block_id: int) -> None:
        """Removes a used block from the prefix cache, before its content changes."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
        self._forget_hash(block_id)

    def _take_one(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            self._forget_hash(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _forget_hash(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block_id] = None
