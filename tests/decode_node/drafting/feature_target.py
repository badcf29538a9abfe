"""Sequences with tokens and features in a paged cache, as a decode node has them after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from decode_node.drafting.feature_plane import FeaturePlane
from decode_node.ingest import Ingest
from outrider.engine.feature_spec import plane_of
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.kv_transfer.receiver import KvReceiver
from outrider.node import FeatureFormat
from outrider.rpc.tls import PLAINTEXT
from tests.support.fake_head import FEATURES, feature_bytes

BLOCK_SIZE = 4


class FeatureTarget:
    """A target that computes the features of all tokens except the newest. Blocks of its sequences are mixed."""

    def __init__(
        self,
        num_blocks: int = 512,
        *,
        offers: bool = False,
        features: FeatureFormat = FEATURES,
        bytes_of: Callable[[Sequence[int], int, int], bytes] = feature_bytes,
        incarnation: bytes = bytes(16),
        host: str = "127.0.0.1",
    ) -> None:
        """`offers`: whether it listens at `host` for draft nodes that read; then `stop` it."""
        self.spec = plane_of(features)
        planes = [PlaneSpec(name, 1, 1, 4, "float32") for name in ("k", "v")]
        self.cache = PagedKVCache([*planes, self.spec], num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK_SIZE, hash_seed=b"")
        self.tables: dict[int, SequenceKV] = {}
        self.failed: list[bytes] = []
        self._bytes_of = bytes_of
        self.ingest = None
        if offers:
            receiver = KvReceiver(
                incarnation=incarnation,
                host=host,
                on_complete=lambda *_: None,
                on_failed=lambda transfer_id, _reason: self.failed.append(transfer_id),
            )
            self.ingest = Ingest(receiver, self.cache, host=host, advertise_address="", security=PLAINTEXT)
            self.ingest.start()
        self.plane = FeaturePlane(self.cache, self.spec, self.ingest)

    def compute(self, sequence_id: int, token_ids: Sequence[int]) -> SequenceKV:
        """Computes the features of a sequence's committed tokens, and returns its table."""
        kv = self.tables.setdefault(sequence_id, SequenceKV(self.pool))
        start, end = kv.num_tokens, len(token_ids) - 1
        kv.reserve(end)
        slots = np.array([kv.slot(place) for place in range(start, end)], dtype=np.int64)
        self.cache.write(self.spec.name, range(1), slots, self._bytes_of(token_ids, start, end))
        kv.advance(end)
        return kv

    def free(self, sequence_id: int) -> None:
        """Frees a sequence's blocks, as when it ends or is preempted."""
        self.tables.pop(sequence_id).free()

    def stop(self) -> None:
        if self.ingest is not None:
            self.ingest.receiver.stop()
