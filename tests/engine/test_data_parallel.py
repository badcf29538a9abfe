"""How a batch is divided by the ranks of its sequences."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.data_parallel import DataParallelRunner, LeadingDataRunner, divide_batch
from outrider.engine.input_batch import SequenceRows, build_input_batch

BLOCK_SIZE, BLOCKS_PER_RANK, NUM_RANKS = 4, 32, 3


@st.composite
def sequence(draw, index):
    """Returns a rank and rows whose blocks have the rank's own numbers."""
    num, start = draw(st.integers(1, 6)), draw(st.integers(0, 9))
    first = draw(st.integers(0, 20))
    num_drafts = draw(st.integers(0, num - 1))
    parents = [draw(st.integers(-1, draft - 1)) for draft in range(num_drafts)]
    tokens, blocks = [100 * index + row for row in range(num)], range(first, first + -(-(start + num) // BLOCK_SIZE))
    return draw(st.integers(0, NUM_RANKS - 1)), SequenceRows(
        tokens, start, list(blocks), draw(st.integers(0, num)), parents
    )


def test_a_rank_without_sequences_reports_layers_as_others_compute_them():
    log, runner = [], object.__new__(DataParallelRunner)
    runner.layers = [lambda *_: log.append("experts")] * 2
    runner._num_layers, runner.empty_states = 3, lambda num_rows: torch.empty((num_rows, 4))
    assert runner.hidden_rows(SimpleNamespace(num_rows=0), log.append).shape == (0, 4)
    assert log == [0, "experts", 1, "experts", 2]


def test_a_step_whose_layers_wait_for_the_device_is_not_asynchronous():
    runner = SimpleNamespace(attention_name="", can_be_traced=False, is_asynchronous=True)
    assert not LeadingDataRunner(runner, SimpleNamespace(size=2), blocks_per_rank=1).is_asynchronous


@given(st.data())
def test_each_rank_has_the_batch_of_its_own_sequences(data):
    planned = [data.draw(sequence(index)) for index in range(data.draw(st.integers(1, 5)))]
    rows = [
        own._replace(block_ids=[rank * BLOCKS_PER_RANK + block for block in own.block_ids]) for rank, own in planned
    ]
    batch = build_input_batch(rows, BLOCK_SIZE)
    batches, order = divide_batch(batch, NUM_RANKS, BLOCKS_PER_RANK)
    tokens = []
    for rank, found in enumerate(batches):
        mine = [own for at, own in planned if at == rank]
        if mine:
            assert found.arrays.__reduce_ex__(2)[2] == build_input_batch(mine, BLOCK_SIZE).arrays.__reduce_ex__(2)[2]
        else:
            assert (found.num_rows, found.num_seqs, found.num_logits) == (0, 0, 0)
        tokens += [found.arrays.token_ids[row] for row in found.arrays.logits_rows]
    by_place = dict(zip(order, tokens, strict=True))
    assert [by_place[place] for place in range(len(order))] == [
        batch.arrays.token_ids[row] for row in batch.arrays.logits_rows
    ]
