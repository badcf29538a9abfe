"""The recurrent states of one sequence, for layers with linear attention. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from outrider.engine.kv_cache.base import Slots
from outrider.engine.kv_cache.block_hashes import BlockHashes
from outrider.engine.kv_cache.block_pool import StatePool
from outrider.engine.kv_cache.planes import MAX_REPLAY, STATE_INTERVAL, last_border

SNAPSHOT_TOKENS = 256
"""A sequence keeps states at this distance for later prompts, and others only as long as nobody needs their slots."""
_NUM_SLOTS = 2  # of a sequence that computes: for the state that its step reads, and for one that it writes


class StateSteps(NamedTuple):
    """The states of one sequence in one step. A state at a position is that after so many tokens."""

    position: int  # of the state that the step begins with, at most that of its first row; 0: zeros
    slot: int  # its slot; -1: none
    stores: tuple[tuple[int, int], ...] = ()  # (position, slot) of the states to write, ascending


class StateTable:
    """The states that one sequence holds, at positions that are multiples of STATE_INTERVAL, in a StatePool.

    States are of committed tokens only. They are written once, at `last_border` of a step's rows without drafts, and
    then only read; the next step computes the rows since then again, from what is stored for each token. So a rejected
    draft changes no state, and forks share states. `SequenceKV` owns the table and says how many tokens are valid.
    """

    __slots__ = ("_expected", "_kept", "_slots", "_spare", "pool")

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self._slots: dict[int, int] = {}  # by position
        self._spare: list[int] = []  # slots for states to come
        self._expected = 0  # number of tokens with which the state arrives, if one has been expected
        self._kept = 0  # position of the last state that was given back to be kept for later prompts

    @property
    def num_held(self) -> int:
        """The number of slots."""
        return len(self._slots) + len(self._spare)

    def sees_all(self, num_tokens: int) -> bool:
        """Returns whether there is a state from which the row after the first `num_tokens` tokens can be computed."""
        return num_tokens - self._newest(num_tokens) <= MAX_REPLAY

    def covers(self, num_valid: int, num_tokens: int) -> bool:
        """Returns whether `reserve` would do nothing."""
        held = {self._newest(num_valid)} - {0}
        return self._slots.keys() == held and self.num_held == _NUM_SLOTS and num_tokens <= self.max_reserved(num_valid)

    def num_needed(self, num_valid: int, num_tokens: int) -> int:
        """Returns how many more slots than now `reserve` would hold; negative if it gives some back."""
        return (_NUM_SLOTS if num_tokens > num_valid else min(last_border(num_valid), 1)) - self.num_held

    def num_expected(self, _num_tokens: int) -> int:
        """Returns how many more slots than now `expect` would hold."""
        return _NUM_SLOTS - self.num_held

    def max_reserved(self, num_valid: int) -> int:
        """Returns up to which token drafts may be granted, so that the step after them replays at most MAX_REPLAY."""
        return last_border(num_valid + 1) + MAX_REPLAY

    def reserve(self, num_valid: int, num_tokens: int) -> list[tuple[int, int]]:
        """Gives back all states but the one that the next row needs. If rows follow, reserves a slot for the state that
        their step writes. Returns nothing to copy.
        """
        self._keep_newest(num_valid)
        self._expected = 0
        num_spare = _NUM_SLOTS - len(self._slots) if num_tokens > num_valid else 0
        self.pool.release(self._spare[num_spare:])
        del self._spare[num_spare:]
        if num_spare > len(self._spare):
            self._spare += self.pool.allocate(num_spare - len(self._spare))
        return []

    def expect(self, num_tokens: int) -> None:
        """Reserves a slot for the state that arrives from elsewhere, that of a sequence of `num_tokens` tokens, and one
        for the state that its first step writes.
        """
        self.free()
        self._expected = num_tokens
        self._spare = self.pool.allocate(_NUM_SLOTS)
        if position := last_border(num_tokens):
            self._slots[position] = self._spare.pop()

    def plan(self, start: int, end: int) -> StateSteps:
        """Plans a step that computes the known tokens [start, end)."""
        position, last = self._newest(start), last_border(end)
        first_snapshot = (position // SNAPSHOT_TOKENS + 1) * SNAPSHOT_TOKENS
        for snapshot in range(first_snapshot, last, SNAPSHOT_TOKENS):
            if snapshot not in self._slots and self.pool.enable_prefix_cache and self.pool.num_free_blocks > 0:
                (self._slots[snapshot],) = self.pool.allocate(1)
        if last > position and last not in self._slots:
            self._slots[last] = self._spare.pop()
        stores = tuple(sorted((at, slot) for at, slot in self._slots.items() if position < at <= last))
        return StateSteps(position, self._slots.get(position, -1), stores)

    def fill_slots(self, slots: Slots) -> None:
        """Enters the slot of each state for the tokens at which a transfer that ends there sends it. `slots`:
        [num_tokens] int64.
        """
        for position, slot in self._slots.items():
            slots[position : position + STATE_INTERVAL] = slot

    def release_beyond(self, num_tokens: int) -> None:
        """Gives back the states after more than `num_tokens` tokens."""
        self._give_back([position for position in self._slots if position > num_tokens])

    def publish(self, num_valid: int, hashes: BlockHashes) -> None:
        """Publishes the states at the ends of blocks whose hashes are these, then gives back those that `reserve` would
        give back, so that snapshots take slots from nobody.
        """
        for position, slot in self._slots.items():
            index, offset = divmod(position, self.pool.block_size)
            if not offset and index <= len(hashes):
                self.pool.register(slot, *hashes[index - 1 : index])
        self._keep_newest(num_valid)

    def longest_match(self, hashes: BlockHashes, max_blocks: int, *, may_load: bool) -> int:
        """Returns the largest number of leading blocks, at most `max_blocks`, at whose end the cache has a state.
        States are never in main memory, whatever `may_load` is.
        """
        are_there = map(self.pool.has, reversed(hashes[:max_blocks]))
        return max_blocks - next((num for num, is_there in enumerate(are_there) if is_there), max_blocks)

    def match(self, hashes: BlockHashes, num_blocks: int) -> bool:
        """Fills the empty table from the prefix cache, for the first `num_blocks` blocks. Returns False if the pool has
        too few slots to share the state.
        """
        if num_blocks and self.pool.num_free_blocks < 1:
            return False
        taken = self.pool.take(hashes[num_blocks - 1 : num_blocks]) if num_blocks else []
        self._slots.update((num_blocks * self.pool.block_size, slot) for slot in taken or ())
        return taken is not None

    def fork(self, num_tokens: int) -> StateTable:
        """Returns a second table with the states after at most `num_tokens` tokens."""
        other = StateTable(self.pool)
        other._slots = {position: slot for position, slot in self._slots.items() if position <= num_tokens}
        other._kept, other._expected = self._kept, self._expected
        self.pool.acquire(other._slots.values())
        return other

    def free(self) -> None:
        """Gives back all slots, that of the newest state last. The table is empty afterwards."""
        self.pool.release([*self._spare, *self._slots.values()])
        self._slots, self._spare, self._kept, self._expected = {}, [], 0, 0

    def _newest(self, num_tokens: int) -> int:
        """Returns the position of the last state after at most `num_tokens` tokens; 0: there is none."""
        there = self._slots if num_tokens >= self._expected else ()
        return max((position for position in there if position <= num_tokens), default=0)

    def _keep_newest(self, num_tokens: int) -> None:
        newest = self._newest(num_tokens)
        self._give_back([position for position in self._slots if position != newest])

    def _give_back(self, positions: Iterable[int]) -> None:
        for position in positions:
            slot = self._slots.pop(position)
            self.pool.release((slot,))
            if position >= self._kept + SNAPSHOT_TOKENS:
                self._kept = position
            else:
                self.pool.evict_first(slot)
