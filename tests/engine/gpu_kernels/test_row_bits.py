"""A row of our attention kernel has the same bits alone and with any other rows, as model.deterministic requires."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.gpu_kernels import work_list
from outrider.engine.gpu_kernels.work_list import Tile
from outrider.engine.input_batch import SequenceRows, build_input_batch

pytest.importorskip("triton")
TritonAttention = pytest.importorskip("outrider.engine.attention.triton_paged").TritonAttention

BLOCK_SIZE, NUM_BLOCKS = 16, 40
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
TILE = Tile(lines=16, keys=16, split_keys=16, splits_per_size=2)  # splits have 16, 16, 32, 32, … keys
BLOCKS = (7, 3, 11, 2, 9)
PLAIN = AttentionOptions(0.25)


HAS_CUDA = torch.cuda.is_available()
NO_GPU = pytest.mark.skipif(HAS_CUDA, reason="runs on the GPU")
KINDS = [  # triton's interpreter cannot multiply in bfloat16
    pytest.param(("cpu", torch.float32), marks=NO_GPU, id="interpreted-float32"),
    pytest.param(("cpu", torch.float16), marks=[NO_GPU, pytest.mark.full], id="interpreted-float16"),
    pytest.param(("cuda", torch.float32), marks=pytest.mark.gpu, id="cuda-float32"),
    pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu, id="cuda-bfloat16"),
]


@pytest.fixture
def _interpreted():
    """Replaces the fixture that skips tests on a GPU: these run on a GPU if there is one."""


@pytest.fixture(scope="module", params=KINDS)
def memory(request):
    """Returns (queries by position, keys, values). A row's query does not depend on its place in a batch."""
    generator = torch.Generator().manual_seed(3)
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    shapes = ((100, NUM_HEADS, HEAD_DIM), shape, shape)
    device, dtype = request.param
    return tuple(torch.randn(each, generator=generator).to(device, dtype) for each in shapes)


def attend(memory, *sequences, options=PLAIN, tile=TILE, num_programs=3):
    """Returns the attention of all rows: [num_rows, num_heads, head_dim]."""
    queries, keys, values = memory
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(queries.device))
    batch = build_input_batch(sequences, BLOCK_SIZE)
    heads = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS}
    attention = TritonAttention(queries.device, **heads, tile=tile, num_programs=num_programs)
    return attention.attend(attention.prepare(batch), queries[list(batch.arrays.positions)], keys, values, options)


def rows(start, end, blocks=BLOCKS, parents=()):
    return SequenceRows([0] * (end - start), start, blocks, 0, parents)


WINDOW = AttentionOptions(0.25, sliding_window=37, softcap=1.5)
SINKS = AttentionOptions(0.25, sliding_window=60, sinks=torch.tensor([-1.0, 5.0, 0.5, 2.0]))


@pytest.mark.parametrize(
    ("position", "options"),
    [
        *((0, PLAIN), (31, WINDOW), (32, PLAIN), (70, WINDOW), (70, SINKS)),
        *(
            pytest.param(*other, marks=pytest.mark.full)
            for other in ((0, WINDOW), (31, PLAIN), (32, WINDOW), (70, PLAIN))
        ),
    ],
)
def test_a_row_has_the_same_bits_alone_and_in_company(memory, position, options):
    alone = attend(memory, rows(position, position + 1), options=options)[0]
    for start, end in ((max(position - 3, 0), position + 1), (position, position + 5)):
        verified = attend(memory, rows(start, end), options=options)
        assert torch.equal(verified[position - start], alone)
    crowd = [rows(60, 61, (20, 21, 22, 23)), rows(position, position + 2), rows(0, 9, (24,)), rows(3, 4, (25,))]
    assert torch.equal(attend(memory, *crowd, options=options)[1], alone)


TREE = (-1, -1, 0, 0)


@pytest.mark.parametrize(
    ("options", "parents"),
    [
        *((WINDOW, ()), (PLAIN, TREE), (SINKS, TREE)),
        *(pytest.param(*other, marks=pytest.mark.full) for other in ((PLAIN, ()), (WINDOW, TREE))),
    ],
)
def test_however_a_tile_is_cut_its_rows_have_the_same_bits(memory, options, parents, monkeypatch):
    crowd = [rows(66, 71, parents=parents), rows(0, 9, (24,)), rows(60, 61, (20, 21, 22, 23))]
    monkeypatch.setattr(work_list, "ITEMS_PER_PROGRAM", 1)
    plans = set()
    whole = attend(memory, crowd[0], options=options, num_programs=1)
    for num_programs in (2, 4, 5, 100):
        for company in ([], crowd[1:]):
            found = attend(memory, crowd[0], *company, options=options, num_programs=num_programs)
            assert torch.equal(found[: len(whole)], whole)
            plans.add(planned(crowd[0], *company, num_programs=num_programs).tobytes())
    assert len(plans) >= 5
    monkeypatch.setattr(work_list, "MAX_PARTIALS", 0)
    assert not planned(crowd[0], num_programs=100)[3]
    assert torch.equal(attend(memory, crowd[0], options=options, num_programs=100), whole)


def planned(*sequences, num_programs):
    heads = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS}
    lists = work_list.WorkLists(TILE, **heads, num_programs=num_programs)
    return lists.plan(build_input_batch(sequences, BLOCK_SIZE))


@pytest.mark.parametrize("position", [3, 40, 69])
def test_a_plan_for_later_positions_gives_the_same_bits(memory, position):
    """A rollout uses one plan for all its forwards, because positions increase on the device."""
    queries, keys, values = memory
    later, now = (build_input_batch([rows(each, each + 1)], BLOCK_SIZE) for each in (70, position))
    attention = TritonAttention(
        queries.device, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, tile=TILE, num_programs=100
    )
    plan = attention.plan(later).arrays.attention_plan
    assert plan[1], "the tile is cut"
    planned_before = attention.prepare(now.with_plan(plan))
    found = attention.attend(planned_before, queries[[position]], keys, values, PLAIN)
    assert torch.equal(found, attend(memory, rows(position, position + 1)))


def test_a_token_has_the_same_bits_in_a_tree_and_in_a_chain(memory):
    """In the tree, its keys are in other slots, but they are read in the same order."""
    queries, keys, values = memory
    chain = attend(memory, rows(45, 50))
    keys, values = keys.clone(), values.clone()
    # Drafts 0, 2 and 4 of the tree are the chain's positions 46, 47 and 48, in the slots of rows 1, 3 and 5.
    for cache in (keys, values):
        before = [cache[BLOCKS[p // 16], p % 16].clone() for p in range(46, 52)]
        for place, source in ((46, 0), (48, 1), (50, 2)):
            cache[BLOCKS[place // 16], place % 16] = before[source]
        for place in (47, 49):
            cache[BLOCKS[place // 16], place % 16] = 99.0
    tree = attend((queries, keys, values), rows(45, 51, parents=(-1, -1, 0, 0, 2)))
    assert torch.equal(tree[[0, 1, 3, 5]], chain[:4])


def test_the_order_of_keys_would_be_noticed(memory):
    """Negative control: other blocks of keys lead to other rounding."""
    other = Tile(lines=16, keys=32, split_keys=32)
    difference = attend(memory, rows(66, 71)) - attend(memory, rows(66, 71), tile=other)
    assert 0.0 < float(difference.abs().max()) < (1e-5 if difference.dtype.itemsize == 4 else 2e-2)
