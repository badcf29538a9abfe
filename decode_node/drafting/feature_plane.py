"""The features of each token, in their plane of the paged KV cache, for draft nodes with a head.

Nothing here pins blocks or waits for the engine. What is read counts only if the sequence's table still has those
blocks after the read: tables give blocks back before another sequence can get, and write, them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from decode_node.ingest import Ingest
from outrider.drafting.drafted_sequence import FeatureRange
from outrider.engine.kv_cache.base import Slots
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.ranks.sharded_cache import KVCache
from outrider.kv_transfer.base import DrainState, Region, TransferSpec
from outrider.speculation.draft_stream import FeatureOffer


class FeaturePlane:
    """The `FeatureSource` of a decode node (see outrider.engine.feature_spec for the plane)."""

    def __init__(self, kv_cache: KVCache, plane: PlaneSpec, ingest: Ingest | None = None) -> None:
        """`ingest`: where draft nodes read what is offered; None: nothing can be offered."""
        self.kv_cache = kv_cache
        self.plane = plane
        self._ingest = ingest
        self._withdrawn: list[bytes] = []
        self.blocks = kv_cache.fence() is not None

    @cached_property
    def _address(self) -> str:
        assert self._ingest is not None
        return self._ingest.address("")

    def read(self, ranges: Sequence[FeatureRange]) -> list[bytes | None]:
        held = [_HeldTokens(each.kv, each.start, each.end, self.kv_cache.block_size) for each in ranges]
        rows = self.kv_cache.read(self.plane.name, range(1), np.concatenate([each.slots for each in held]))
        ends = np.cumsum([each.slots.size for each in held]) * self.plane.bytes_per_token
        parts = np.split(rows, ends[:-1])
        return [part.tobytes() if each.are_held() else None for part, each in zip(parts, held, strict=True)]

    def offer(self, kv: SequenceKV, end: int) -> FeatureOffer | None:
        if self._ingest is None:
            return None
        inbox = self._ingest.inbox
        offer = FeatureOffer(os.urandom(16), end, self._address)
        spec = TransferSpec(
            transfer_id=offer.transfer_id,
            incarnation=inbox.incarnation,
            start_token=end,
            end_token=end,
            planes=(self.plane,),
        )
        inbox.open(spec, _OfferedTokens(self.kv_cache, _HeldTokens(kv, 0, end, self.kv_cache.block_size)))
        return offer

    def is_open(self, offer: FeatureOffer) -> bool:
        return self._ingest is not None and self._ingest.inbox.is_open(offer.transfer_id)

    def withdraw(self, offer: FeatureOffer) -> None:
        if self._ingest is not None:  # what is being read is closed by a later call
            ended = [*self._withdrawn, offer.transfer_id]
            self._withdrawn = [each for each in ended if self._ingest.close(each) is DrainState.UNKNOWN]


class _HeldTokens:
    """The slots of a sequence's tokens [start, end), and whether the sequence still has them."""

    def __init__(self, kv: SequenceKV, start: int, end: int, block_size: int) -> None:
        self._kv = kv
        self._end = end
        first, last = start // block_size, -(-end // block_size)
        self._blocks = slice(first, last)
        self._block_ids = kv.block_ids[self._blocks]
        self._is_whole = len(self._block_ids) == last - first  # otherwise the engine has just freed some
        slots = np.asarray(self._block_ids, dtype=np.int64)[:, None] * block_size + np.arange(block_size)
        self.slots: Slots = slots.reshape(-1)[start - first * block_size : end - first * block_size]

    def are_held(self) -> bool:
        is_same = self._kv.block_ids[self._blocks] == self._block_ids
        return self._is_whole and is_same and self._kv.num_tokens >= self._end


class _OfferedTokens:
    """The `TransferBlocks` of an offer, from which a draft node reads."""

    def __init__(self, kv_cache: KVCache, tokens: _HeldTokens) -> None:
        self._kv_cache: Any = kv_cache  # Any, as numpy's arrays are buffers that mypy does not know
        self._tokens = tokens

    def write(self, region: Region, payload: object) -> None:
        raise AssertionError("the transfer has no tokens to write")

    def read(self, region: Region) -> memoryview | None:
        slots = self._tokens.slots[region.tokens.start : region.tokens.stop]
        rows = self._kv_cache.read(region.plane, region.layers, slots)
        return memoryview(rows) if self._tokens.are_held() else None
