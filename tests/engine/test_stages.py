"""How layers are divided among stages, and batches are cut into parts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.stages import Stage, cut_batch, num_micro_batches

BLOCK_SIZE = 4


@pytest.mark.parametrize(("num_layers", "sizes"), [(30, [10, 10, 10]), (3, [1, 1, 1]), (8, [3, 3, 2]), (7, [3, 2, 2])])
def test_every_layer_is_in_one_stage_and_the_last_stage_is_rank_0(num_layers, sizes):
    stages = [Stage.of_rank(rank, 3, num_layers) for rank in (1, 2, 0)]
    assert [len(stage.layers) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    assert [stage.is_first for stage in stages] == [True, False, False]
    assert [stage.is_last for stage in stages] == [False, False, True]
    assert stages[0].layers_by_rank == tuple(stages[index].layers for index in (2, 0, 1))


def test_more_rows_make_more_parts():
    parts = [num_micro_batches(rows, 2, overhead_rows=80) for rows in (1, 16, 64, 256, 1024)]
    assert parts == [1, 1, 1, 2, 4]
    assert num_micro_batches(256, 3, overhead_rows=80) > 2


def random_rows(generator, *, has_trees):
    rows = []
    for _ in range(generator.randrange(1, 6)):
        num, start = generator.randrange(1, 12), generator.randrange(20)
        table = generator.sample(range(100), -(-(start + num) // BLOCK_SIZE) + generator.randrange(2))
        num_drafts = generator.randrange(num) if has_trees else 0
        parents = tuple(generator.randrange(-1, draft) if draft else -1 for draft in range(num_drafts))
        ids = [generator.randrange(300) for _ in range(num)]
        rows.append(SequenceRows(ids, start, table, generator.randrange(num + 1), parents))
    return rows


def seen_by(batch):
    """Returns for each row its token, position, slot, whether it has logits, and the slots of all keys that it sees."""
    arrays, rows = batch.arrays, []
    for sequence in range(batch.num_seqs):
        first, end = arrays.query_start_loc[sequence : sequence + 2]
        context = batch.context_slots(sequence, arrays.seq_lens[sequence]).tolist()
        assert len(set(arrays.table_starts)) > 1
        for row in range(first, end):
            path = arrays.path_slots[slice(*arrays.path_starts[row : row + 2])].tolist() if batch.has_trees else []
            before = arrays.seq_lens[sequence] - (end - row) + 1  # in row order
            if path:
                before = arrays.positions[row] + 1 - len(path)
            key = (arrays.token_ids[row], arrays.positions[row], arrays.slot_mapping[row], row in arrays.logits_rows)
            rows.append((*key, tuple(context[:before]), tuple(path)))
    return rows


@pytest.mark.parametrize("has_trees", [False, True])
def test_rows_see_the_same_keys_in_parts(has_trees):
    generator = random.Random(3)
    num_cut = 0
    for _ in range(200):
        batch = build_input_batch(random_rows(generator, has_trees=has_trees), BLOCK_SIZE)
        parts = cut_batch(batch, generator.randrange(1, 6))
        num_cut += len(parts) > 1
        assert [row for part in parts for row in seen_by(part)] == seen_by(batch)
        for part in parts:
            assert part.num_rows
            arrays = part.arrays
            assert np.diff(arrays.query_start_loc).min() > 0
            assert arrays.table_starts[-1] == len(arrays.block_tables)
            if has_trees:
                assert len(arrays.path_starts) in (0, part.num_rows + 1)
    assert num_cut > 50


def test_parts_have_about_equally_many_rows():
    batch = build_input_batch([SequenceRows([1] * 100, 0, range(25), 1)], BLOCK_SIZE)
    assert [part.num_rows for part in cut_batch(batch, 3)] == [34, 33, 33]
    assert cut_batch(batch, 1) == (batch,)
    assert [part.num_logits for part in cut_batch(batch, 3)] == [0, 0, 1]
