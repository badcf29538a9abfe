"""Steps as CUDA graphs: the forward pass of a padded batch as one launch.

A graph reads one buffer and writes one tensor of logits, at the addresses of its capture. A batch is padded to its
bucket's shape with sequences of one row, which write to a scratch block that no sequence has, and with sequences
without rows. So a padded batch is an ordinary batch, and padding changes no other row.

All graphs are captured before the first request. They share memory, since one is replayed at a time and its only result
is in the buffer of logits.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.input_batch import BatchFields, InputBatch, SequenceRows, build_input_batch
from outrider.engine.transfer import page_locked

MOST_ROWS = 256
"""Of a bucket. In larger steps launches take a small part of the time."""
LEAST_KEYS = 512
"""Of the shortest block tables: shorter ones would be more buckets, and attention would not be faster."""
KEYS_FACTOR = 4
"""Between one length of block tables and the next. Attention programs without keys return at once."""
MOST_DEPTH = 16
"""Of a draft tree's paths, on average over the rows of a step."""
LEAST_TREE_ROWS = 4
"""A tree needs three rows, a known token and two siblings; rounded to a power of two."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a padded batch."""

    num_rows: int  # a power of two; as many sequences, of which some have no rows
    max_blocks: int
    has_trees: bool = False


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """Which steps of a node are captured."""

    max_rows: int = MOST_ROWS
    has_trees: bool = False

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows to which steps are padded, rising."""
        most = min(_power_of_two(self.max_rows), MOST_ROWS)
        return tuple(1 << power for power in range(most.bit_length()))


class Buckets:
    """All buckets of a node."""

    def __init__(self, shapes: GraphShapes, *, max_model_len: int, block_size: int) -> None:
        self._shapes = shapes
        lengths = [LEAST_KEYS]
        while lengths[-1] < max_model_len:
            lengths.append(lengths[-1] * KEYS_FACTOR)
        lengths[-1] = max(min(lengths[-1], max_model_len), LEAST_KEYS)
        self._max_blocks = [-(-length // block_size) for length in lengths]

    def __iter__(self) -> Iterator[Bucket]:
        """The largest first, so that the others find memory that it has left."""
        for has_trees in (True, False) if self._shapes.has_trees else (False,):
            for num_rows in reversed(self._shapes.row_counts):
                if not has_trees or num_rows >= LEAST_TREE_ROWS:
                    yield from (Bucket(num_rows, max_blocks, has_trees) for max_blocks in reversed(self._max_blocks))

    def of(self, batch: InputBatch) -> Bucket | None:
        """The smallest that holds the batch. None: it runs unpadded, as prompt chunks do, with few logits."""
        num_rows = _power_of_two(batch.num_rows)
        if batch.num_logits != batch.num_rows or num_rows > self._shapes.row_counts[-1]:
            return None
        if batch.has_trees:
            num_rows = max(num_rows, LEAST_TREE_ROWS)
            if not self._shapes.has_trees or len(batch.arrays.path_slots) > MOST_DEPTH * num_rows:
                return None
        max_blocks = next((each for each in self._max_blocks if each >= batch.max_blocks), None)
        return None if max_blocks is None else Bucket(num_rows, max_blocks, batch.has_trees)


def pad(batch: InputBatch, bucket: Bucket, scratch_block: int) -> InputBatch:
    """The batch with further sequences: of one row each until the rows are enough, then without rows."""
    arrays, size = batch.arrays, batch.block_size
    num_rows = bucket.num_rows - batch.num_rows
    num_empty = bucket.num_rows - batch.num_seqs - num_rows
    assert min(num_rows, num_empty, bucket.max_blocks - batch.max_blocks) >= 0, "the bucket is one of this batch"
    tables = array("i")
    for seq in range(batch.num_seqs):
        table = arrays.block_tables[seq * batch.max_blocks : (seq + 1) * batch.max_blocks]
        tables.extend(table)
        tables.extend([table[0]] * (bucket.max_blocks - len(table)))
    tables.extend([scratch_block] * (bucket.max_blocks * (num_rows + num_empty)))
    starts, slots = arrays.path_starts, arrays.path_slots
    if bucket.has_trees:
        starts = starts or array("q", [0] * (batch.num_rows + 1))
        starts = starts + array("q", [starts[-1]] * num_rows)
        slots = slots + array("q", [0] * (MOST_DEPTH * bucket.num_rows - len(slots)))
    padded = BatchFields(
        token_ids=arrays.token_ids + array("q", [0] * num_rows),
        positions=arrays.positions + array("q", [0] * num_rows),
        slot_mapping=arrays.slot_mapping + array("q", [scratch_block * size] * num_rows),
        logits_rows=arrays.logits_rows + array("q", range(batch.num_rows, bucket.num_rows)),
        query_start_loc=arrays.query_start_loc
        + array("i", range(batch.num_rows + 1, bucket.num_rows + 1))
        + array("i", [bucket.num_rows] * num_empty),
        seq_lens=arrays.seq_lens + array("i", [1] * num_rows + [0] * num_empty),
        block_tables=tables,
        path_starts=starts,
        path_slots=slots,
    )
    return InputBatch(padded, bucket.max_blocks, size)


class CapturedGraph(Protocol):
    """Work that can be queued again over what lies at the same addresses."""

    def replay(self) -> None:
        """Queues it; nobody waits."""


GraphCapture = Callable[[Callable[[], object]], CapturedGraph]
"""Runs a function, and captures what it queues. What it allocates may be taken by other captured work."""


class StepGraphs:
    """A graph for each bucket. One owner thread."""

    def __init__(
        self,
        forward: Callable[[InputBatch], Tensor],
        buckets: Buckets,
        *,
        device: torch.device,
        scratch_block: int,
        block_size: int,
        capture: GraphCapture,
    ) -> None:
        """`forward`: of a batch whose tensors are on `device`; all that differs within a bucket it reads there."""
        self._forward = forward
        self._buckets = buckets
        self._device = device
        self._scratch_block = scratch_block
        self._block_size = block_size
        self._capture = capture
        self._graphs: dict[Bucket, tuple[Tensor, CapturedGraph]] = {}  # with the buffer of its batch
        self._logits: Tensor | None = None  # [most rows, vocab_size] float32, which every graph writes

    @torch.inference_mode()
    def capture_all(self) -> None:
        """A graph for each bucket, of steps that write to the scratch block only."""
        nothing = build_input_batch([SequenceRows([0], 0, (self._scratch_block,), 1)], self._block_size)
        for bucket in self._buckets:
            padded = pad(nothing, bucket, self._scratch_block)
            buffer = padded.copy_to(self._device)
            if self._logits is None:
                self._logits = torch.empty_like(self._forward(padded))
            logits = self._logits.narrow(0, 0, bucket.num_rows)
            self._graphs[bucket] = buffer, self._capture(partial(self._compute, padded, logits))

    def _compute(self, padded: InputBatch, logits: Tensor) -> None:
        logits.copy_(self._forward(padded))

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor | None:
        """Logits [num_logits, vocab_size] float32, valid until the next run. None: no bucket holds the batch."""
        bucket = self._buckets.of(batch)
        graph = None if bucket is None else self._graphs.get(bucket)
        if bucket is None or graph is None or self._logits is None:
            return None
        buffer, captured = graph
        packed = pad(batch, bucket, self._scratch_block).packed()
        buffer.copy_(page_locked(packed, self._device), non_blocking=True)
        captured.replay()
        return self._logits.narrow(0, 0, batch.num_logits)


def cuda_graphs(device: torch.device) -> GraphCapture:
    """CUDA graphs of `device` that share one pool of memory, and one stream: cuBLAS has a workspace for each."""
    with torch.cuda.device(device):
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()

    def capture(run: Callable[[], object]) -> CapturedGraph:
        """After a first run on the same stream, which compiles kernels and takes workspaces."""
        with torch.cuda.device(device), _no_garbage_collection():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads go on meanwhile: they copy frames and take page-locked memory.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        return _CudaGraph(graph, device)

    return capture


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    device: torch.device

    def replay(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection could destroy other graphs or free device memory, which ends a capture with an error."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _power_of_two(number: int) -> int:
    """From `number` on."""
    return 1 << (number - 1).bit_length()
