"""Steps as CUDA graphs: the forward pass of a padded batch in one launch.

All graphs read one buffer and write one logits tensor, at the addresses of their capture. A batch is padded to its
bucket's number of rows with a sequence that writes to a scratch block, which no other sequence uses, and with sequences
without rows. So a padded batch is an ordinary batch, and padding changes no other row. Block tables may have any
length: they are stored end to end in the last field of the buffer, and a step uploads only the part in use.

All graphs are captured before the first request. They share memory, because only one is replayed at a time and its
only result is in the logits tensor.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.graph_shapes import MAX_TABLE_BLOCKS, Bucket, GraphShapes, pad
from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch
from outrider.engine.transfer import page_locked
from outrider.heap import collection_paused

Replay = Callable[[], None]
"""Queues captured work again without waiting. The work reads and writes the same addresses as during the capture."""
GraphCapture = Callable[[Callable[[], object]], Replay]
"""Runs a function and captures the work that it queues. Memory that the function allocates may be shared with other
captured work. Raises: RuntimeError if the work cannot be captured; in that case nothing is changed."""


class Capturable(NamedTuple):
    """A forward pass that a graph can capture: it reads everything that differs between batches of one shape from
    device memory.
    """

    forward: Callable[[InputBatch], Tensor]  # a padded and planned batch → its logits, as from ModelRunner.forward
    plan: Callable[[InputBatch], InputBatch]  # AttentionBackend.plan


class StepGraphs:
    """The graphs of a runner's padded steps, one per bucket. Only one thread may use them."""

    def __init__(
        self,
        shapes: GraphShapes,
        *,
        device: torch.device,
        scratch_blocks: Sequence[int],
        block_size: int,
        capture: GraphCapture,
        plan: Callable[[InputBatch], InputBatch] = lambda batch: batch,
    ) -> None:
        """`plan`: AttentionBackend.plan of the forward's backend."""
        self._shapes = shapes
        self._device = device
        self._scratch_blocks = scratch_blocks
        self._block_size = block_size
        self._capture = capture
        self._plan = plan
        self._graphs: dict[Bucket, Replay] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)  # [bytes], every graph's input batch
        self._logits: Tensor | None = None  # [max rows or 0, vocab_size] float32, every graph's output

    @torch.inference_mode()
    def capture_all(self, forward: Callable[[InputBatch], Tensor]) -> None:
        """Captures a graph for each bucket, with steps that write to the scratch block only.

        `forward` returns the logits of a batch's `logits_rows`. It gets a batch whose tensors are on `device`, and must
        read from them everything that differs between batches of a bucket. No reference to `forward` is kept, because
        graphs and their runner would form a reference cycle, whose device memory only a garbage collection would free.

        If a capture fails, for example because the model's control flow depends on values on the device, nothing is
        captured: a warning gives the reason, and `run` finds no graph.
        """
        try:
            self._capture_all(forward)
        except RuntimeError as error:  # raised by torch
            self._graphs.clear()
            self._buffer, self._logits = self._buffer.new_empty(0), None
            reason = str(error).partition("\n")[0]
            warnings.warn(f"steps run without CUDA graphs, which is slower: {reason}", RuntimeWarning, stacklevel=2)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The row counts to which steps are padded, ascending; empty if nothing was captured."""
        return self._shapes.row_counts if self._graphs else ()

    def _capture_all(self, forward: Callable[[InputBatch], Tensor]) -> None:
        first, *windows = self._scratch_blocks
        tables = [array("i", (block,)) for block in windows]
        rows = SequenceRows([0], 0, (first,), int(self._shapes.has_logits), window_tables=tables)
        nothing = build_input_batch([rows], self._block_size)
        for bucket in self._shapes.buckets:
            padded = self._padded(nothing, bucket)
            packed = padded.packed()
            if self._logits is None:  # at the first bucket, which is the largest
                num_bytes = len(packed) + MAX_TABLE_BLOCKS * padded.arrays.block_tables.itemsize
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._upload(packed)
            padded.use_buffer(self._buffer, self._device)
            if self._logits is None:
                self._logits = torch.empty_like(forward(padded))
            logits = self._logits.narrow(0, 0, padded.num_logits)
            self._graphs[bucket] = self._capture(partial(_write_logits, forward, padded, logits))

    def padded(self, batch: InputBatch) -> InputBatch | None:
        """Returns the batch as `run` would upload it, or None if no graph has its shape or its rows have adapters. The
        result's token ids may still be changed.
        """
        bucket = None if batch.adapters else self._shapes.bucket_of(batch)
        return self._padded(batch, bucket) if bucket is not None and bucket in self._graphs else None

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor | None:
        """Replays the batch's graph. Returns logits [num_logits, vocab_size] float32, valid until the next call; None
        if there is no graph for the batch (see `padded`).
        """
        padded = batch if batch.is_padded else self.padded(batch)
        if padded is None or self._logits is None:
            return None
        self._upload(padded.packed())
        self._graphs[Bucket(padded.num_rows, padded.has_trees, self._shapes.has_logits)]()
        return self._logits.narrow(0, 0, batch.num_logits)

    def _padded(self, batch: InputBatch, bucket: Bucket) -> InputBatch:
        return self._plan(pad(batch, bucket, self._scratch_blocks))

    def _upload(self, packed: npt.NDArray[np.uint8]) -> None:
        """Uploads the fields of a batch to the start of the buffer, in one copy."""
        self._buffer.narrow(0, 0, len(packed)).copy_(page_locked(packed, self._device), non_blocking=True)


def _write_logits(forward: Callable[[InputBatch], Tensor], padded: InputBatch, logits: Tensor) -> None:
    logits.copy_(forward(padded))


def cuda_graphs(device: torch.device) -> GraphCapture:
    """Returns a capture function for `device`. Its graphs share a memory pool. They also share a stream, because cuBLAS
    has a workspace per stream.
    """
    with torch.cuda.device(device):
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
    failed: list[torch.cuda.CUDAGraph] = []  # kept: to identify streams, torch's allocators still use them

    def capture(run: Callable[[], object]) -> Replay:
        """Runs the function once on the capture's stream, to compile kernels and allocate workspaces, then captures it.

        Operations that wait for the device already fail in that first run.
        """
        # A collection could make the capture fail by freeing device memory or destroying graphs.
        with torch.cuda.device(device), collection_paused():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), _waits_are_errors():
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # torch's own context does not leave the stream if the capture fails; the outer one does. Other threads
                # keep working during the capture: they copy frames and allocate page-locked memory.
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                ):
                    run()
            except RuntimeError:
                failed.append(graph)
                with suppress(RuntimeError):  # the allocation has ended already if the capture itself did not fail
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # noqa: SLF001 there is no other way
                raise

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay

    return capture


@contextmanager
def _waits_are_errors() -> Iterator[None]:
    """Makes torch operations that wait for the device raise an error, in all threads."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
