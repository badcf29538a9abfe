"""The block table of one sequence for layers with a sliding window. Torch-free."""

from __future__ import annotations

from array import array

from outrider.engine.kv_cache.base import Slots, slots_of
from outrider.engine.kv_cache.block_hashes import BlockHashes
from outrider.engine.kv_cache.block_pool import WindowPool
from outrider.engine.kv_cache.planes import first_kept_token


class WindowTable:
    """The blocks of one sequence in a WindowPool: those of the tokens that its next rows see, and of these rows.

    `block_ids` has the same indices as the sequence's table for other layers: entry i is the block of tokens
    [i * block_size, (i + 1) * block_size). Entries before `first` are blocks that were given back; nothing reads them.
    `SequenceKV` owns the table and says how many tokens are valid.
    """

    __slots__ = ("_block_size", "_first_token", "block_ids", "first", "pool")

    def __init__(self, pool: WindowPool) -> None:
        self.pool = pool
        self._block_size = pool.block_size
        self._first_token = 0  # earlier tokens may be missing from the first block
        self.block_ids = array("i")  # int32
        self.first = 0

    @property
    def end(self) -> int:
        """The number of tokens up to which blocks are reserved."""
        return len(self.block_ids) * self._block_size

    @property
    def num_held(self) -> int:
        """The number of blocks."""
        return len(self.block_ids) - self.first

    def max_reserved(self, num_valid: int) -> int:
        """Returns up to which token `reserve` would succeed if it need not copy a block."""
        num_spare = self.pool.num_free_blocks - self.num_needed(num_valid, num_valid)
        return max(-(-num_valid // self._block_size) * self._block_size, self.end) + num_spare * self._block_size

    def fill_slots(self, slots: Slots) -> None:
        """Enters the slots of the tokens for which there are blocks, by position. `slots`: [num_tokens] int64."""
        size = self._block_size
        first, end = self.first * size, min(self.end, len(slots))
        slots[first:end] = slots_of(self.block_ids[self.first :], end - first, size)

    def sees_all(self, num_tokens: int) -> bool:
        """Returns whether the table has every token that the row after the first `num_tokens` tokens sees."""
        return max(num_tokens - self.pool.window + 1, 0) >= max(self.first * self._block_size, self._first_token)

    def covers(self, num_valid: int, num_tokens: int) -> bool:
        """Returns whether the rows of the next step, from `num_valid` to at most `num_tokens`, have blocks."""
        return self.sees_all(num_valid) and min(num_tokens, num_valid + self.pool.max_step_tokens) <= self.end

    def num_needed(self, num_valid: int, num_tokens: int) -> int:
        """Returns how many more blocks than now `reserve` would hold; negative if it gives some back."""
        first, end = self._reserved(num_valid, num_tokens)
        return end - first - self.num_held

    def num_expected(self, num_tokens: int) -> int:
        """Returns how many more blocks than now `expect` would hold."""
        return self.num_needed(num_tokens, num_tokens)

    def reserve(self, num_valid: int, num_tokens: int) -> list[tuple[int, int]]:
        """Gives back the blocks that no row after the first `num_valid` tokens sees, and reserves blocks for the tokens
        from there to `num_tokens`, at most as many as the pool's `max_held_blocks`. So a sequence that has reserved all
        its tokens needs no more blocks later.

        Returns the (source, destination) blocks to copy before the step, as `SequenceKV.reserve` does. The pool must
        have `num_needed` free blocks.
        """
        pool = self.pool
        first, end = self._reserved(num_valid, num_tokens)
        if first < self.first or first > len(self.block_ids):  # none of the blocks is of use
            self.free()
            self.block_ids.extend([0] * first)
        else:
            pool.release(self.block_ids[self.first : first])
        self.first = first
        index, offset = divmod(num_valid, self._block_size)
        copies: list[tuple[int, int]] = []
        if offset and num_valid < num_tokens and index < len(self.block_ids):
            source = self.block_ids[index]
            if pool.is_shared(source):
                pool.release((source,))  # keeps its content, because it is still used
                (self.block_ids[index],) = pool.allocate(1)
                copies = [(pool.first_block + source, pool.first_block + self.block_ids[index])]
            else:
                pool.withdraw(source)
        if end > len(self.block_ids):
            self.block_ids.extend(pool.allocate(end - len(self.block_ids)))
        return copies

    def expect(self, num_tokens: int) -> None:
        """Reserves blocks for tokens that arrive from elsewhere: those that a sequence of `num_tokens` tokens keeps."""
        self.reserve(num_tokens, num_tokens)
        self._first_token = max(self._first_token, first_kept_token(num_tokens, self.pool.window))

    def release_beyond(self, num_tokens: int) -> None:
        """Gives back the blocks after the first `num_tokens` tokens."""
        num_kept = max(self.pool.num_blocks_for(num_tokens), self.first)
        if num_kept < len(self.block_ids):
            self.pool.release(reversed(self.block_ids[num_kept:]))
            del self.block_ids[num_kept:]

    def publish(self, index: int, block_hash: bytes) -> None:
        """Publishes the block with this index, which is full, if the table has it."""
        if max(self.first * self._block_size, self._first_token) <= index * self._block_size:
            self.pool.register(self.block_ids[index], block_hash)

    def longest_match(self, hashes: BlockHashes, max_blocks: int, *, may_load: bool) -> int:
        """Returns the largest number of leading blocks, at most `max_blocks`, for which the prefix cache has the blocks
        that a sequence keeps. With `may_load`, main memory may have them.
        """
        longest = num_present = 0
        for num_blocks, block_hash in enumerate(hashes[:max_blocks], start=1):
            num_present = num_present + 1 if self.pool.has(block_hash, may_load=may_load) else 0
            if num_present >= num_blocks - self.pool.first_kept(num_blocks * self._block_size):
                longest = num_blocks
        return longest

    def fork(self, num_tokens: int) -> WindowTable:
        """Returns a second table over the same first `num_tokens` tokens."""
        other = WindowTable(self.pool)
        other.block_ids = self.block_ids[: max(self.pool.num_blocks_for(num_tokens), self.first)]
        other.first, other._first_token = self.first, self._first_token
        self.pool.acquire(other.block_ids[self.first :])
        return other

    def match(self, hashes: BlockHashes, num_blocks: int) -> bool:
        """Fills the empty table from the prefix cache, for the first `num_blocks` blocks. Returns False if the pool has
        too few blocks to share them, or one has been lost since `longest_match`.
        """
        first = self.pool.first_kept(num_blocks * self._block_size)
        if num_blocks - first > self.pool.num_free_blocks:
            return False
        if (taken := self.pool.take(hashes[first:num_blocks])) is None:
            return False
        self.block_ids.extend([0] * first + taken)
        self.first = first
        return True

    def free(self) -> None:
        """Gives back all blocks. The table is empty afterwards."""
        self.pool.release(reversed(self.block_ids[self.first :]))
        del self.block_ids[:]
        self.first = self._first_token = 0

    def _reserved(self, num_valid: int, num_tokens: int) -> tuple[int, int]:
        """Returns the first block and the end of the blocks that the table has after `reserve`."""
        pool, first = self.pool, self.pool.first_kept(num_valid)
        sees_all = self.sees_all(num_valid)
        if sees_all:
            first = max(first, self.first)
        end = max(first, min(pool.num_blocks_for(num_tokens), first + pool.max_held_blocks))
        return first, max(end, len(self.block_ids)) if sees_all else end
