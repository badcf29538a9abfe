"""The work list of our attention kernel for one forward, made on the host. Torch-free.

A tile is some rows of one sequence. An item of the list is a tile with either all splits of its keys or only some of
them. In the second case the tile is cut, and `merge_splits` adds the partial sums of its splits. The kernel has as
many programs as a GPU runs concurrently, and they go through the list with equal strides. So programs are as busy with
few long sequences as with many short ones. Splits begin at fixed positions and are added in order, so cutting a tile
changes no bits.

Source of the fixed grid, and of planning it on the host: FlashInfer (Ye et al. 2025, arXiv 2501.01005).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engine.input_batch import InputBatch

HEADER_INTS = 5
"""Integers at the start of a plan: the number of items, the offset of the rows' partials, the number of rows, the
number of rows to merge, and the number of entries in the block tables of one group of layers."""
ITEM_INTS = 7
"""Integers of an item: first row, number of rows, start of the block table, first split, end split, first partial or
-1, and partials per row."""
MAX_PARTIALS = 1 << 17
"""Maximum number of partial sums in a forward, each for a row, a query head and a split: 68 MB with heads of 128
values. Tiles are not cut if cutting would need more sums."""
ITEMS_PER_PROGRAM = 4
"""Target number of items per program. With items of equal length, programs are idle for at most about a fifth of the
time."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes of our attention kernel. Of all sizes, only these affect the exact bits of a row's result."""

    lines: int = 32  # rows × query heads of a KV head; a multiple of 16
    keys: int = 64  # positions in a block
    split_keys: int = 256  # positions in each of the first splits; a multiple of `keys`
    splits_per_size: int = 32  # number of splits of each size; sizes then double, to limit the number of splits
    num_warps: int = 4
    num_stages: int = 3


_Numbers = npt.NDArray[Any]
_NUM_SIZES = 20
"""Number of different sizes of splits, more than enough for 31-bit positions."""


class WorkLists:
    """Makes plans, [ints] int32, for one model. A plan serves all of the model's layers.

    A plan is a header, items, and for each row the index of its first partial sum, or -1 if its tile was not cut.
    """

    def __init__(self, tile: Tile, *, num_heads: int, num_kv_heads: int, num_programs: int) -> None:
        """`num_programs`: number of the kernel's programs, all of which the GPU runs concurrently."""
        heads_per_kv = num_heads // num_kv_heads
        heads_per_tile = min(heads_per_kv, tile.lines)
        self.rows_per_tile = tile.lines // heads_per_tile
        self.head_groups = num_kv_heads * -(-heads_per_kv // heads_per_tile)  # each item is computed once per group
        self.max_partials = MAX_PARTIALS // num_heads  # each partial holds all heads of one row and one split
        sizes = tile.split_keys << np.arange(_NUM_SIZES).repeat(tile.splits_per_size)
        self._split_starts = np.concatenate([[0], np.cumsum(sizes)])
        self._num_abreast = -(-num_programs // self.head_groups)  # items processed concurrently

    def max_items(self, num_rows: int) -> int:
        """Returns the maximum number of items in the plan of a batch of `num_rows` rows."""
        return 2 * num_rows + ITEMS_PER_PROGRAM * self._num_abreast

    def plan(self, batch: InputBatch) -> array[int]:
        """Makes a batch's plan. A padded batch's plan has room for the items of any batch with as many rows.

        The plan is also valid for a batch of the same rows at earlier positions.
        """
        starts = np.frombuffer(batch.arrays.query_start_loc, dtype=np.int32)
        positions = np.frombuffer(batch.arrays.positions, dtype=np.int64)
        seqs, places = _runs(-((starts[:-1] - starts[1:]) // self.rows_per_tile))  # per tile
        first_rows = starts[seqs] + places * self.rows_per_tile
        num_rows = np.minimum(starts[seqs + 1] - first_rows, self.rows_per_tile)
        num_keys = np.maximum.reduceat(positions, first_rows) + 1
        num_splits = self.split_of(num_keys - 1) + 1

        for items_per_program in (ITEMS_PER_PROGRAM, 1):
            wanted_keys = num_keys.sum() / (items_per_program * self._num_abreast)
            num_pieces = np.minimum(np.rint(num_keys / wanted_keys).astype(np.int64), num_splits)
            num_partials = np.where(num_pieces > 1, num_rows * num_splits, 0)
            end_partials = np.cumsum(num_partials)
            if end_partials[-1] <= self.max_partials:
                break
        is_cut = (num_pieces > 1) & (end_partials <= self.max_partials)
        first_partials = np.where(is_cut, end_partials - num_partials, -1)
        num_pieces = np.where(is_cut, num_pieces, 1)
        tiles, places = _runs(num_pieces)  # per item
        first_splits = self.split_of(num_keys[tiles] * places // num_pieces[tiles])
        end_splits = np.empty_like(first_splits)
        end_splits[:-1] = first_splits[1:]
        end_splits[np.cumsum(num_pieces) - 1] = num_splits
        lengths = np.minimum(self._split_starts[end_splits], num_keys[tiles]) - self._split_starts[first_splits]
        table_starts = np.frombuffer(batch.arrays.table_starts, dtype=np.int32)[seqs]
        of_tiles = (each[tiles] for each in (first_rows, num_rows, table_starts))
        of_partials = (each[tiles] for each in (first_partials, num_splits))
        listed = np.stack((*of_tiles, first_splits, end_splits, *of_partials), axis=1)
        room = self.max_items(batch.num_rows) if batch.is_padded else len(listed)
        items = np.zeros((room, ITEM_INTS), dtype=np.int32)
        items[: len(listed)] = listed[self._in_turns(np.argsort(-lengths, kind="stable"))]

        tiles, places = _runs(num_rows)  # per row
        partials = np.where(is_cut[tiles], first_partials[tiles] + places * num_splits[tiles], -1).astype(np.int32)
        header = (
            len(listed),
            HEADER_INTS + items.size,
            batch.num_rows,
            int((partials >= 0).sum()),
            batch.num_table_blocks,
        )
        return array("i", header) + array("i", items.tobytes() + partials.tobytes())

    def split_of(self, positions: _Numbers) -> _Numbers:
        """Returns the index of each position's split."""
        return np.searchsorted(self._split_starts, positions, side="right") - 1

    def _in_turns(self, order: _Numbers) -> _Numbers:
        """Rearranges `order`, which goes from the longest item to the shortest, to give programs about equal shares.

        Programs go through the list with equal strides, so every second stretch of `_num_abreast` items is reversed.
        """
        turns = np.full((-(-len(order) // self._num_abreast), self._num_abreast), -1)
        turns.flat[: len(order)] = order
        turns[1::2] = turns[1::2, ::-1]
        return turns[turns >= 0]


def _runs(lengths: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Returns, for each element of runs of these lengths laid end to end, its run and its index within the run."""
    runs = np.repeat(np.arange(len(lengths)), lengths)
    return runs, np.arange(len(runs)) - (np.cumsum(lengths) - lengths)[runs]
