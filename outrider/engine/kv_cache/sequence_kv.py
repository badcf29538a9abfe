"""The block table of one sequence, which is its share of the KV cache. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

from outrider.engine.kv_cache.block_hashes import BlockHashes
from outrider.engine.kv_cache.block_pool import TO_LOAD, BlockPool, NoFreeBlocksError, StatePool, WindowPool
from outrider.engine.kv_cache.state_table import StateSteps, StateTable
from outrider.engine.kv_cache.window_table import WindowTable

GroupTable: TypeAlias = WindowTable | StateTable
"""What a sequence holds of a group of layers other than the first."""


class SequenceKV:
    """Block table and number of valid tokens of one sequence.

    Token t is in slot block_ids[t // block_size] * block_size + t % block_size. `block_ids` are the reserved blocks;
    the KV of the first `num_tokens` tokens is valid. A step calls `reserve`, writes KV, then calls `advance` or
    `truncate`. Only blocks with valid tokens are ever shared.

    Layers with a sliding window have tables of their own in `windows`, with the blocks of the newest tokens only, and
    so have recurrent states.
    """

    __slots__ = (
        "_block_size",
        "_hashes",
        "_owns_tail",
        "_pool",
        "_table",
        "_window_tables",
        "block_ids",
        "is_copying",
        "num_cached_tokens",
        "num_tokens",
        "state",
        "windows",
    )

    def __init__(self, pool: BlockPool, *, cache_salt: bytes = b"") -> None:
        """`cache_salt`: only sequences with the same salt share published blocks."""
        self._pool = pool
        self._block_size = pool.block_size
        self._hashes: BlockHashes = pool.new_hashes(cache_salt)  # hashes of published blocks and prefix hits
        # Whether the block of the next token is known to be neither shared nor published. This stays true while tokens
        # are added, because blocks without valid tokens are neither.
        self._owns_tail = False
        self.block_ids: list[int] = []
        self.is_copying = False  # whether the copy of a block in the table may not be queued yet
        self.num_tokens = 0
        self.num_cached_tokens = 0  # number of tokens taken from the prefix cache at creation
        self.windows: tuple[GroupTable, ...] = ()
        self.state: StateTable | None = None
        self._window_tables: tuple[WindowTable, ...] = ()
        if pool.windows:
            self._set_windows([_table_of(each) for each in pool.windows])
        self._table = array("i")  # the part of block_ids that `block_table` has converted so far

    @classmethod
    def create(
        cls,
        pool: BlockPool,
        token_ids: Sequence[int],
        *,
        max_cached_tokens: int,
        cache_salt: bytes = b"",
        windows_arrive: bool = False,
        kept_back: int | None = None,
    ) -> SequenceKV:
        """Makes a table that holds the cached prefix of `token_ids`, at most `max_cached_tokens` tokens.

        `windows_arrive`: whether all that later rows see through sliding windows arrives from elsewhere, so that it
        need not be in the cache. No row may be computed before it has arrived.

        `kept_back`: if the sequence fits and leaves that many blocks free, more is loaded from main memory. None: the
        pool's blocks only, as long as it is not known whether the sequence is admitted.
        """
        pool = pool.part_for(token_ids, max_tokens=max_cached_tokens, cache_salt=cache_salt)
        kv = cls(pool, cache_salt=cache_salt)
        kv._match(token_ids, max_cached_tokens, windows_arrive=windows_arrive, may_load=False)
        if pool.has_host_blocks and kept_back is not None and kv.fits(len(token_ids), kept_back=kept_back):
            other = cls(pool, cache_salt=cache_salt)
            other._match(token_ids, max_cached_tokens, windows_arrive=windows_arrive, may_load=True)
            if other.num_tokens > kv.num_tokens:
                kv, other = other, kv
            other.free()
        return kv

    def _match(self, token_ids: Sequence[int], max_tokens: int, *, windows_arrive: bool, may_load: bool) -> None:
        """Fills an empty table from the prefix cache. For the arguments see `create`."""
        pool, hashes = self._pool, self._hashes
        if self.state is not None:  # a row must be computed that needs the state of `last_border`
            max_tokens = min(max_tokens, len(token_ids) - 1)
        self.block_ids = pool.match_prefix(token_ids, max_tokens=max_tokens, hashes=hashes, may_load=may_load)
        uses_windows = self.windows and self.block_ids and not windows_arrive
        if may_load:
            if uses_windows:  # first, so that nothing is loaded in vain
                self._shorten(_longest_match(self.windows, hashes, may_load=True))
            self._shorten(pool.load(self.block_ids, hashes))
        if uses_windows:
            self._match_windows(may_load=may_load)
        self.num_tokens = self.num_cached_tokens = len(self.block_ids) * pool.block_size

    def block_table(self) -> array[int]:
        """Returns `block_ids` as int32 [len(block_ids)], not as a copy. Do not modify it or keep it while blocks
        change.

        Only blocks added since the last call are converted, so a step's cost does not grow with sequence lengths.
        """
        table, block_ids = self._table, self.block_ids
        if len(table) < len(block_ids):
            table.extend(block_ids[len(table) :])
        return table

    def slot(self, place: int) -> int:
        """Returns the slot of the token at position `place`; in a draft tree, of the row stored there."""
        return self.block_ids[place // self._block_size] * self._block_size + place % self._block_size

    def slots_of_groups(self, place: int) -> list[int]:
        """Returns `slot` for each group of layers. The slots of all groups are numbered together, as in
        `WindowPool.first_block`.
        """
        index, offset = divmod(place, self._block_size)
        blocks = [table.pool.first_block + table.block_ids[index] for table in self._window_tables]
        return [block * self._block_size + offset for block in (self.block_ids[index], *blocks)]

    def window_tables(self) -> list[array[int]]:
        """Returns the block table of each sliding window, int32, not as a copy. See `block_table`."""
        return [table.block_ids for table in self._window_tables]

    def plan_states(self, num_rows: int) -> StateSteps | None:
        """Plans which recurrent states the next step reads and writes, for which `reserve` has made room; None: the
        model has none.

        `num_rows`: number of the step's rows without drafts. Call it once for each step.
        """
        return None if self.state is None else self.state.plan(self.num_tokens, self.num_tokens + num_rows)

    @property
    def num_held_tokens(self) -> dict[int, int]:
        """The number of tokens that the blocks of each group can hold, by the group's window (0: none), and the number
        of states.
        """
        of_windows = {table.pool.window: table.num_held * self._block_size for table in self._window_tables}
        of_states = {} if self.state is None else {self.state.pool.window: self.state.num_held}
        return {0: len(self.block_ids) * self._block_size, **of_windows, **of_states}

    @property
    def capacity(self) -> int:
        """The number of tokens up to which blocks are reserved in all groups."""
        capacity = len(self.block_ids) * self._block_size
        return min([capacity, *[table.end for table in self._window_tables]]) if self.windows else capacity

    def has_reserved(self, num_tokens: int) -> bool:
        """Returns True only if `reserve(num_tokens)` would do nothing. On False, `reserve` may still do nothing."""
        if not self._owns_tail or num_tokens > len(self.block_ids) * self._block_size:
            return False
        return not self.windows or all(table.covers(self.num_tokens, num_tokens) for table in self.windows)

    def num_blocks_needed(self, num_tokens: int) -> int:
        """Returns how many blocks `reserve(num_tokens)` would allocate, including the copy of a shared block."""
        new = max(0, self._pool.num_blocks_for(num_tokens) - len(self.block_ids))
        index, offset = divmod(self.num_tokens, self._block_size)
        return new + (num_tokens > self.num_tokens and offset > 0 and self._pool.is_shared(self.block_ids[index]))

    def fits(self, num_tokens: int, *, kept_back: int = 0) -> bool:
        """Returns whether `reserve` would succeed and leave `kept_back` free blocks."""
        if self.num_blocks_needed(num_tokens) + kept_back > self._pool.num_free_blocks:
            return False
        return self.windows_fit(num_tokens, kept_back=kept_back)

    def windows_fit(self, num_tokens: int, *, arriving: int = 0, kept_back: int = 0, num_forks: int = 0) -> bool:
        """Returns whether `reserve` with these arguments would find blocks of sliding windows, with as many again for
        each of `num_forks` forks. On an empty node it does, whatever is kept back or forked.
        """
        num_valid, end = (arriving, arriving) if arriving > self.num_tokens else (self.num_tokens, num_tokens)
        for table in self.windows:
            needed = table.num_expected(end) if arriving > self.num_tokens else table.num_needed(num_valid, end)
            if needed > 0 or num_forks:
                of_others = 0 if table is self.state else kept_back  # a sequence that runs needs no more states
                needed += of_others + num_forks * (needed + table.num_held)
            if min(needed, table.pool.num_blocks) > table.pool.num_free_blocks:
                return False
        return True

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks in the pool from which this table takes blocks."""
        return self._pool.num_free_blocks

    def shares_pool(self, other: SequenceKV | None) -> bool:
        """Returns whether both have their blocks in the same pool, so that one can use what the other releases."""
        return other is not None and self._pool is other._pool  # noqa: SLF001 of this class

    def max_reserved(self, num_tokens: int) -> int:
        """Returns the largest number of tokens, at most `num_tokens`, for which `reserve` would succeed if it need not
        copy a block.
        """
        size = self._block_size
        most = min(num_tokens, (len(self.block_ids) + self._pool.num_free_blocks) * size)
        for table in self.windows:
            most = min(most, table.max_reserved(self.num_tokens))
        return most

    def reserve(self, num_tokens: int, *, arriving: int = 0) -> list[tuple[int, int]]:
        """Reserves blocks to write the KV of tokens [self.num_tokens, num_tokens).

        For a sliding window it reserves only as many as one step writes; call it again for the next step. If the first
        `arriving` tokens arrive from elsewhere, it reserves the blocks for these that a sequence keeps, whether or not
        the window of the tokens that are valid now is lost.

        Returns the (source, destination) blocks to copy before these writes: a shared partial block is replaced by a
        copy (copy-on-write).

        Raises: NoFreeBlocksError, with nothing changed, if the pool has too few blocks.
        """
        if not self.windows:
            return self._reserve(num_tokens)
        if not self.windows_fit(num_tokens, arriving=arriving):
            raise NoFreeBlocksError("too few KV blocks of layers with a sliding window are free")
        copies = self._reserve(num_tokens)
        for table in self.windows:
            if arriving > self.num_tokens:
                table.expect(arriving)
            else:
                copies = copies + table.reserve(self.num_tokens, num_tokens)
        return copies

    def _reserve(self, num_tokens: int) -> list[tuple[int, int]]:
        """Does what `reserve` does, for the layers without a window."""
        pool = self._pool
        num_new = -(-num_tokens // self._block_size) - len(self.block_ids)
        if not self._owns_tail and num_tokens > self.num_tokens:
            index, offset = divmod(self.num_tokens, self._block_size)
            if offset:
                source = self.block_ids[index]
                if pool.is_shared(source):
                    taken = pool.allocate(max(num_new, 0) + 1)
                    self.is_copying = True
                    self.block_ids[index] = taken.pop()
                    del self._table[index:]
                    self.block_ids += taken
                    pool.release((source,))
                    self._owns_tail = True
                    return [(source, self.block_ids[index])]
                pool.withdraw(source)  # the block was published when full; now its tail will change
            self._owns_tail = True
        if num_new > 0:
            self.block_ids += pool.allocate(num_new)
        return []

    def advance(self, num_tokens: int) -> None:
        """Records that the KV of tokens [0, num_tokens) is written. Reserved blocks past them stay reserved."""
        assert self.num_tokens <= num_tokens <= self.capacity
        self.num_tokens = num_tokens
        self.is_copying = False

    def truncate(self, num_tokens: int) -> None:
        """Makes exactly tokens [0, num_tokens) valid, and frees whole blocks past them.

        It rolls back those tokens of the last forward that verification rejects. If it rolls back further, the blocks
        that the next row sees through a sliding window may be gone; then no token remains valid.
        """
        if self.windows and not all(table.sees_all(num_tokens) for table in self.windows):
            num_tokens = self.num_cached_tokens = 0
            for table in self.windows:
                table.free()
        capacity = len(self.block_ids) * self._block_size
        assert 0 <= num_tokens <= capacity
        if num_tokens < self.num_tokens:
            self._owns_tail = False
            self._hashes.truncate(num_tokens // self._block_size)
        self.num_tokens = num_tokens
        self.is_copying = False
        if num_tokens <= capacity - self._block_size:
            self.release_beyond(num_tokens)

    def release_beyond(self, num_tokens: int) -> None:
        """Releases reserved blocks past tokens [0, num_tokens), which must include all valid ones."""
        assert num_tokens >= self.num_tokens
        self._release_blocks(self._pool.num_blocks_for(num_tokens))
        for table in self.windows:
            table.release_beyond(num_tokens)

    def _release_blocks(self, num_kept: int) -> None:
        """Releases all but the first blocks of the layers without a window."""
        if num_kept < len(self.block_ids):
            self._pool.release(reversed(self.block_ids[num_kept:]))
            del self.block_ids[num_kept:]
            del self._table[num_kept:]

    @property
    def has_unpublished_blocks(self) -> bool:
        """Whether `publish` has something to do, if all valid tokens are committed."""
        return self.num_tokens // self._block_size > len(self._hashes)

    def publish(self, token_ids: Sequence[int]) -> None:
        """Publishes the full blocks of valid, committed tokens in the prefix cache. Only new blocks are hashed.

        `token_ids` are the sequence's committed tokens from position 0. Idempotent.
        """
        if not self._pool.enable_prefix_cache:
            return
        hashes = self._hashes
        num_full = min(self.num_tokens, len(token_ids)) // self._block_size
        for index in range(len(hashes), num_full):
            block_hash = hashes.append(token_ids)
            self._pool.register(self.block_ids[index], block_hash)
            for table in self._window_tables:
                table.publish(index, block_hash)
        if self.state is not None:
            self.state.publish(self.num_tokens, hashes)

    def fork(self) -> SequenceKV:
        """Returns a second table over the same valid tokens. The first writer to a shared partial block copies it."""
        other = SequenceKV(self._pool)
        self._owns_tail = False
        other._hashes = self._hashes.copy()
        other.block_ids = self.block_ids[: self._pool.num_blocks_for(self.num_tokens)]
        other.num_tokens = self.num_tokens
        other.num_cached_tokens = self.num_cached_tokens
        self._pool.acquire(other.block_ids)
        other._set_windows([table.fork(self.num_tokens) for table in self.windows])
        return other

    def release_behind(self) -> None:
        """Releases the blocks of sliding windows that no later row sees."""
        for table in self.windows:
            table.reserve(self.num_tokens, self.num_tokens)

    def free(self) -> None:
        """Releases every block. Idempotent; the table is empty afterwards."""
        self.num_tokens = 0
        self._owns_tail = False
        self._hashes.truncate(0)
        self._release_blocks(0)
        for table in self.windows:
            table.free()

    def preempt(self, key: int, token_ids: Sequence[int]) -> None:
        """Publishes what `publish` would, so that it need not be computed again, then releases every block.

        `key`: the sequence's, for `BlockPool.forget_preempted`. Until then, main memory prefers these blocks.
        """
        self.publish(token_ids)
        if self._pool.host is not None:
            self._pool.host.keep(key, self._hashes[:])
        self.free()

    def _match_windows(self, *, may_load: bool) -> None:
        """Shortens the prefix taken from the cache to what the tables of sliding windows can take, too."""
        num_blocks = _longest_match(self.windows, self._hashes, may_load=may_load)
        if not all(table.match(self._hashes, num_blocks) for table in self.windows):
            num_blocks = 0
            for table in self.windows:
                table.free()
        self._shorten(num_blocks)

    def _shorten(self, num_blocks: int) -> None:
        """Gives back what the prefix cache has of the blocks after the first `num_blocks` of a new table."""
        self._pool.release([each for each in reversed(self.block_ids[num_blocks:]) if each != TO_LOAD])
        del self.block_ids[num_blocks:]
        self._hashes.truncate(num_blocks)

    def _set_windows(self, tables: Sequence[GroupTable]) -> None:
        self.windows = tuple(tables)
        self._window_tables = tuple(table for table in tables if isinstance(table, WindowTable))
        self.state = next((table for table in tables if isinstance(table, StateTable)), None)


def _table_of(pool: WindowPool | StatePool) -> GroupTable:
    return StateTable(pool) if isinstance(pool, StatePool) else WindowTable(pool)


def _longest_match(tables: Sequence[GroupTable], hashes: BlockHashes, *, may_load: bool) -> int:
    """Returns the largest number of leading blocks that every table can take, see WindowTable.longest_match."""
    num_blocks = len(hashes)
    while (shorter := min(table.longest_match(hashes, num_blocks, may_load=may_load) for table in tables)) < num_blocks:
        num_blocks = shorter
    return num_blocks
