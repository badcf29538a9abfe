"""The discipline of captured steps, which a CPU can check: what they read, where, and that padding changes nothing."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.attention import make_attention_backend
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_graphs import MOST_ROWS, Bucket, StepGraphs, pad
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
SCRATCH = range(40, 56)


def batch_of(*sequences):
    """Of (tokens, start) of each sequence, which has four blocks."""
    return build_input_batch(
        [
            SequenceRows(tokens, start, range(4 * index, 4 * index + 4), len(tokens))
            for index, (tokens, start) in enumerate(sequences)
        ],
        BLOCK_SIZE,
    )


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [
        ([1], (1, 1)),
        ([1] * 3, (4, 4)),
        ([1] * 8, (8, 8)),
        ([5], (2, 8)),
        ([5, 5, 1], (4, 16)),
        ([8, 8], (2, 16)),
        ([3, 2, 3, 1], (8, 16)),
        ([1] * MOST_ROWS, (MOST_ROWS, MOST_ROWS)),
        ([200, 57], None),
    ],
)
def test_buckets_hold_their_batches(rows, bucket):
    sequences = [SequenceRows([1] * count, 0, range(16), count) for count in rows]
    found = Bucket.of(build_input_batch(sequences, BLOCK_SIZE))
    assert (found and (found.num_seqs, found.num_rows)) == bucket
    assert found is None or found.max_blocks == 32


def test_prompt_chunks_and_trees_run_as_they_are():
    assert Bucket.of(build_input_batch([SequenceRows([1, 2, 3], 0, (1,), 1)], BLOCK_SIZE)) is None
    assert Bucket.of(build_input_batch([SequenceRows([1, 2, 3], 0, (1,), 3, (-1, -1))], BLOCK_SIZE)) is None


def test_padding_is_sequences_that_write_to_scratch_blocks_only():
    batch = batch_of(([1, 2, 3], 30), ([4], 5), ([4], 5), ([4], 5), ([4], 5))
    padded = pad(batch, Bucket.of(batch), SCRATCH)
    assert (padded.num_seqs, padded.num_rows, padded.max_blocks) == (8, 16, 32)
    assert padded.slot_mapping[:7].tolist() == batch.slot_mapping.tolist()
    assert set((padded.slot_mapping[7:] // BLOCK_SIZE).tolist()) <= set(SCRATCH)
    assert padded.query_start_loc.tolist() == [0, 3, 4, 5, 6, 7, 8, 9, 16]
    assert padded.positions[7:].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert padded.block_tables[0, :3].tolist() == [0, 1, 2]
    assert padded.block_tables[:5, 3:].eq(padded.block_tables[:5, :1]).all()
    assert padded.logits_rows.tolist() == list(range(16))


def test_every_padding_fits_the_scratch_blocks():
    batch = build_input_batch([SequenceRows([1] * 129, 0, range(9), 129)], BLOCK_SIZE)
    padded = pad(batch, Bucket.of(batch), SCRATCH)
    assert padded.num_rows == MOST_ROWS
    assert len(set(padded.slot_mapping[129:].tolist())) == MOST_ROWS - 129


@pytest.fixture(scope="module")
def model(tiny_model):
    torch.set_num_threads(1)
    return load_model(ModelConfig(id=str(tiny_model)))


def test_padding_changes_no_other_row(model):
    """With kernels whose rows have the same bits in any batch, or torch's."""
    cache = PagedKVCache(model.spec.planes, num_blocks=40, block_size=BLOCK_SIZE, num_scratch_blocks=16)
    assert cache.scratch_blocks == SCRATCH
    runner = ModelRunner(model, cache, make_attention_backend())
    batch = batch_of(([5, 6, 7], 0), ([9], 0), ([2], 0))
    plain = runner.forward(batch).clone()
    before = [layer[: SCRATCH.start].clone() for layer in (*cache.keys, *cache.values)]
    padded = runner.forward(pad(batch, Bucket.of(batch), SCRATCH))[:5]
    if model.native is None:
        torch.testing.assert_close(padded, plain)
    else:
        assert torch.equal(padded, plain)
    after = [layer[: SCRATCH.start] for layer in (*cache.keys, *cache.values)]
    assert model.native is None or all(map(torch.equal, before, after))


class Replay:
    """A graph as far as a CPU has one: the same call again, with its result where the first one was."""

    def __init__(self, run):
        self._run = run
        self.logits = run()

    def replay(self):
        self.logits.copy_(self._run())


def capture(run):
    replay = Replay(run)
    return replay, replay.logits


def test_a_captured_step_reads_and_writes_the_same_addresses():
    seen = []

    def forward(batch):
        tensors = batch.on(CPU)
        names = ("token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_tables", "logits_rows")
        seen.append([getattr(tensors, name).data_ptr() for name in names])
        assert len({address % 16 for address in seen[-1]}) == 1  # or kernels would be compiled for each alignment
        return (tensors.token_ids * 1000 + tensors.positions).float().unsqueeze(1)

    graphs = StepGraphs(forward, device=CPU, scratch_blocks=SCRATCH, capture=capture)
    addresses = set()
    for tokens, start in (([1, 2, 3], 30), ([7, 8, 9], 2), ([4, 5], 11)):
        logits = graphs.run(batch_of((tokens, start), ([6], 3)))
        addresses.add(logits.data_ptr())
        expected = [1000 * token + start + index for index, token in enumerate(tokens)] + [6003]
        assert logits.squeeze(1).tolist() == expected
    assert len(addresses) == 2  # three rows and one are in a bucket of eight, two and one in one of four
    assert len({tuple(each) for each in seen}) == 2
    assert graphs.run(build_input_batch([SequenceRows([1, 2], 0, (1,), 0)], BLOCK_SIZE)) is None


def test_a_model_with_our_attention_can_be_captured(model, monkeypatch):
    """Whatever a forward takes from the host is the same for a whole bucket: the interpreter's kernels show it."""
    pytest.importorskip("triton")
    from tests.interpreted_triton import interpreted_attention

    loaded = load_model(ModelConfig(id=str(model.directory), kernels="torch"))
    runners = []
    for _ in range(2):
        cache = PagedKVCache(loaded.spec.planes, num_blocks=40, block_size=BLOCK_SIZE, num_scratch_blocks=16)
        runners.append(ModelRunner(loaded, cache, interpreted_attention()))
    captured = runners[1]
    captured._graphs = StepGraphs(
        lambda batch: captured._forward_of_modules(batch, None), device=CPU, scratch_blocks=SCRATCH, capture=capture
    )
    for tokens, start in (([1, 2, 3], 0), ([7], 3), ([8, 9, 4], 4), ([5], 7)):
        batch = [batch_of((tokens, start), ([6], 3 * (start > 0))) for _ in runners]
        logits = [runner.forward(each).clone() for runner, each in zip(runners, batch, strict=True)]
        torch.testing.assert_close(*logits)
