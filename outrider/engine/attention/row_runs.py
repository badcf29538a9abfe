"""Rows that share one read of keys where some of a batch are in trees of drafts: for backends that gather keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.engine.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class RowRuns:
    """A batch cut into runs: consecutive rows at consecutive positions, each of which sees what the row before it sees.

    Without trees the runs are the sequences. A tree has a run for each of its branches.
    """

    query_start_loc: np.ndarray  # [num_runs + 1] int32
    seq_lens: np.ndarray  # [num_runs] int32, keys that a run's last row sees
    block_tables: np.ndarray  # [num_runs, max_blocks] int32, the sequence's
    paths: Sequence[Sequence[int]] = ()  # by run the slots of its last keys; empty: no trees

    @classmethod
    def of(cls, batch: InputBatch) -> RowRuns:
        arrays = batch.arrays
        block_tables = np.frombuffer(arrays.block_tables, dtype=np.int32).reshape(batch.num_seqs, -1)
        if not batch.has_trees:
            query_start_loc = np.frombuffer(arrays.query_start_loc, dtype=np.int32)
            return cls(query_start_loc, np.frombuffer(arrays.seq_lens, dtype=np.int32), block_tables)
        starts, slots, positions = arrays.path_starts, arrays.path_slots, arrays.positions
        first_rows, seq_lens, sequences = [0], [], []
        paths: list[Sequence[int]] = []
        for sequence in range(batch.num_seqs):
            begin, end = arrays.query_start_loc[sequence], arrays.query_start_loc[sequence + 1]
            for row in range(begin + 1, end + 1):
                if row < end and _follows_row_before(batch, row):
                    continue
                first_rows.append(row)
                seq_lens.append(positions[row - 1] + 1)
                sequences.append(sequence)
                paths.append(slots[starts[row - 1] : starts[row]])
        return cls(
            np.asarray(first_rows, dtype=np.int32),
            np.asarray(seq_lens, dtype=np.int32),
            block_tables[sequences],
            paths,
        )


def _follows_row_before(batch: InputBatch, row: int) -> bool:
    """As in attention_plan.h."""
    arrays = batch.arrays
    end = arrays.path_starts[row + 1]
    depth = end - arrays.path_starts[row]
    if depth == 0:
        return True
    if arrays.positions[row] != arrays.positions[row - 1] + 1:
        return False
    return depth == 1 or arrays.path_slots[end - 2] == arrays.slot_mapping[row - 1]
