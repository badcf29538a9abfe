"""The shapes of padded batches: which steps are captured as graphs (see `step_graphs`). Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.engine.input_batch import BatchFields, InputBatch

MOST_ROWS = 256
"""Of a bucket. In larger steps launches take a small part of the time."""
LEAST_KEYS = 512
"""Of the shortest block tables: shorter ones would be more buckets, and attention would not be faster."""
KEYS_FACTOR = 4
"""Between one length of block tables and the next. Attention programs without keys return at once."""
MOST_DEPTH = 16
"""Of a draft tree's paths, on average over the rows of a step."""
LEAST_TREE_ROWS = 4
"""A tree needs three rows, a known token and two siblings; rounded to a power of two."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a padded batch."""

    num_rows: int  # a power of two; as many sequences, of which some have no rows
    max_blocks: int
    has_trees: bool = False


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """Which steps of a node are captured."""

    max_rows: int = MOST_ROWS
    has_trees: bool = False
    is_rehearsal: bool = False  # only the largest of each kind, which take as much memory as all

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows to which steps are padded, rising."""
        most = min(_power_of_two(self.max_rows), MOST_ROWS)
        return tuple(1 << power for power in range(most.bit_length()))


class Buckets:
    """All buckets of a node."""

    def __init__(self, shapes: GraphShapes, *, max_model_len: int, block_size: int) -> None:
        self._shapes = shapes
        lengths = [LEAST_KEYS]
        while lengths[-1] < max_model_len:
            lengths.append(lengths[-1] * KEYS_FACTOR)
        lengths[-1] = max(min(lengths[-1], max_model_len), LEAST_KEYS)
        self._max_blocks = [-(-length // block_size) for length in lengths]

    def __iter__(self) -> Iterator[Bucket]:
        """The largest first, so that the others find memory that it has left."""
        for has_trees in (True, False) if self._shapes.has_trees else (False,):
            for num_rows in reversed(self._shapes.row_counts):
                if not has_trees or num_rows >= LEAST_TREE_ROWS:
                    yield from (Bucket(num_rows, max_blocks, has_trees) for max_blocks in reversed(self._max_blocks))

    def to_capture(self) -> Iterator[Bucket]:
        """All, or in a rehearsal the largest of those with trees and of those without."""
        kinds = set()
        for bucket in self:
            if not self._shapes.is_rehearsal or bucket.has_trees not in kinds:
                yield bucket
            kinds.add(bucket.has_trees)

    def of(self, batch: InputBatch) -> Bucket | None:
        """The smallest that holds the batch. None: it runs unpadded, as prompt chunks do, with few logits."""
        num_rows = _power_of_two(batch.num_rows)
        if batch.num_logits != batch.num_rows or num_rows > self._shapes.row_counts[-1]:
            return None
        if batch.has_trees:
            num_rows = max(num_rows, LEAST_TREE_ROWS)
            if not self._shapes.has_trees or len(batch.arrays.path_slots) > MOST_DEPTH * num_rows:
                return None
        max_blocks = next((each for each in self._max_blocks if each >= batch.max_blocks), None)
        return None if max_blocks is None else Bucket(num_rows, max_blocks, batch.has_trees)


def pad(batch: InputBatch, bucket: Bucket, scratch_block: int) -> InputBatch:
    """The batch with further sequences: of one row each until the rows are enough, then without rows."""
    arrays, size = batch.arrays, batch.block_size
    num_rows = bucket.num_rows - batch.num_rows
    num_empty = bucket.num_rows - batch.num_seqs - num_rows
    assert min(num_rows, num_empty, bucket.max_blocks - batch.max_blocks) >= 0, "the bucket is one of this batch"
    tables = array("i")
    for seq in range(batch.num_seqs):
        table = arrays.block_tables[seq * batch.max_blocks : (seq + 1) * batch.max_blocks]
        tables.extend(table)
        tables.extend([table[0]] * (bucket.max_blocks - len(table)))
    tables.extend([scratch_block] * (bucket.max_blocks * (num_rows + num_empty)))
    starts, slots = arrays.path_starts, arrays.path_slots
    if bucket.has_trees:
        starts = starts or array("q", [0] * (batch.num_rows + 1))
        starts = starts + array("q", [starts[-1]] * num_rows)
        slots = slots + array("q", [0] * (MOST_DEPTH * bucket.num_rows - len(slots)))
    padded = BatchFields(
        token_ids=arrays.token_ids + array("q", [0] * num_rows),
        positions=arrays.positions + array("q", [0] * num_rows),
        slot_mapping=arrays.slot_mapping + array("q", [scratch_block * size] * num_rows),
        logits_rows=arrays.logits_rows + array("q", range(batch.num_rows, bucket.num_rows)),
        query_start_loc=arrays.query_start_loc
        + array("i", range(batch.num_rows + 1, bucket.num_rows + 1))
        + array("i", [bucket.num_rows] * num_empty),
        seq_lens=arrays.seq_lens + array("i", [1] * num_rows + [0] * num_empty),
        block_tables=tables,
        path_starts=starts,
        path_slots=slots,
    )
    return InputBatch(padded, bucket.max_blocks, size)


def _power_of_two(number: int) -> int:
    """From `number` on."""
    return 1 << (number - 1).bit_length()
