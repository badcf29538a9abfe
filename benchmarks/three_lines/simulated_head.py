"""A drafter head with fixed acceptance at each depth. Its features are zeros, but are transferred like real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.three_lines.simulated_model import ORDER, SetTime, SimulatedKVCache, SimulatedModel
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.sampler import Sampler
from outrider.engine.scheduler import EngineSequence
from outrider.node import FeatureFormat
from outrider.speculation.features import HeadRules
from outrider.speculation.path_tree import DraftedToken
from outrider.speculation.proposers.draft_forward import DraftForward, PathRows

FORMAT = FeatureFormat(fingerprint="simulated", width=576, dtype="bfloat16")


@dataclass(frozen=True, slots=True)
class SimulatedFeatures:
    """A sequence's features in the target's process."""

    sequence: EngineSequence

    def __len__(self) -> int:
        return self.sequence.num_computed

    def read(self, start: int, end: int) -> bytes:
        return bytes((end - start) * FORMAT.bytes_per_token)


class SimulatedFeaturePlane:
    """A replacement for FeaturePlane that has zeros, all of which go in updates."""

    bytes_per_token = FORMAT.bytes_per_token
    reads_wait = False

    def read(self, ranges: Sequence[tuple[SequenceKV, int, int]]) -> list[bytes | None]:
        return [bytes((end - start) * FORMAT.bytes_per_token) for _, start, end in ranges]

    def offer(self, kv: SequenceKV, end: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class SimulatedHeadForward(DraftForward):
    """A `DraftForward` that selects its model by depth: how many of the head's own states precede a row."""

    pool: BlockPool
    kv_cache: SimulatedKVCache
    models: Sequence[SimulatedModel]  # by depth; the last one serves all greater depths, too
    time: SetTime
    sampler: Sampler
    max_model_len: int
    head: HeadRules = field(default_factory=HeadRules)

    @property
    def vocab_size(self) -> int:
        return self.models[0].vocab_size

    def decide(self, rows: Sequence[PathRows], block_copies: Sequence[tuple[int, int]]) -> list[DraftedToken]:
        with self.time.forward(sum(len(row.token_ids) for row in rows)):
            if block_copies:
                self.kv_cache.copy_blocks(block_copies)
            for row in rows:  # all rows are written before any is read
                self.kv_cache.slots[self._slots(row, row.start_position - 1, self._end(row))] = row.token_ids
            found = [self._logits(row) for row in rows if row.num_decisions]
            if not found:
                return [DraftedToken(()) for _ in rows]
            decided = self._decide(np.stack(found), rows)
            return [each._replace(state=self._depth(row)) for row, each in zip(rows, decided, strict=True)]

    def _logits(self, row: PathRows) -> np.ndarray:
        end = self._end(row)
        text = self.kv_cache.slots[self._slots(row, max(0, end - ORDER), end)].tolist()
        return self.models[min(self._depth(row), len(self.models) - 1)].logits(text)

    def _end(self, row: PathRows) -> int:
        return row.start_position - 1 + len(row.token_ids)

    def _depth(self, row: PathRows) -> int:
        return max(0, row.start_position + len(row.token_ids) - row.num_committed)

    def _slots(self, row: PathRows, start: int, end: int) -> np.ndarray:
        """Returns the slots of rows [start, end). Row p belongs to token p + 1, since the first token has no row."""
        places, size = np.arange(start, end), self.pool.block_size
        return np.asarray(np.asarray(row.block_ids)[places // size] * size + places % size)
