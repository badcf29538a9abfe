"""The work lists of our attention kernel cover each row's keys once, evenly over programs, in bounded memory."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from outrider.engine.gpu_kernels import work_list
from outrider.engine.gpu_kernels.work_list import HEADER_INTS, ITEM_INTS, Tile, WorkLists
from outrider.engine.graph_shapes import GraphShapes, pad
from outrider.engine.input_batch import SequenceRows, build_input_batch

PROGRAMS = 264  # an H100's
LLAMA_8B = WorkLists(Tile(), num_heads=32, num_kv_heads=8, num_programs=PROGRAMS)
QWEN_05B = WorkLists(Tile(), num_heads=14, num_kv_heads=2, num_programs=PROGRAMS)


def batch_of(*sequences):
    """Builds a batch of sequences, given as (rows, tokens before them) or (rows, tokens before them, parents)."""
    rows = []
    for num, start, *parents in sequences:
        blocks = array("i", bytes(4 * -(-(start + num) // 16)))
        rows.append(SequenceRows([0] * num, start, blocks, 1, *parents))
    return build_input_batch(rows, 16)


def parts(plan, batch, lists):
    """Returns the plan's items [n, 7], and the index of each row's first partial result."""
    num_items, rows_start, num_rows, num_merged, _ = plan[:HEADER_INTS]
    room = lists.max_items(batch.num_rows) if batch.is_padded else num_items
    items, partials = np.split(np.asarray(plan)[HEADER_INTS:], [rows_start - HEADER_INTS])
    assert (items.size, len(partials)) == (room * ITEM_INTS, batch.num_rows)
    assert (num_rows, num_merged) == (batch.num_rows, (partials >= 0).sum())
    return items.reshape(room, ITEM_INTS)[:num_items], partials.tolist()


def test_splits_are_as_many_as_a_long_sequence_can_bear():
    sizes = 256 << np.arange(300) // 32
    starts = np.concatenate([[0], np.cumsum(sizes)])
    assert LLAMA_8B.split_of(starts).tolist() == list(range(301))
    assert LLAMA_8B.split_of(starts[1:] - 1).tolist() == list(range(300))
    assert [int(LLAMA_8B.split_of(np.array(tokens - 1))) + 1 for tokens in (1, 8192, 131_072, 2 << 20)] == [
        1,
        32,
        130,
        257,
    ]


def random_batches():
    choice = random.Random(4)
    yield batch_of((1, 0))
    yield batch_of((5, 131_000))
    yield batch_of((9, 2_000_000))
    yield batch_of(*[(1, 512)] * 128)
    yield batch_of(*[(1, 300)] * 127, (1, 40_000))
    yield batch_of((4096, 0), (1, 9000))
    yield batch_of((7, 3000, (-1, -1, 0, 1, 0)), (1, 900))
    for _ in range(30):
        lengths = [0, 40, 700, 5000, 60_000]
        yield batch_of(
            *[(choice.choice([1, 1, 1, 5, 40]), choice.choice(lengths)) for _ in range(choice.randint(1, 50))]
        )


@pytest.mark.parametrize("lists", [LLAMA_8B, QWEN_05B], ids=["4 heads a tile", "7 heads a tile"])
def test_every_row_meets_each_of_its_splits_once(lists):
    for batch in random_batches():
        bucket = GraphShapes(has_trees=True).bucket_of(batch)
        padded = batch if bucket is None else pad(batch, bucket, (9,))
        for each in {batch, padded}:
            arrays = each.arrays
            items, partials = parts(lists.plan(each), each, lists)
            met, num_items_of = [[] for _ in range(each.num_rows)], [0] * each.num_rows
            sequence_of = np.repeat(np.arange(each.num_seqs), np.diff(arrays.query_start_loc))
            for first_row, num_rows, table_start, first, end, partial, num_splits in items.tolist():
                assert 1 <= num_rows <= lists.rows_per_tile
                for row in range(first_row, first_row + num_rows):
                    assert arrays.table_starts[sequence_of[row]] == table_start
                    met[row] += range(first, end)
                    num_items_of[row] += 1
                    assert partials[row] == (-1 if partial < 0 else partial + (row - first_row) * num_splits)
            for row, splits in enumerate(met):
                assert sorted(splits) == list(range(len(splits)))
                assert len(splits) > int(lists.split_of(np.array(arrays.positions[row])))
            assert [number > 1 for number in num_items_of] == [first >= 0 for first in partials]
            taken = [
                first + split for first, splits in zip(partials, met, strict=True) if first >= 0 for split in splits
            ]
            assert len(set(taken)) == len(taken)
            assert max(taken, default=-1) < lists.max_partials


def idle_part(plan, batch, lists):
    """Returns the idle share of the programs' time, if every key takes the same time."""
    items, _ = parts(plan, batch, lists)
    starts = lists._split_starts
    ends = np.asarray(batch.arrays.positions)[items[:, 0] + items[:, 1] - 1] + 1
    keys = np.minimum(starts[items[:, 4]], ends) - starts[items[:, 3]]
    units = np.repeat(keys, lists.head_groups)
    busy = [units[program::PROGRAMS].sum() for program in range(PROGRAMS)]
    return 1 - np.mean(busy) / max(busy)


@pytest.mark.parametrize(
    ("sequences", "allowed"),
    [
        ([(1, 8191)], 0.1),
        ([(1, 131_071)], 0.4),  # its last splits are as long as a program's share
        ([(1, 511)] * 128, 0.1),
        ([(1, 2047)] * 34, 0.25),
        ([(1, 300)] * 127 + [(1, 40_000)], 0.2),  # one long sequence among short ones
        ([(1, 2100)] * 60, 0.2),
        ([(256, 8192)], 0.1),
        ([(5, 2000)] * 16, 0.1),
        ([(1, 32_767)], 0.1),
    ],
)
def test_programs_are_busy_to_the_end(sequences, allowed):
    batch = batch_of(*sequences)
    assert idle_part(LLAMA_8B.plan(batch), batch, LLAMA_8B) < allowed


def test_tiles_enough_are_not_cut():
    assert LLAMA_8B.plan(batch_of(*[(1, 511)] * 128))[3] == 0
    assert LLAMA_8B.plan(batch_of((4096, 0)))[3] == 0


def test_plans_of_a_bucket_are_of_one_length_and_memory_does_not_grow_with_the_context():
    for num_rows in (1, 3, 64, 200):
        lengths = set()
        for start in (0, 5000, 100_000, 2_000_000):
            for sequences in ([(num_rows, start)], [(1, start)] + [(1, 3)] * (num_rows - 1)):
                batch = batch_of(*sequences)
                lengths.add(len(LLAMA_8B.plan(pad(batch, GraphShapes().bucket_of(batch), (9,)))))
        assert len(lengths) == 1
    assert LLAMA_8B.max_partials * 32 * (128 + 2) * 4 < 70 << 20


def test_tiles_beyond_the_room_for_partials_are_whole(monkeypatch):
    monkeypatch.setattr(work_list, "MAX_PARTIALS", 32 * 600)
    lists = WorkLists(Tile(), num_heads=32, num_kv_heads=8, num_programs=PROGRAMS)
    items, partials = parts(lists.plan(batch := batch_of((4, 131_000), (4, 131_000))), batch, lists)
    assert [first >= 0 for first in partials] == [True] * 4 + [False] * 4
    assert [item[:2] for item in items.tolist()].count([4, 4]) == 1
