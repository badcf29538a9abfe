"""Where the target's features are kept, read for draft nodes with a head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.engine.kv_cache.base import KVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.sequence_kv import SequenceKV


class FeaturePlane:
    """The plane of a paged KV cache that has the feature of each token (see outrider.engine.features)."""

    def __init__(self, kv_cache: KVCache, plane: PlaneSpec) -> None:
        self._kv_cache = kv_cache
        self._plane = plane

    def read(self, ranges: Sequence[tuple[SequenceKV, int, int]]) -> list[bytes]:
        """The features of tokens [start, end) of each table, all in one copy from the device; the KV must be there.

        Engine thread only: blocks may go to another sequence between two steps. Returns bytes as they are sent.
        """
        slots = np.concatenate([_slots(kv, start, end, self._kv_cache.block_size) for kv, start, end in ranges])
        rows = self._kv_cache.read(self._plane.name, range(1), torch.from_numpy(slots))
        size = self._plane.bytes_per_token_per_layer
        ends = np.cumsum([(end - start) * size for _, start, end in ranges])
        return [part.tobytes() for part in np.split(rows, ends[:-1])]


def _slots(kv: SequenceKV, start: int, end: int, block_size: int) -> np.ndarray:
    """Cache slots of tokens [start, end): [end - start] int64."""
    first = start // block_size
    blocks = np.array(kv.block_ids[first : -(-end // block_size)], dtype=np.int64)
    places = np.arange(start, end)
    return np.asarray(blocks[places // block_size - first] * block_size + places % block_size)
