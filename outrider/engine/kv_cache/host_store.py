"""Blocks of a KV cache that were evicted to main memory. Torch-free."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol

from outrider.engine.kv_cache.copy_price import CopyPrice

MEASURE_EVERY = 16
"""One of this many blocks that the price refuses is copied all the same, so that the price stays current."""


class SlotCopies(Protocol):
    """Copies blocks between a cache and slots of main memory, and tells their times to a CopyPrice."""

    num_slots: list[int]  # by group
    slot_bytes: list[int]  # by group

    def save(self, group: int, block_id: int, slot: int) -> None:
        """Copies a block to a slot. The block may be overwritten by work that begins or is queued afterwards."""

    def load(self, group: int, block_id: int, slot: int) -> None:
        """Copies a slot to a block. Work that begins or is queued afterwards reads it."""

    def measure(self, group: int, block_id: int) -> None:
        """Copies a block out and in again, which changes nothing. No other work may use it meanwhile."""


class HostStore:
    """Evicted blocks by group of layers and content hash, in a bounded number of slots for each group.

    A block pool saves a block here when it takes it for other content, and loads it when a prefix match needs it. Both
    happen only if they pay (`CopyPrice`). If there is no free slot, the least recently used block of a prefix is
    dropped. The blocks of preempted sequences (`keep`) are dropped only for those of other preempted sequences: they
    are certain to be needed, and prefixes are not.

    Engine thread only, except that any thread may read the numbers.
    """

    def __init__(self, copies: SlotCopies, price: CopyPrice) -> None:
        self.price = price
        self._copies = copies
        self._free = [list(range(num - 1, -1, -1)) for num in copies.num_slots]
        # The slots in use, by group and hash, least recently used first: of prefixes, and of preempted sequences.
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
        self._move(block_hashes, self._prefixes, self._preempted)

    def forget(self, key: int) -> None:
        """Ends `keep`: the sequence runs again or has ended. Its blocks are then those of a prefix. Idempotent."""
        block_hashes = self._kept.pop(key, ())
        self._num_keepers.subtract(block_hashes)
        unkept = [block_hash for block_hash in block_hashes if not self._num_keepers[block_hash]]
        for block_hash in unkept:
            del self._num_keepers[block_hash]
        self._move(unkept, self._preempted, self._prefixes)

    def has(self, group: int, block_hash: bytes) -> bool:
        """Returns whether `load` would succeed now. The block then counts as used."""
        entries = self._entries(group, block_hash)
        if block_hash not in entries:
            return False
        if not self.price.load_pays:
            self.num_refused += 1
            return False
        entries.move_to_end(block_hash)
        return True

    def save(self, group: int, block_id: int, block_hash: bytes) -> None:
        """Saves a block that is being evicted, if that pays and there is a slot."""
        entries = self._entries(group, block_hash)
        if block_hash in entries:
            entries.move_to_end(block_hash)
            return
        if not self.price.save_pays:
            self.num_refused += 1
            if self.num_refused % MEASURE_EVERY == 0:
                self._copies.measure(group, block_id)
            return
        if not self._free[group] and not self._drop(group, may_drop_preempted=entries is self._preempted[group]):
            self.num_dropped += 1
            return
        slot = self._free[group].pop()
        self._copies.save(group, block_id, slot)
        entries[block_hash] = slot
        self.num_saved += 1

    def load(self, group: int, block_id: int, block_hash: bytes) -> bool:
        """Loads a block, which stays here as well. Returns False if it is not here, e.g. dropped since `has`."""
        slot = self._entries(group, block_hash).get(block_hash)
        if slot is None:
            return False
        self._copies.load(group, block_id, slot)
        self.num_loaded += 1
        return True

    def _entries(self, group: int, block_hash: bytes) -> OrderedDict[bytes, int]:
        """Returns the slots among which a block is, or would be saved."""
        return (self._preempted if block_hash in self._num_keepers else self._prefixes)[group]

    def _drop(self, group: int, *, may_drop_preempted: bool) -> bool:
        """Frees a slot. Returns False if all have blocks that must not be dropped."""
        entries = self._prefixes[group]
        if not entries and may_drop_preempted:
            entries = self._preempted[group]
        if not entries:
            return False
        self._free[group].append(entries.popitem(last=False)[1])
        self.num_dropped += 1
        return True

    @staticmethod
    def _move(
        block_hashes: Sequence[bytes], source: list[OrderedDict[bytes, int]], target: list[OrderedDict[bytes, int]]
    ) -> None:
        """Moves those blocks that are here, the last one of a sequence first, so that it is dropped first."""
        for before, after in zip(source, target, strict=True):
            for block_hash in reversed(block_hashes):
                if (slot := before.pop(block_hash, None)) is not None:
                    after[block_hash] = slot
