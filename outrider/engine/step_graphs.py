"""Steps as CUDA graphs: one launch for a forward pass whose shape is a bucket's.

A graph reads one buffer and writes one tensor of logits, both at the addresses that they had when it was captured.
A batch is padded to its bucket with sequences of their own, which write to scratch blocks that no sequence has. So a
padded batch is a batch like others, and its padding changes no other row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.device_batch import DeviceBatch
from outrider.engine.input_batch import BatchArrays, InputBatch
from outrider.engine.kv_cache.paged_cache import SCRATCH_TOKENS

MOST_ROWS = SCRATCH_TOKENS
"""Of a bucket. Steps with more rows compute long enough for their launches not to matter."""
LEAST_KEYS = 512
"""That a bucket's block tables have room for: fewer buckets, and no more splits."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a padded batch; powers of two."""

    num_seqs: int
    num_rows: int
    max_blocks: int

    @classmethod
    def of(cls, batch: InputBatch) -> Bucket | None:
        """The smallest that holds the batch; None if it is to run as it is.

        Prompt chunks do, of which few rows need logits, and batches with trees.
        """
        if batch.has_trees or batch.num_logits != batch.num_rows:
            return None
        num_seqs = _power_of_two(batch.num_seqs)
        if num_seqs == batch.num_seqs and _power_of_two(batch.num_rows) != batch.num_rows:
            num_seqs *= 2  # padding has rows, so it needs a sequence
        num_rows = _power_of_two(batch.num_rows + num_seqs - batch.num_seqs)
        if num_rows > MOST_ROWS:
            return None
        return cls(num_seqs, num_rows, _power_of_two(max(batch.max_blocks, LEAST_KEYS // batch.block_size)))


def pad(batch: InputBatch, bucket: Bucket, scratch_blocks: Sequence[int]) -> InputBatch:
    """The batch with more sequences: one row each, but the last, which has the rows that are left."""
    arrays, size = batch.arrays, batch.block_size
    num_seqs = bucket.num_seqs - batch.num_seqs
    num_rows = bucket.num_rows - batch.num_rows
    assert 0 <= num_seqs <= num_rows, "the bucket is one of this batch"
    assert num_seqs or not num_rows, "padding has rows, so it needs a sequence"
    rows = [1] * (num_seqs - 1) + [num_rows - num_seqs + 1] * bool(num_seqs)  # of each sequence
    positions = [position for count in rows for position in range(count)]
    starts, tables = array("i", arrays.query_start_loc), array("i")
    for seq in range(batch.num_seqs):
        table = arrays.block_tables[seq * batch.max_blocks : (seq + 1) * batch.max_blocks]
        tables.extend(table)
        tables.extend([table[0]] * (bucket.max_blocks - len(table)))
    for count in rows:
        starts.append(starts[-1] + count)
        used = scratch_blocks[: -(-count // size)]
        tables.extend([*used, *[used[0]] * (bucket.max_blocks - len(used))])
    padded = BatchArrays(
        token_ids=arrays.token_ids + array("q", [0] * num_rows),
        positions=arrays.positions + array("q", positions),
        slot_mapping=arrays.slot_mapping
        + array("q", [scratch_blocks[position // size] * size + position % size for position in positions]),
        logits_rows=arrays.logits_rows + array("q", range(batch.num_rows, bucket.num_rows)),
        query_start_loc=starts,
        seq_lens=arrays.seq_lens + array("i", rows),
        block_tables=tables,
    )
    return InputBatch(padded, bucket.max_blocks, size)


class Captured(Protocol):
    """A forward pass that can be run again over what lies at the same addresses."""

    def replay(self) -> None:
        """Queues it; nobody waits."""


Capture = Callable[[Callable[[], Tensor]], tuple[Captured, Tensor]]
"""Runs a function, and captures what it does; gives its result, whose memory a replay writes again."""


@dataclass(frozen=True, slots=True)
class _StepGraph:
    batch: DeviceBatch
    captured: Captured
    logits: Tensor  # [num_rows, vocab_size] float32


class StepGraphs:
    """A graph for each bucket, captured when it is first met. One owner thread."""

    def __init__(
        self,
        forward: Callable[[InputBatch], Tensor],
        *,
        device: torch.device,
        scratch_blocks: Sequence[int],
        capture: Capture,
    ) -> None:
        """`forward`: of a batch whose tensors are on `device` already, from which alone it takes what differs."""
        self._forward = forward
        self._device = device
        self._scratch_blocks = scratch_blocks
        self._capture = capture
        self._graphs: dict[Bucket, _StepGraph] = {}

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor | None:
        """Logits [num_logits, vocab_size] float32, until the next run; None if the batch is to run as it is."""
        bucket = Bucket.of(batch)
        if bucket is None:
            return None
        padded = pad(batch, bucket, self._scratch_blocks)
        graph = self._graphs.get(bucket)
        if graph is None:
            on_device = padded.copy_to(self._device)
            captured, logits = self._capture(lambda: self._forward(padded))
            graph = self._graphs[bucket] = _StepGraph(on_device, captured, logits)
        else:
            graph.batch.load(padded.packed())
        graph.captured.replay()
        return graph.logits.narrow(0, 0, batch.num_logits)


def capture_cuda_graph(run: Callable[[], Tensor]) -> tuple[Captured, Tensor]:
    """As CUDA graphs are captured: after a run on another stream, which compiles kernels and takes workspaces."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads go on meanwhile: they copy frames and take page-locked memory.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = run()
    return graph, logits


def _power_of_two(number: int) -> int:
    """From `number` on."""
    return 1 << (number - 1).bit_length()
