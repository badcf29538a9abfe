"""Rules for captured steps that a CPU can check: which addresses they read, and that padding changes nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
from array import array
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from outrider.engine.attention import make_attention_backend
from outrider.engine.features import FeatureReduction
from outrider.engine.graph_shapes import MAX_BUCKET_ROWS, MAX_MEAN_DEPTH, MAX_TABLE_BLOCKS, Bucket, GraphShapes, pad
from outrider.engine.input_batch import FIELD_NAMES, SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.low_rank import PackedAdapter
from outrider.engine.model_runner import make_runner
from outrider.engine.step_graphs import StepGraphs, cuda_graphs
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
SCRATCH = 40
REAL_SLOTS = np.arange(SCRATCH * BLOCK_SIZE)
TREES = GraphShapes(has_trees=True)
PROMPTS = GraphShapes(has_logits=False)


def batch_of(*sequences):
    """Builds a batch of sequences with four blocks each, given as (tokens, start) or (tokens, start, parents)."""
    return build_input_batch(
        [
            SequenceRows(tokens, start, range(4 * index, 4 * index + 4), len(tokens), *parents)
            for index, (tokens, start, *parents) in enumerate(sequences)
        ],
        BLOCK_SIZE,
    )


@pytest.mark.parametrize(
    ("rows", "num_rows"),
    [
        ([1], 1),
        ([1] * 3, 4),
        ([1] * 8, 8),
        ([5], 8),
        ([5, 5, 1], 16),
        ([1] * MAX_BUCKET_ROWS, MAX_BUCKET_ROWS),
        ([200, 57], None),
    ],
)
@pytest.mark.parametrize("num_logits", [0, 1, None])
def test_buckets_hold_their_batches(rows, num_rows, num_logits):
    """The number of rows with logits does not matter: steps mix prompt chunks and answers."""
    sequences = [SequenceRows([1] * count, 0, range(16), count if num_logits is None else num_logits) for count in rows]
    found = TREES.bucket_of(build_input_batch(sequences, BLOCK_SIZE))
    assert found == (num_rows and Bucket(num_rows))


def test_the_number_of_rows_alone_makes_a_bucket():
    assert [each.num_rows for each in GraphShapes(5).buckets] == [8, 4, 2, 1]
    assert [each.num_rows for each in TREES.buckets if each.has_trees] == [256, 128, 64, 32, 16, 8, 4]
    for num_tokens in (1, 3000, 2_000_000):
        blocks = [3] * -(-num_tokens // BLOCK_SIZE)
        batch = build_input_batch([SequenceRows([1], num_tokens - 1, blocks, 1)], BLOCK_SIZE)
        assert GraphShapes(5).bucket_of(batch) == Bucket(1)


def test_trees_run_as_they_are_where_none_are_captured_and_tables_where_the_buffer_ends():
    tree = batch_of(([1, 2, 3], 0, (-1, -1)))
    assert TREES.bucket_of(tree) == Bucket(4, has_trees=True)
    assert GraphShapes().bucket_of(tree) is None
    chain = [SequenceRows([1] * 60, 0, range(4), 60, range(-1, 58))]
    assert TREES.bucket_of(build_input_batch(chain, BLOCK_SIZE)) is None  # its paths are too long for the buffer
    for num_blocks, found in ((MAX_TABLE_BLOCKS - 1, Bucket(1)), (MAX_TABLE_BLOCKS, None)):
        longest = [SequenceRows([1], num_blocks - 1, range(num_blocks), 1)]
        assert TREES.bucket_of(build_input_batch(longest, block_size=1)) == found


def test_prompts_have_few_buckets_and_no_logits():
    assert [each.num_rows for each in PROMPTS.buckets] == [256, 128, 64]
    for num_rows, found in ((1, 64), (64, 64), (65, 128), (256, 256), (257, None)):
        rows = SequenceRows([1] * num_rows, 5, range(20), 0)
        batch = build_input_batch([rows], BLOCK_SIZE)
        assert PROMPTS.bucket_of(batch) == (found and Bucket(found, has_logits=False))
        assert PROMPTS.bucket_of(build_input_batch([rows._replace(num_logits=1)], BLOCK_SIZE)) is None
        if found:
            padded = pad(batch, PROMPTS.bucket_of(batch), (SCRATCH,))
            assert (padded.num_rows, padded.num_logits, padded.selects_logits) == (found, 0, True)


def test_every_bucket_of_a_batch_is_captured():
    """Nothing is captured while a node serves, so every bucket must be captured before."""
    for shapes in (GraphShapes(1), GraphShapes(100, has_trees=True), TREES):
        captured = set(shapes.buckets)
        for num_rows in range(1, 300):
            for parents in ((), (-1, -1)):
                rows = SequenceRows([1] * num_rows, 0, range(256), num_rows, parents if num_rows > 2 else ())
                found = shapes.bucket_of(build_input_batch([rows], BLOCK_SIZE))
                assert found is None or found in captured


def test_padding_is_a_sequence_in_the_scratch_block_then_some_without_rows():
    batch = batch_of(([1, 2, 3], 30), ([4], 5), ([4], 5))
    padded = pad(batch, Bucket(8), (SCRATCH,))
    assert (padded.num_seqs, padded.num_rows, padded.is_padded) == (8, 8, True)
    scratch_slots = [SCRATCH * BLOCK_SIZE + row for row in range(3)]
    assert padded.arrays.slot_mapping.tolist() == [*batch.arrays.slot_mapping.tolist(), *scratch_slots]
    assert padded.arrays.query_start_loc.tolist() == [0, 3, 4, 5, 8, 8, 8, 8, 8]
    assert padded.arrays.positions[5:].tolist() == [0, 1, 2]
    assert padded.arrays.seq_lens.tolist() == [33, 6, 6, 3, 0, 0, 0, 0]
    assert padded.arrays.table_starts.tolist() == [0, 3, 4, 5, 6, 6, 6, 6, 6]
    assert padded.arrays.block_tables.tolist() == [0, 1, 2, 4, 8, SCRATCH]
    assert padded.arrays.logits_rows.tolist() == [*range(5), 7, 7, 7]


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 200])
def test_padding_is_an_ordinary_batch_however_many_rows_it_has(num_rows):
    """A padded batch equals one that build_input_batch makes with the padding as a sequence."""
    bucket = Bucket(256)
    batch = build_input_batch([SequenceRows([7] * (256 - num_rows), 3, range(17), 1)], BLOCK_SIZE)
    padded = pad(batch, bucket, (SCRATCH,))
    scratch = SequenceRows([0] * num_rows, 0, [SCRATCH] * -(-num_rows // BLOCK_SIZE), 1)
    both = build_input_batch([SequenceRows([7] * (256 - num_rows), 3, range(17), 1), scratch], BLOCK_SIZE).arrays
    for name in ("token_ids", "positions", "slot_mapping"):
        assert getattr(padded.arrays, name) == getattr(both, name)
    assert padded.context_slots(1, num_rows).tolist() == list(both.slot_mapping[-num_rows:])
    assert len(padded.arrays.logits_rows) == 256
    full = pad(padded, bucket, (SCRATCH,))
    assert full.arrays.seq_lens == padded.arrays.seq_lens


def test_a_padded_tree_keeps_its_paths():
    batch = batch_of(([1, 2, 3, 4], 30, (-1, -1, 1)), ([4], 5))
    padded = pad(batch, Bucket(8, has_trees=True), (SCRATCH,))
    num_slots = len(batch.arrays.path_slots)
    assert padded.arrays.path_starts.tolist() == [*batch.arrays.path_starts.tolist(), *[num_slots] * 3]
    assert padded.arrays.path_slots[:num_slots].tolist() == batch.arrays.path_slots.tolist()
    assert len(padded.arrays.path_slots) == 8 * MAX_MEAN_DEPTH


@pytest.fixture(scope="module")
def model(tiny_model):
    torch.set_num_threads(1)
    return load_model(ModelConfig(id=str(tiny_model)))


def test_padding_changes_no_other_row(model):
    """Native kernels give equal bits, torch's kernels only close numbers."""
    cache = PagedKVCache(
        model.spec.planes,
        layer_groups=model.spec.layer_groups,
        num_blocks=SCRATCH,
        block_size=BLOCK_SIZE,
        num_scratch_blocks=1,
        kernels=model.cpu_kernels,
    )
    assert cache.scratch_blocks == (SCRATCH,)
    runner = make_runner(model, cache, make_attention_backend())
    batch = batch_of(([5, 6, 7], 0), ([9], 0), ([2], 0))
    plain = torch.tensor(runner.forward(batch))
    before = [cache.read(plane.name, range(plane.num_layers), REAL_SLOTS).copy() for plane in model.spec.planes]
    padded = torch.as_tensor(runner.forward(pad(batch, TREES.bucket_of(batch), (SCRATCH,))))[:5]
    if model.native is None:
        torch.testing.assert_close(padded, plain)
    else:
        assert torch.equal(padded, plain)
    after = [cache.read(plane.name, range(plane.num_layers), REAL_SLOTS) for plane in model.spec.planes]
    assert all(written.any() for written in before)
    assert model.native is None or all(map(np.array_equal, before, after))


