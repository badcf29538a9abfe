"""The shapes of padded batches, each of which has a CUDA graph (see `step_graphs`). Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.input_batch import BatchFields, InputBatch

MAX_BUCKET_ROWS = 256
"""Maximum number of rows in a bucket. Longer prompt chunks are FlashAttention's (see `attention.flash_attn`), whose
launches depend on their lengths. On an H200, launches were all of the time of 512 rows of an 8B model, and a quarter of
that of 4080."""
MIN_PROMPT_ROWS = 64
"""Minimum number of rows in a bucket without logits. Fewer rows take as long, because the same weights are read."""
MAX_MEAN_DEPTH = 16
"""Maximum mean depth of draft tree paths over the rows of a step."""
MIN_TREE_ROWS = 4
"""Minimum number of rows in a bucket with trees: three (a known token, two siblings), rounded up to a power of two."""
MAX_TABLE_BLOCKS = 1 << 20
"""Maximum number of entries in all block tables of a batch together, 4 bytes each. A block counts once per sequence."""
ROLLOUT_TOKENS = (1, 2, 3, 4, 5, 7)
"""Lengths in tokens of the rollouts that have graphs (see `rollouts`). Other lengths are rounded up."""
MAX_ROLLED_SEQUENCES = 32
"""Maximum number of sequences in a rollout. Above it, launches and the host take only a small part of the time."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a padded batch, apart from the lengths of its block tables."""

    num_rows: int  # a power of two; also the number of sequences, some of which have no rows
    has_trees: bool = False
    has_logits: bool = True  # whether all rows have logits; otherwise none has


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """A description of the steps of a node that are captured as CUDA graphs."""

    max_rows: int = MAX_BUCKET_ROWS
    has_trees: bool = False
    has_logits: bool = True  # False: only steps without logits are captured, those of a prefill node
    has_rollouts: bool = False  # whether a draft model's rollouts are captured too, in graphs of their own
    is_profile_run: bool = False  # whether to capture only each kind's largest graph; these need as much memory as all

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The row counts to which steps are padded, ascending."""
        max_rows = min(_power_of_two(self.max_rows), MAX_BUCKET_ROWS)
        counts = (1 << power for power in range(max_rows.bit_length()))
        return tuple(count for count in counts if self.has_logits or count >= MIN_PROMPT_ROWS)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, largest first, so that later captures reuse the memory of earlier ones."""
        falling = self.row_counts[::-1]
        tree_rows = [num_rows for num_rows in falling if self.has_trees and num_rows >= MIN_TREE_ROWS]
        trees = [Bucket(num_rows, has_trees=True) for num_rows in tree_rows]
        plain = [Bucket(num_rows, has_logits=self.has_logits) for num_rows in falling]
        return (*trees[:1], *plain[:1]) if self.is_profile_run else (*trees, *plain)

    @property
    def num_forwards(self) -> int:
        """The number of forward passes in all graphs together."""
        num_rolled = sum(ROLLOUT_TOKENS) * MAX_ROLLED_SEQUENCES.bit_length() if self.has_rollouts else 0
        return len(self.buckets) + num_rolled

    def bucket_of(self, batch: InputBatch) -> Bucket | None:
        """Returns the smallest bucket that holds the batch, or None if no bucket does (long prompt chunks; logits)."""
        if batch.num_logits and not self.has_logits:
            return None
        num_rows = max(_power_of_two(batch.num_rows), self.row_counts[0])
        if batch.has_trees:
            num_rows = max(num_rows, MIN_TREE_ROWS)
            if not self.has_trees or batch.arrays.path_starts[-1] > MAX_MEAN_DEPTH * num_rows:
                return None
        if num_rows > self.row_counts[-1] or len(batch.arrays.block_tables) + num_rows > MAX_TABLE_BLOCKS:
            return None
        return Bucket(num_rows, batch.has_trees, self.has_logits)


def pad(batch: InputBatch, bucket: Bucket, scratch_blocks: Sequence[int]) -> InputBatch:
    """Pads the batch with one sequence that has the missing rows, and then with sequences without rows.

    The sequence with the missing rows starts at position 0, and all entries of its block table are the scratch block
    (`scratch_blocks`: one for each group of layers).
    The result has as many logits as rows: the batch's logits come first, and the remaining ones repeat the last row. In
    a bucket without logits it has none.
    """
    arrays, size = batch.arrays, batch.block_size
    num_rows = bucket.num_rows - batch.num_rows
    num_blocks = -(-num_rows // size)
    num_empty = bucket.num_rows - batch.num_seqs - (num_rows > 0)
    num_logits = bucket.num_rows - batch.num_logits if bucket.has_logits else 0
    assert min(num_rows, num_empty) >= 0, "the batch does not fit the bucket"
    lengths = array("i", [num_rows] * (num_rows > 0) + [0] * num_empty)
    starts, slots = arrays.path_starts, arrays.path_slots
    if bucket.has_trees:
        starts = starts or array("q", bytes(8 * (batch.num_rows + 1)))
        starts = starts + array("q", starts[-1:]) * num_rows
        unused = array("q", bytes(8 * (MAX_MEAN_DEPTH * bucket.num_rows - starts[-1])))
        slots = _extended(slots, [unused] * batch.num_groups)
    padded = BatchFields(
        token_ids=arrays.token_ids + array("q", bytes(8 * num_rows)),
        positions=arrays.positions + array("q", range(num_rows)),
        slot_mapping=_extended(
            arrays.slot_mapping,
            [array("q", [block * size + row % size for row in range(num_rows)]) for block in scratch_blocks],
        ),
        logits_rows=arrays.logits_rows + array("q", (bucket.num_rows - 1,)) * num_logits,
        query_start_loc=arrays.query_start_loc + array("i", (bucket.num_rows,)) * len(lengths),
        seq_lens=arrays.seq_lens + lengths,
        table_starts=arrays.table_starts + array("i", (batch.num_table_blocks + num_blocks,)) * len(lengths),
        path_starts=starts,
        path_slots=slots,
        attention_plan=array("i"),
        block_tables=_extended(arrays.block_tables, [array("i", (block,)) * num_blocks for block in scratch_blocks]),
    )
    return InputBatch(padded, size, is_padded=True)


def _extended(values: array[int], added: Sequence[array[int]]) -> array[int]:
    """Returns the values of all groups of layers, each group's followed by `added`."""
    if len(added) == 1:
        return values + added[0]
    size, extended = len(values) // len(added), array(values.typecode)
    for group, each in enumerate(added):
        extended += values[group * size : (group + 1) * size] + each
    return extended


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two >= `number`."""
    return 1 << (number - 1).bit_length()
