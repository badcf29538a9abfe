"""Where the target's features are kept, read for draft nodes with a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.ranks.sharded_cache import KVCache


@dataclass(eq=False)
class FeaturePlane:
    """The plane of a paged KV cache that has the feature of each token (see outrider.engine.feature_spec)."""

    kv_cache: KVCache
    plane: PlaneSpec

    def read(self, ranges: Sequence[tuple[SequenceKV, int, int]]) -> list[bytes]:
        """The features of tokens [start, end) of each table, all in one copy from the device; the KV must be there.

        Engine thread only: blocks may go to another sequence between two steps. Returns bytes as they are sent.
        """
        slots = [kv.slot(place) for kv, start, end in ranges for place in range(start, end)]
        rows = self.kv_cache.read(self.plane.name, range(1), np.asarray(slots, dtype=np.int64))
        size = self.plane.bytes_per_token_per_layer
        ends = np.cumsum([(end - start) * size for _, start, end in ranges])
        return [part.tobytes() for part in np.split(rows, ends[:-1])]
