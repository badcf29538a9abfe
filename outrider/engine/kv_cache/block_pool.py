"""Allocation of KV blocks: reference counts, the prefix cache, eviction. Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from outrider.engine.kv_cache.block_hashes import BlockHashes
from outrider.engine.kv_cache.host_store import HostStore
from outrider.engine.kv_cache.planes import KEPT_TOKENS, STATE_WINDOW, first_kept_token
from outrider.errors import CapacityError

TO_LOAD = -1
"""Stands for the number of a block that is in main memory."""


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

    A pool has the blocks of one group of layers (see `LayerGroup`). The pool of the layers without a window also has
    those of the others, `windows`, of which the last one may be a StatePool.

    With a `host` store (see `use_host`), evicted blocks may move to main memory, and come back by a prefix match that
    may load them.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        hash_seed: bytes,
        enable_prefix_cache: bool = True,
        windows: Sequence[WindowPool | StatePool] = (),
        first_block_id: int = 0,
    ) -> None:
        """`first_block_id`: the number of the first block, if it is not 0."""
        assert num_blocks >= 1
        assert block_size >= 1
        self.windows = tuple(windows)
        self.host: HostStore | None = None
        self._group = 0  # of `host`
        self.num_blocks = num_blocks
        self.num_blocks_together = num_blocks
        """Maximum number of blocks of a sequence and its forks, see `part_for`."""
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._hash_seed = hash_seed
        end = first_block_id + num_blocks
        self._ref_counts = [0] * end
        self._hash_of: list[bytes | None] = [None] * end
        self._block_of: dict[bytes, int] = {}
        # A stack with the lowest ids on top, so that unwritten memory stays uncommitted for as long as possible.
        self._free = list(range(end - 1, first_block_id - 1, -1))
        self._num_references = 0  # the sum of `_ref_counts`
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_free_blocks(self) -> int:
        """The number of free and evictable blocks."""
        return len(self._free) + len(self._evictable)

    @property
    def free_by_group(self) -> tuple[int, ...]:
        """`num_free_blocks` of this pool and of each of `windows`."""
        return (self.num_free_blocks, *[pool.num_free_blocks for pool in self.windows])

    @property
    def num_free_in_scarcest(self) -> int:
        """`num_free_blocks` if every group had as large a part of its blocks free as the one with the smallest part."""
        parts = [pool.num_free_blocks * self.num_blocks // pool.num_blocks for pool in self.windows]
        return max(min(self.num_free_blocks, *parts), 0) if parts else self.num_free_blocks

    def as_reported(self, num_blocks: int) -> int:
        """Returns the `num_free_in_scarcest` with which there is room for sequences that need `num_blocks` blocks. An
        empty pool has room for any.
        """
        return min(max(self.num_free_in_scarcest + num_blocks - self.num_free_blocks, 0), self.num_blocks)

    def use_host(self, host: HostStore, group: int = 0) -> None:
        """Makes this pool, of the group with that number, and those of `windows` move evicted blocks to main memory."""
        self.host, self._group = host, group
        for index, pool in enumerate(self.windows, start=1):
            pool.use_host(host, index)

    @property
    def has_host_blocks(self) -> bool:
        """Whether main memory has blocks, so that a prefix match may find more with them."""
        return self.host is not None and self.host.num_bytes > 0

    def forget_preempted(self, key: int) -> None:
        """Ends what `SequenceKV.preempt` began for the sequence with this key: it runs again or has ended."""
        if self.host is not None:
            self.host.forget(key)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks needed to hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def part_for(self, token_ids: Sequence[int], *, max_tokens: int, cache_salt: bytes = b"") -> BlockPool:
        """Returns the pool in which a new sequence has its blocks: this one, unless it is divided (see DividedPool).

        For the arguments see SequenceKV.create.
        """
        return self

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
        evicted: list[tuple[int, bytes]] = []
        taken = [self._take_one(evicted) for _ in range(num_blocks)]
        self._num_references += num_blocks
        if evicted and self.host is not None:
            self.host.save(self._group, evicted)
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each of these used blocks."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
            self._ref_counts[block_id] += 1
            self._num_references += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops a reference to each block. At zero a block becomes evictable if it is published, otherwise free.

        Blocks released earlier are evicted earlier. Release a sequence's last block first, because no prefix match can
        use a block without the blocks before it.
        """
        for block_id in block_ids:
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is released twice"
            self._ref_counts[block_id] = count
            self._num_references -= 1
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
        self, token_ids: Sequence[int], *, max_tokens: int, hashes: BlockHashes | None = None, may_load: bool = False
    ) -> list[int]:
        """Returns the cached blocks of the longest prefix of `token_ids` with at most `max_tokens` tokens, and adds a
        reference to each.

        `may_load`: TO_LOAD stands for blocks that main memory has, as many as may be loaded now; see `load`.

        `hashes`, which must be empty, receives the hashes of the returned blocks.
        """
        if not self.enable_prefix_cache:
            return []
        chain = self.new_hashes() if hashes is None else hashes
        assert len(chain) == 0
        matched: list[int] = []
        max_loads = self.host.max_loads() if may_load and self.host is not None else 0
        for _ in range(min(max_tokens, len(token_ids)) // self.block_size):
            block_hash = chain.append(token_ids)
            block_id = self._block_of.get(block_hash)
            if block_id is not None:
                self._take_published(block_id)
            elif max_loads and self.has(block_hash):
                block_id = TO_LOAD
                max_loads -= 1
            else:
                chain.truncate(len(matched))
                break
            matched.append(block_id)
        return matched

    def load(self, block_ids: list[int], hashes: BlockHashes) -> int:
        """Loads what `match_prefix` found in main memory. Returns the number of leading blocks that are in the pool
        now. These are used and published, and the others remain TO_LOAD or used.
        """
        for index, block_id in enumerate(block_ids):
            if block_id == TO_LOAD:
                has_time = self.host is not None and self.host.has_time
                if not has_time or (loaded := self._load(*hashes[index : index + 1])) is None:
                    return index
                block_ids[index] = loaded
        return len(block_ids)

    def has(self, block_hash: bytes, *, may_load: bool = True) -> bool:
        """Returns whether the prefix cache, or with `may_load` main memory, has the block with this content."""
        if block_hash in self._block_of:
            return True
        return may_load and self.host is not None and self.host.has(self._group, block_hash)

    def num_references(self, block_hash: bytes) -> int:
        """Returns the reference count of the published block with this content; -1: there is none."""
        block_id = self._block_of.get(block_hash)
        return -1 if block_id is None else self._ref_counts[block_id]

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

    def _take_published(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            del self._evictable[block_id]
        self._ref_counts[block_id] += 1
        self._num_references += 1

    def _take_one(self, evicted: list[tuple[int, bytes]]) -> int:
        """Takes a free block, or an evictable one, which it adds to `evicted` with its hash."""
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            if (block_hash := self._hash_of[block_id]) is not None:
                evicted.append((block_id, block_hash))
            self._forget_hash(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _load(self, block_hash: bytes) -> int | None:
        """Loads a block from main memory. It is used and published afterwards. Returns None if it cannot be loaded."""
        if self.host is None or not self.num_free_blocks or not self.host.has(self._group, block_hash):
            return None
        (block_id,) = self.allocate(1)
        if not self.host.load(self._group, block_id, block_hash):
            self.release((block_id,))
            return None
        self.register(block_id, block_hash)
        return block_id

    def _forget_hash(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block_id] = None


class CountedPool(BlockPool):
    """A pool from which a sequence takes a block for each one that it gives back, as in WindowTable and StateTable.

    That must not fail, even if the blocks that it gives up are shared and so do not become free. So a shared block
    counts as often as it is used: `num_free_blocks` is the number of blocks minus the number of references.
    """

    def __init__(self, *, window: int, **shared: Any) -> None:
        """`window`: that of the planes whose blocks these are, as in PlaneSpec. `shared`: see BlockPool."""
        super().__init__(**shared)
        self.window = window

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that may be allocated; negative if forks have taken more references than blocks."""
        return self.num_blocks - self._num_references

    def take(self, block_hashes: Sequence[bytes]) -> list[int] | None:
        """Returns the blocks with these hashes, each with a reference more. Returns None, with nothing taken, if one
        must be loaded from main memory and cannot be. There must be as many free blocks.
        """
        block_ids = [self._block_of.get(block_hash) for block_hash in block_hashes]
        for block_id in block_ids:  # first, since loading may evict blocks
            if block_id is not None:
                self._take_published(block_id)
        for index, block_hash in enumerate(block_hashes):
            if block_ids[index] is None:
                block_ids[index] = self._load(block_hash)
        taken = [block_id for block_id in block_ids if block_id is not None]
        if len(taken) == len(block_hashes):
            return taken
        self.release(reversed(taken))
        return None


class WindowPool(CountedPool):
    """The blocks of a group of layers with a sliding window. A sequence holds only those of its newest tokens."""

    def __init__(self, *, window: int, max_step_tokens: int, first_block: int, block_size: int, **shared: Any) -> None:
        """`max_step_tokens`: maximum number of a sequence's tokens in a step. `first_block`: number of block 0 of this
        pool where the blocks of all groups are numbered together, as in copies. Others: see CountedPool.

        The pool must have at least `max_held_blocks` blocks, so that one sequence can run.
        """
        super().__init__(window=window, block_size=block_size, **shared)
        self.max_step_tokens = max_step_tokens
        self.first_block = first_block
        self.max_held_blocks = max_held_blocks(window, max_step_tokens, block_size)

    def first_kept(self, num_tokens: int) -> int:
        """Returns the index of the first block that a sequence of `num_tokens` valid tokens keeps."""
        return first_kept_token(num_tokens, self.window) // self.block_size


class StatePool(CountedPool):
    """Slots of recurrent states, which are blocks with one entry each (see StateTable). A slot that is written does not
    change until nobody has it. It is published under the hash of the block that ends with the state's last token.
    """

    def __init__(self, **shared: Any) -> None:
        """`shared`: see CountedPool; `block_size` is that of the blocks that are hashed."""
        super().__init__(window=STATE_WINDOW, **shared)

    def evict_first(self, slot: int) -> None:
        """Makes a slot the next one to be evicted, if it is evictable."""
        if slot in self._evictable:
            self._evictable.move_to_end(slot, last=False)


def max_held_blocks(window: int, max_step_tokens: int, block_size: int) -> int:
    """Returns the maximum number of blocks that a sequence holds of a WindowPool."""
    return -(-(window + KEPT_TOKENS + max_step_tokens) // block_size)
