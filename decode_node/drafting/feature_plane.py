"""The features of tokens, in their plane of the paged KV cache, for draft nodes with a head."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import numpy as np

from decode_node.ingest import Ingest
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.ranks.sharded_cache import KVCache
from outrider.kv_transfer.base import DrainState
from outrider.speculation.draft_stream import FeatureOffer


class FeaturePlane:
    """The `FeatureSource` of a decode node.

    It pins no blocks. What is read counts only if the table has the same blocks afterwards: a table gives blocks back
    before another sequence can get, and write, them. While a shared block is copied for the sequence, nothing counts.
    """

    def __init__(self, kv_cache: KVCache, plane: PlaneSpec, ingest: Ingest | None = None) -> None:
        """`ingest`: where draft nodes read what is offered; None: nothing can be offered."""
        self.bytes_per_token = plane.bytes_per_token
        self.reads_wait = kv_cache.device != "cpu"
        self._kv_cache = kv_cache
        self._plane = plane
        self._ingest = ingest
        self._address = ""  # of the ingest
        self._withdrawn: list[bytes] = []

    def read(self, ranges: Sequence[tuple[SequenceKV, int, int]]) -> list[bytes | None]:
        size = self._kv_cache.block_size
        tables = [_HeldBlocks(kv, start, end, size) for kv, start, end in ranges]
        slots = [table.slots(size) for table in tables]
        rows = self._kv_cache.read(self._plane.name, range(1), np.array([*itertools.chain(*slots)], dtype=np.int64))
        ends = np.cumsum([len(part) for part in slots]) * self.bytes_per_token
        read = zip(np.split(rows, ends[:-1]), tables, strict=True)
        return [part.tobytes() if part.size and table.are_held() else None for part, table in read]

    def offer(self, kv: SequenceKV, end: int) -> FeatureOffer | None:
        table = _HeldBlocks(kv, 0, end, self._kv_cache.block_size)
        if self._ingest is None or not table.are_held():
            return None
        self._address = self._address or self._ingest.address("localhost")
        offer = FeatureOffer(os.urandom(16), end, self._address)
        self._ingest.open(
            offer.transfer_id,
            table.block_ids,
            start_token=end,
            end_token=end,
            planes=(self._plane,),
            are_held=table.are_held,
        )
        return offer

    def withdraw(self, offer: FeatureOffer) -> None:
        assert self._ingest is not None
        ended = [*self._withdrawn, offer.transfer_id]  # what is being read is closed by a later call
        self._withdrawn = [each for each in ended if self._ingest.close(each) is DrainState.UNKNOWN]


class _HeldBlocks:
    """The blocks of a sequence's tokens [start, end), and whether the sequence still has them."""

    def __init__(self, kv: SequenceKV, start: int, end: int, block_size: int) -> None:
        self._kv = kv
        self._start, self._end = start, end
        self._places = slice(start // block_size, -(-end // block_size))
        self.block_ids = kv.block_ids[self._places]

    def are_held(self) -> bool:
        kv = self._kv
        return kv.num_tokens >= self._end and kv.block_ids[self._places] == self.block_ids and not kv.is_copying

    def slots(self, size: int) -> list[int]:
        """Returns the slots of the tokens; none if the sequence has lost them."""
        first = self._start // size
        tokens = range(self._start, self._end) if self.are_held() else ()
        return [self.block_ids[token // size - first] * size + token % size for token in tokens]
