"""The part of a pipeline that one rank computes: a range of layers. Torch-free."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

from outrider.engine.input_batch import BatchFields, InputBatch


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one rank. Rank 0, the node, has the last stage, because it samples and has the features; rank r > 0
    has stage r - 1. So rows go from rank 1 to the ranks after it, and at last to rank 0.
    """

    index: int
    num_stages: int
    num_layers: int  # of the whole model
    taps: tuple[int, ...] = ()  # of the features that rank 0 writes (see FeatureSpec)

    @classmethod
    def of_rank(cls, rank: int, num_stages: int, num_layers: int) -> Stage:
        """Returns a rank's stage of a model with at least as many layers as stages."""
        return cls((rank - 1) % num_stages, num_stages, num_layers)

    @property
    def layers(self) -> range:
        """The stage's layers, numbered as in the whole model. If stages cannot have equally many, the first ones have
        one more, because the last stage also computes logits.
        """
        size, more = divmod(self.num_layers, self.num_stages)
        first = self.index * size + min(self.index, more)
        return range(first, first + size + (self.index < more))

    @property
    def layers_by_rank(self) -> tuple[range, ...]:
        """The layers of every rank."""
        ranks = range(self.num_stages)
        return tuple(Stage.of_rank(rank, self.num_stages, self.num_layers).layers for rank in ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1


def num_micro_batches(num_rows: int, num_stages: int, *, overhead_rows: int) -> int:
    """Returns the number of parts with which a step takes the shortest time.

    A stage takes as long for a part of n rows as if it were `overhead_rows` + n, because it reads its weights for each
    part. m parts take (m + num_stages - 1) times as long as one part, so the best m is
    sqrt((num_stages - 1) * num_rows / overhead_rows).
    """
    return max(round(((num_stages - 1) * num_rows / overhead_rows) ** 0.5), 1)


def cut_batch(batch: InputBatch, num_parts: int) -> tuple[InputBatch, ...]:
    """Cuts a batch into parts of about equally many rows, which compute the same if they run one after another.

    The rows of one sequence may be in several parts, unless the batch has draft trees. The batch must have no adapters.
    """
    arrays, num_rows = batch.arrays, batch.num_rows
    assert not batch.adapters
    ends = {-(-num_rows * part // num_parts) for part in range(1, num_parts + 1)}
    if batch.has_trees:  # attention takes the context of a sequence's first row in the batch as the tree's
        starts = arrays.query_start_loc
        ends = {starts[bisect_left(starts, end)] for end in ends}
    if len(ends) == 1:
        return (batch,)
    return tuple(_rows_of(batch, start, end) for start, end in pairwise([0, *sorted(ends)]))


def _rows_of(batch: InputBatch, start: int, end: int) -> InputBatch:
    """Returns rows [start, end) as a batch of the sequences that have some of them."""
    arrays, block_size, num_groups = batch.arrays, batch.block_size, batch.num_groups
    starts = arrays.query_start_loc
    first, last = bisect_right(starts, start) - 1, bisect_left(starts, end) - 1
    own_starts = array("i", [max(row - start, 0) for row in starts[first : last + 1]]) + array("i", (end - start,))
    seq_lens = arrays.seq_lens[first : last + 1]
    seq_lens[-1] -= starts[last + 1] - end  # rows of the next part
    tables = arrays.table_starts[first : last + 1]
    tables.append(tables[-1] + -(-seq_lens[-1] // block_size))
    logits = slice(bisect_left(arrays.logits_rows, start), bisect_left(arrays.logits_rows, end))
    paths = arrays.path_starts[start : end + 1]
    has_paths = bool(paths) and paths[0] < paths[-1]
    own = BatchFields(
        token_ids=arrays.token_ids[start:end],
        positions=arrays.positions[start:end],
        slot_mapping=_of_groups(arrays.slot_mapping, num_groups, start, end),
        logits_rows=_counted_from(start, arrays.logits_rows[logits]),
        query_start_loc=own_starts,
        seq_lens=seq_lens,
        table_starts=_counted_from(tables[0], tables),
        path_starts=_counted_from(paths[0], paths) if has_paths else array("q"),
        path_slots=_of_groups(arrays.path_slots, num_groups, paths[0], paths[-1]) if has_paths else array("q"),
        attention_plan=array("i"),
        block_tables=_of_groups(arrays.block_tables, num_groups, tables[0], tables[-1]),
    )
    return InputBatch(own, block_size)


def _of_groups(values: array[int], num_groups: int, start: int, end: int) -> array[int]:
    """Returns values [start, end) of every group."""
    size, found = len(values) // num_groups, array(values.typecode)
    for first in range(0, num_groups * size, size):
        found += values[first + start : first + end]
    return found


def _counted_from(first: int, numbers: array[int]) -> array[int]:
    return array(numbers.typecode, [number - first for number in numbers])
