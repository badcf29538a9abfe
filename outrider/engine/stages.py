"""The part of a pipeline that one rank computes: a range of layers. Torch-free."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch


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

    The rows of one sequence may be in several parts, unless the batch has draft trees. The model must have no linear
    attention.
    """
    num_rows, starts = batch.num_rows, batch.arrays.query_start_loc
    assert not batch.states
    ends = {-(-num_rows * part // num_parts) for part in range(1, num_parts + 1)}
    if batch.has_trees:  # attention takes the context of a sequence's first row in the batch as the tree's
        ends = {starts[bisect_left(starts, end)] for end in ends}
    if len(ends) == 1:
        return (batch,)
    sequences, parts = list(batch.sequences()), list[InputBatch]()
    for start, end in pairwise([0, *sorted(ends)]):
        own = range(bisect_right(starts, start) - 1, bisect_left(starts, end))
        rows = [_rows_of(sequences[index], start - starts[index], end - starts[index]) for index in own]
        parts.append(build_input_batch(rows, batch.block_size))
    return tuple(parts)


def _rows_of(sequence: SequenceRows, start: int, end: int) -> SequenceRows:
    """Returns those of a sequence's rows that are in [start, end), counted from its first row."""
    num_rows, start = len(sequence.token_ids), max(start, 0)
    num_after = max(num_rows - end, 0)
    return sequence._replace(
        token_ids=sequence.token_ids[start:end],
        start_position=sequence.start_position + start,
        num_logits=min(max(sequence.num_logits - num_after, 0), num_rows - num_after - start),
    )
