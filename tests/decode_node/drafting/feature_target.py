"""Sequences with tokens and features in a paged cache, as a decode node has them after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from decode_node.drafting.client import FeaturePlane
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from tests.support.fake_head import FEATURES, features_of

BLOCK_SIZE = 4
PLANE = PlaneSpec("feature-fefefefe", 1, 1, FEATURES.width, FEATURES.dtype)


class FeatureTarget:
    """A target that computes the features of all tokens except the newest. Blocks of its sequences are mixed."""

    def __init__(self, num_blocks: int = 512) -> None:
        planes = [PlaneSpec(name, 1, 1, 4, "float32") for name in ("k", "v")]
        self._cache = PagedKVCache([*planes, PLANE], num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self._pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK_SIZE, hash_seed=b"")
        self.tables: dict[int, SequenceKV] = {}
        self.plane = FeaturePlane(self._cache, PLANE)

    def compute(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Computes the features of a sequence's committed tokens."""
        kv = self.tables.setdefault(sequence_id, SequenceKV(self._pool))
        start, end = kv.num_tokens, len(token_ids) - 1
        kv.reserve(end)
        rows = features_of(token_ids)[start:end]
        slots = np.array([kv.slot(place) for place in range(start, end)], dtype=np.int64)
        self._cache.write(PLANE.name, range(1), slots, rows.contiguous().view(torch.uint8).numpy().tobytes())
        kv.advance(end)

    @property
    def available(self) -> Mapping[int, int]:
        return {sequence_id: kv.num_tokens for sequence_id, kv in self.tables.items()}
