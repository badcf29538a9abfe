"""Blocks of a KV cache that were evicted to main memory. Torch-free."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from outrider.engine.kv_cache.block_copies import BlockCopies
from outrider.engine.kv_cache.copy_price import CopyPrice

MEASURE_EVERY = 16
"""Of the blocks of a group that the price refuses, the one with this number is copied all the same, so that the price
stays current. The number doubles each time, up to MAX_MEASURE_EVERY, until the price allows a copy."""
MAX_MEASURE_EVERY = 256
COPY_SHARE = 0.25
"""Copies may take this part of the time, in the long run (see `HostStore`)."""


class HostStore:
    """Evicted blocks by group of layers and content hash, in a bounded number of slots for each group.

    A block pool saves a block here when it takes it for other content, and loads it when a prefix match needs it. Both
    happen only if they pay (`CopyPrice`). If there is no free slot, a block of a prefix is dropped: first one that was
    loaded, since the pool has it, then the one that was evicted first. The blocks of preempted sequences (`keep`) are
    dropped only for those of other preempted sequences: they are certain to be needed, and prefixes are not.

    Within any t seconds, copies take at most COPY_SHARE * t and the time of a full step of prompts. What
    would take longer is not saved, or is computed instead of loaded.

    Engine thread only, except that any thread may read the numbers.
    """

    def __init__(self, copies: BlockCopies, price: CopyPrice, now: Callable[[], float] = time.perf_counter) -> None:
        """`now`: seconds of a monotonic clock."""
        self.price = price
        self._copies, self._now = copies, now
        self._seconds, self._then = price.step_seconds, now()  # left for copies, and when that was so
        self._refused, self._measure_at = [0 for _ in copies.num_slots], [MEASURE_EVERY for _ in copies.num_slots]
        self._free = [list(range(num - 1, -1, -1)) for num in copies.num_slots]
        # The slots in use, by group and hash, in the order in which they are dropped: of prefixes, and of preempted
        # sequences.
        self._prefixes: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in self._free]
        self._preempted: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in self._free]
        self._kept: dict[int, Sequence[bytes]] = {}  # by key of a preempted sequence
        self._num_keepers: Counter[bytes] = Counter()
        self.num_saved = self.num_loaded = self.num_dropped = self.num_refused = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots in use."""
        used = (num - len(free) for num, free in zip(self._copies.num_slots, self._free, strict=True))
        return sum(num * size for num, size in zip(used, self._copies.slot_bytes, strict=True))

    def keep(self, key: int, block_hashes: Sequence[bytes]) -> None:
        """Prefers these blocks, of a sequence that is preempted, to those of prefixes. `key`: identifies it."""
        self._kept[key] = block_hashes
        self._num_keepers.update(block_hashes)
        for prefixes, preempted in zip(self._prefixes, self._preempted, strict=True):
            for block_hash in reversed(block_hashes):  # the last block is dropped first
                if block_hash in prefixes:
                    preempted[block_hash] = prefixes.pop(block_hash)

    def forget(self, key: int) -> None:
        """Ends `keep`: the sequence runs again or has ended. Its blocks are those of a prefix then, and are dropped
        before others. Idempotent.
        """
        block_hashes = self._kept.pop(key, ())
        self._num_keepers.subtract(block_hashes)
        for block_hash in block_hashes:
            if self._num_keepers[block_hash]:
                continue
            del self._num_keepers[block_hash]
            for prefixes, preempted in zip(self._prefixes, self._preempted, strict=True):
                if block_hash in preempted:
                    prefixes[block_hash] = preempted.pop(block_hash)
                    prefixes.move_to_end(block_hash, last=False)

    def has(self, group: int, block_hash: bytes) -> bool:
        """Returns whether a block is here and loading it pays."""
        return block_hash in self._entries(group, block_hash) and self.price.load_pays

    def max_loads(self) -> int:
        """Returns the maximum number of blocks of tokens that may be loaded now, in all groups."""
        return int(self._seconds_left() / self.price.load_seconds) if self.price.load_pays else 0

    def save(self, group: int, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Saves blocks that are being evicted, given by number and hash, if that pays and there are slots.

        If there is too little time or memory, it saves the last ones: a prefix is evicted from its end, and is of no
        use without its beginning.
        """
        num_slots = self._copies.num_slots[group]
        self.num_dropped += max(len(blocks) - num_slots, 0)
        blocks = blocks[-num_slots:]
        for block_id, block_hash in reversed(blocks):
            self._save_one(group, block_id, block_hash)
        for _, block_hash in blocks:  # the end is dropped first
            entries = self._entries(group, block_hash)
            if block_hash in entries:
                entries.move_to_end(block_hash)

    def _save_one(self, group: int, block_id: int, block_hash: bytes) -> None:
        entries = self._entries(group, block_hash)
        is_here = block_hash in entries
        self.num_refused += not (is_here or self.price.save_pays)
        if not (self.price.load_pays if is_here else self.price.save_pays):
            self._refuse(group, block_id)
            return
        self._refused[group], self._measure_at[group] = 0, MEASURE_EVERY
        if is_here:
            return
        if not self.has_time:
            self.num_dropped += 1
            return
        if not self._free[group]:
            self.num_dropped += 1  # the block whose slot becomes free, or this one
            if not (least := self._prefixes[group] or entries):
                return
            self._free[group].append(least.popitem(last=False)[1])
        slot = self._free[group].pop()
        self._copy(group, block_id, slot, is_load=False)
        entries[block_hash] = slot
        self.num_saved += 1

    def load(self, group: int, block_id: int, block_hash: bytes) -> bool:
        """Loads a block, which stays here as well. Returns False if it is not here, e.g. dropped since `has`."""
        entries = self._entries(group, block_hash)
        if block_hash not in entries:
            return False
        self._copy(group, block_id, entries[block_hash], is_load=True)
        entries.move_to_end(block_hash, last=False)
        self.num_loaded += 1
        return True

    @property
    def has_time(self) -> bool:
        """Whether a copy may begin now."""
        return self._seconds_left() > 0

    def _copy(self, group: int, block_id: int, slot: int, *, is_load: bool) -> None:
        started = self._now()
        (self._copies.load if is_load else self._copies.save)(group, block_id, slot)
        self._seconds -= max(self._now() - started, self.price.copy_seconds(group, is_load=is_load))

    def _seconds_left(self) -> float:
        """Returns the time that copies may take now."""
        then, self._then = self._then, self._now()
        self._seconds = min(self._seconds + COPY_SHARE * (self._then - then), self.price.step_seconds)
        return self._seconds

    def _refuse(self, group: int, block_id: int) -> None:
        """Copies nothing, or only to measure the price."""
        self._refused[group] += 1
        if self._refused[group] == self._measure_at[group]:
            self._copies.measure(group, block_id)
            self._refused[group] = 0
            self._measure_at[group] = min(2 * self._measure_at[group], MAX_MEASURE_EVERY)

    def _entries(self, group: int, block_hash: bytes) -> OrderedDict[bytes, int]:
        """Returns the slots among which a block is, or would be saved."""
        return (self._preempted if block_hash in self._num_keepers else self._prefixes)[group]