def capture_on_a_cpu(run):
    """Simulates a graph on a CPU: its replay repeats the call."""
    run()
    return run


def graphs_of(forward, shapes=TREES, plan=lambda batch: batch, *, scratch_blocks=(SCRATCH,)):
    graphs = StepGraphs(
        shapes,
        device=CPU,
        scratch_blocks=scratch_blocks,
        block_size=BLOCK_SIZE,
        capture=capture_on_a_cpu,
        plan=plan,
    )
    graphs.capture_all(forward)
    return graphs


def test_a_captured_step_reads_and_writes_the_same_addresses():
    seen = []

    def forward(batch):
        tensors = batch.on(CPU)
        seen.append([getattr(tensors, name).data_ptr() for name in FIELD_NAMES])
        assert len({address % 16 for address in seen[-1]}) == 1  # otherwise a kernel is compiled for each
        numbers = (tensors.token_ids * 1000 + tensors.positions).float().unsqueeze(1)
        return numbers.index_select(0, tensors.logits_rows) if batch.selects_logits else numbers

    graphs = graphs_of(forward, shapes=GraphShapes(8, has_trees=True))
    captured = {tuple(each) for each in seen}
    seen.clear()
    addresses = set()
    for tokens, start, *parents in (([1, 2, 3], 30), ([7, 8, 9], 2), ([4, 5], 1100), ([1, 2, 3], 5, (-1, -1))):
        for num_logits in (len(tokens), 1):  # 1: fewer logits than rows, as for a chunk of a prompt
            blocks = range(-(-(start + 3) // BLOCK_SIZE))  # tables of any length
            rows = [SequenceRows(tokens, start, blocks, num_logits, *parents), SequenceRows([6], 3, (4,), 1)]
            logits = graphs.run(build_input_batch(rows, BLOCK_SIZE))
            addresses.add(logits.data_ptr())
            depths = [0, 1, 1] if parents else range(len(tokens))
            expected = [1000 * token + start + depth for token, depth in zip(tokens, depths, strict=True)]
            assert logits.squeeze(1).tolist() == [*expected[-num_logits:], 6003]
    assert len(addresses) == 1
    assert graphs.row_counts == (1, 2, 4, 8)
    assert len({tuple(each) for each in seen}) == 2  # those of four rows, with and without trees
    assert {tuple(each) for each in seen} <= captured
    assert graphs.run(build_input_batch([SequenceRows([1, 2], 0, (1,), 0)], BLOCK_SIZE)).shape == (0, 1)
    assert graphs.run(build_input_batch([SequenceRows([1] * 9, 0, (1,), 1)], BLOCK_SIZE)) is None


def test_a_batch_can_be_padded_before_its_tokens_are_known():
    def forward(batch):
        tensors = batch.on(CPU)
        return (tensors.token_ids * 1000 + tensors.positions).float().unsqueeze(1)

    graphs = graphs_of(forward, shapes=GraphShapes(8))
    later = graphs.padded(build_input_batch([SequenceRows([0], 5 + seq, (seq,), 1) for seq in range(3)], BLOCK_SIZE))
    graphs.run(batch_of(([9], 3)))  # meanwhile
    later.arrays.token_ids[:3] = array("q", (4, 7, 2))
    assert graphs.run(later)[:3, 0].tolist() == [4005, 7006, 2007]
    assert graphs.padded(build_input_batch([SequenceRows([1] * 9, 0, (1,), 1)], BLOCK_SIZE)) is None


def test_a_batch_with_adapters_has_no_graph():
    graphs = graphs_of(lambda batch: batch.on(CPU).token_ids.float().unsqueeze(1), shapes=GraphShapes(8))
    rows, adapter = SequenceRows([5], 3, [1], 1), Mock(PackedAdapter)
    assert graphs.padded(build_input_batch([rows], BLOCK_SIZE)) is not None
    with_adapter = build_input_batch([rows, rows._replace(adapter=adapter)], BLOCK_SIZE)
    assert graphs.padded(with_adapter) is None
    assert graphs.run(with_adapter) is None


@pytest.mark.triton
def test_a_model_with_our_attention_can_be_captured(model):
    """All that a forward takes from the host is the same for each batch of a bucket, as interpreted kernels show."""
    pytest.importorskip("triton")
    from tests.support.interpreted_triton import interpreted_attention

    loaded = load_model(ModelConfig(id=str(model.directory), kernels="torch"))
    runners, features = [], []
    heads = {"num_heads": loaded.spec.num_heads, "num_kv_heads": loaded.spec.num_kv_heads}
    reduction = FeatureReduction(taps=(2, 1), hidden_size=64, projection=torch.eye(128)[::2])
    for _ in range(2):
        planes = loaded.with_features(reduction).spec.planes
        cache = PagedKVCache(planes, num_blocks=SCRATCH, block_size=BLOCK_SIZE, num_scratch_blocks=1)
        runners.append(make_runner(loaded, cache, interpreted_attention(**heads), features=reduction))
        features.append(cache.layers(reduction.plane_name)[0][:SCRATCH])
    captured = runners[1]
    captured._graphs = graphs_of(captured._compute, GraphShapes(8, has_trees=True), captured._attention.plan)
    for tokens, start, *parents in (([1, 2, 3], 0), ([7], 3), ([8, 9, 4], 4, (-1, -1)), ([5], 7), ([3] * 6, 8)):
        rows = [
            SequenceRows(tokens, start, range(4), min(len(tokens), 3), *parents),  # at most 3, as for prompt chunks
            SequenceRows([6], 3 * (start > 0), range(4, 8), 1),
        ]
        batch = [build_input_batch(rows, BLOCK_SIZE) for _ in runners]
        logits = [runner.forward(each).clone() for runner, each in zip(runners, batch, strict=True)]
        torch.testing.assert_close(*logits)
        torch.testing.assert_close(*features)


class Stream(str):
    __slots__ = ()

    def wait_stream(self, other):
        return


def test_steps_are_captured_on_their_own_device_in_one_stream_without_garbage_collection(monkeypatch):
    """The device is not the current device, which is the first GPU."""
    places, events, modes, numbers = ["cuda:0"], [], [], itertools.count(1)

    @contextlib.contextmanager
    def within(place):
        places.append(place)
        yield
        places.pop()

    def note(*what):
        events.append((*map(str, places), *what))

    calls = {
        "device": within,
        "stream": lambda stream: contextlib.nullcontext() if stream == "current" else within(stream),
        "Stream": lambda: Stream(f"stream {next(numbers)} of {places[-1]}"),
        "current_stream": lambda: Stream("current"),
        "graph_pool_handle": lambda: f"pool of {places[-1]}",
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": modes.append,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: note("replay")),
        "graph": lambda _graph, *, pool, stream, capture_error_mode: within(f"capture by {stream} in {pool}"),
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.cuda, name, call)
    capture = cuda_graphs(torch.device("cuda:1"))
    assert gc.isenabled()
    for _ in range(2):
        events.clear()
        capture(lambda: note(gc.isenabled()))()
        assert events == [
            ("cuda:0", "cuda:1", "stream 1 of cuda:1", False),
            ("cuda:0", "cuda:1", "capture by stream 1 of cuda:1 in pool of cuda:1", False),
            ("cuda:0", "cuda:1", "replay"),
        ]
        assert modes == ["error", 0]
        modes.clear()
    assert gc.isenabled()

    released = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *where: released.append(where), raising=False)

    def fail(when):
        if places[-1].startswith(when):
            raise RuntimeError(f"{when} fails")

    for when, expected in (("stream", []), ("capture", [(1, "pool of cuda:1")])):
        with pytest.raises(RuntimeError, match=when):
            capture(lambda when=when: fail(when))
        places[:] = ["cuda:0"]
        assert (released, modes, gc.isenabled()) == (expected, ["error", 0], True)
        modes.clear()


def test_what_cannot_be_captured_runs_without_graphs_and_says_so_once():
    asked = []

    def capture(run):
        asked.append(run)
        if len(asked) == 3:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")
        return capture_on_a_cpu(run)

    graphs = StepGraphs(GraphShapes(8), device=CPU, scratch_blocks=(SCRATCH,), block_size=BLOCK_SIZE, capture=capture)
    with pytest.warns(RuntimeWarning, match=r"without CUDA graphs.*: called a synchronizing CUDA operation$") as told:
        graphs.capture_all(lambda batch: batch.on(CPU).positions.float().unsqueeze(1))
    assert len(told) == 1
    assert len(asked) == 3
    assert graphs.run(batch_of(([1], 0))) is None
    assert graphs.row_counts == ()
    assert not graphs._graphs
    assert graphs._logits is None
