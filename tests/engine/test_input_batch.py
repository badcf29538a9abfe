from __future__ import annotations

import random
from array import array
from itertools import pairwise

import pytest
import torch

from outrider.engine.input_batch import SequenceRows, build_input_batch

CPU = torch.device("cpu")


def test_rows_of_all_sequences_lie_end_to_end():
    batch = build_input_batch(
        [
            SequenceRows([11, 12, 13], start_position=3, block_ids=[7, 2], num_logits=2),
            SequenceRows([21], start_position=0, block_ids=[5], num_logits=1),
            SequenceRows([31, 32], start_position=8, block_ids=[1, 9, 4], num_logits=0),
        ],
        block_size=4,
    )
    assert batch.arrays.token_ids.tolist() == [11, 12, 13, 21, 31, 32]
    assert batch.arrays.positions.tolist() == [3, 4, 5, 0, 8, 9]
    assert batch.arrays.slot_mapping.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 5 * 4, 4 * 4, 4 * 4 + 1]
    assert batch.arrays.query_start_loc.tolist() == [0, 3, 4, 6]
    assert batch.arrays.seq_lens.tolist() == [6, 1, 10]
    assert batch.on(CPU).block_tables.tolist() == [7, 2, 5, 1, 9, 4]
    assert batch.arrays.table_starts.tolist() == [0, 2, 3, 6]
    assert batch.context_slots(2, 9).tolist() == [4, 5, 6, 7, 36, 37, 38, 39, 16]
    assert batch.arrays.logits_rows.tolist() == [1, 2, 3]
    assert (batch.num_rows, batch.num_seqs) == (6, 3)


def test_rows_go_to_the_slots_of_their_positions_wherever_they_begin_and_end():
    for block_size in (1, 3, 16):
        block_ids = array("i", random.Random(block_size).sample(range(100), 30))
        for start in range(2 * block_size + 2):
            for num in range(1, 3 * block_size + 2):
                batch = build_input_batch([SequenceRows(range(num), start, block_ids, num)], block_size)
                positions = range(start, start + num)
                assert batch.arrays.positions.tolist() == list(positions)
                assert batch.arrays.slot_mapping.tolist() == [
                    block_ids[position // block_size] * block_size + position % block_size for position in positions
                ]
                assert batch.arrays.block_tables == block_ids[: -(-(start + num) // block_size)]


WRONG = {
    "no rows": SequenceRows([], 0, [1], 0),
    "too few blocks": SequenceRows([1, 2, 3, 4, 5], 0, [1], 1),
    "too few blocks for the position": SequenceRows([1], 4, [1], 1),
    "more logits than rows": SequenceRows([1], 0, [1], 2),
    "no known token": SequenceRows([1], 0, [1], 1, parents=(-1,)),
    "a draft that follows itself": SequenceRows([1, 2, 3], 0, [1], 1, parents=(-1, 1)),
}


@pytest.mark.parametrize("rows", WRONG.values(), ids=WRONG.keys())
def test_rows_that_do_not_fit_are_a_bug_of_the_caller(rows):
    with pytest.raises(ValueError, match="sequence 0"):
        build_input_batch([rows], block_size=4)


def test_rows_of_a_tree_have_slots_in_their_order_and_positions_by_their_depth():
    batch = build_input_batch(
        [
            SequenceRows([9], start_position=1, block_ids=[8], num_logits=1),
            # Tokens 20 and 21 are known. Two branches of drafts follow: 30 → 31 → 32 and 40 → 41.
            SequenceRows([20, 21, 30, 40, 31, 41, 32], 2, [7, 5, 3], num_logits=6, parents=(-1, -1, 0, 1, 2)),
        ],
        block_size=4,
    )
    assert batch.has_trees
    assert batch.arrays.positions.tolist() == [1, 2, 3, 4, 4, 5, 5, 6]
    assert batch.arrays.slot_mapping.tolist() == [33, 30, 31, 20, 21, 22, 23, 12]
    assert batch.arrays.seq_lens.tolist() == [2, 9]
    starts, slots = batch.arrays.path_starts, batch.arrays.path_slots
    paths = [slots[start:end].tolist() for start, end in pairwise(starts)]
    assert paths == [[], [], [], [20], [21], [20, 22], [21, 23], [20, 22, 12]]


def test_a_chain_of_drafts_needs_no_paths():
    batch = build_input_batch([SequenceRows([1, 2, 3], 0, [0], num_logits=3)], block_size=4)
    assert not batch.has_trees
    assert not batch.arrays.path_slots


def test_a_forward_needs_a_sequence():
    with pytest.raises(ValueError, match="at least one"):
        build_input_batch([], block_size=4)


def test_a_batch_tells_from_which_sequences_it_was_made():
    windows = [array("i", [40, 41, 42])], [array("i", [50, 51])]
    rows = [
        SequenceRows(array("q", [11, 12, 13, 14]), 5, array("i", [7, 2, 8]), 3, [-1, -1, 1], None, windows[0]),
        SequenceRows(array("q", [21, 22]), 3, array("i", [5, 6]), 0, [], None, windows[1]),
    ]
    assert list(build_input_batch(rows, block_size=4).sequences()) == rows
