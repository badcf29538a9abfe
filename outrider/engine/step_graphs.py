"""Steps as CUDA graphs: the forward pass of a padded batch as one launch.

All graphs read one buffer and write one tensor of logits, at the addresses of their capture. A batch is padded to its
bucket's number of rows with a sequence that writes to a scratch block, which no other sequence has, and with sequences
without rows. So a padded batch is an ordinary batch, and padding changes no other row. The lengths of block tables do
not matter: they lie end to end at the end of the buffer, and a step uploads as much of it as it has.

All graphs are captured before the first request. They share memory, since one is replayed at a time and its only result
is in the buffer of logits.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
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

Replay = Callable[[], None]
"""Queues captured work again, over what lies at the same addresses; nobody waits."""
GraphCapture = Callable[[Callable[[], object]], Replay]
"""Runs a function, and captures what it queues. What it allocates may be taken by other captured work. Raises a
RuntimeError if that cannot be captured; then everything is as before."""


class Capturable(NamedTuple):
    """A forward as `StepGraphs` captures it: what differs between batches of one shape, it reads on the device."""

    forward: Callable[[InputBatch], Tensor]  # of a padded and planned batch → its logits, as of ModelRunner.forward
    plan: Callable[[InputBatch], InputBatch]  # as of AttentionBackend


class StepGraphs:
    """A graph for each bucket. One owner thread."""

    def __init__(
        self,
        shapes: GraphShapes,
        *,
        device: torch.device,
        scratch_block: int,
        block_size: int,
        capture: GraphCapture,
        plan: Callable[[InputBatch], InputBatch] = lambda batch: batch,
    ) -> None:
        """`plan`: AttentionBackend.plan, of the backend that the forward uses."""
        self._shapes = shapes
        self._device = device
        self._scratch_block = scratch_block
        self._block_size = block_size
        self._capture = capture
        self._plan = plan
        self._graphs: dict[Bucket, Replay] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)  # [bytes], from which every graph reads its batch
        self._logits: Tensor | None = None  # [most rows, vocab_size] float32, which every graph writes

    @torch.inference_mode()
    def capture_all(self, forward: Callable[[InputBatch], Tensor]) -> None:
        """A graph for each bucket, of steps that write to the scratch block only.

        `forward`: logits of the `logits_rows` of a batch whose tensors are on `device`; all that differs within a
        bucket it reads there. It is not kept: graphs that held their runner would be a reference cycle, and device
        memory would wait for a collection.

        If a capture fails, as of a model that reads from the device what to do next, nothing is captured: a warning
        says why, and `run` finds no graph.
        """
        try:
            self._capture_all(forward)
        except RuntimeError as error:  # torch's
            self._graphs.clear()
            self._buffer, self._logits = self._buffer.new_empty(0), None
            reason = str(error).partition("\n")[0]
            warnings.warn(f"steps run without CUDA graphs, which is slower: {reason}", RuntimeWarning, stacklevel=2)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows to which steps are padded, rising: of what has been captured."""
        return self._shapes.row_counts if self._graphs else ()

    def _capture_all(self, forward: Callable[[InputBatch], Tensor]) -> None:
        nothing = build_input_batch([SequenceRows([0], 0, (self._scratch_block,), 1)], self._block_size)
        for bucket in self._shapes.buckets:
            padded = self._padded(nothing, bucket)
            packed = padded.packed()
            if self._logits is None:  # the first is the largest
                num_bytes = len(packed) + MAX_TABLE_BLOCKS * padded.arrays.block_tables.itemsize
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._upload(packed)
            padded.place_in(self._buffer, self._device)
            if self._logits is None:
                self._logits = torch.empty_like(forward(padded))
            logits = self._logits.narrow(0, 0, bucket.num_rows)
            self._graphs[bucket] = self._capture(partial(_write_logits, forward, padded, logits))

    def padded(self, batch: InputBatch) -> InputBatch | None:
        """The batch as `run` uploads it. Its token ids may still be set. None: no graph is of its shape."""
        bucket = self._shapes.bucket_of(batch)
        return self._padded(batch, bucket) if bucket is not None and bucket in self._graphs else None

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor | None:
        """Logits [num_logits, vocab_size] float32, valid until the next run. None: no graph is of its shape."""
        padded = batch if batch.is_padded else self.padded(batch)
        if padded is None or self._logits is None:
            return None
        self._upload(padded.packed())
        self._graphs[Bucket(padded.num_rows, padded.has_trees)]()
        return self._logits.narrow(0, 0, batch.num_logits)

    def _padded(self, batch: InputBatch, bucket: Bucket) -> InputBatch:
        return self._plan(pad(batch, bucket, self._scratch_block))

    def _upload(self, packed: npt.NDArray[np.uint8]) -> None:
        """To the front of the buffer, in one copy."""
        self._buffer.narrow(0, 0, len(packed)).copy_(page_locked(packed, self._device), non_blocking=True)


def _write_logits(forward: Callable[[InputBatch], Tensor], padded: InputBatch, logits: Tensor) -> None:
    logits.copy_(forward(padded))


def cuda_graphs(device: torch.device) -> GraphCapture:
    """CUDA graphs of `device` that share one pool of memory, and one stream: cuBLAS has a workspace for each."""
    with torch.cuda.device(device):
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
    failed: list[torch.cuda.CUDAGraph] = []  # kept, since torch's allocators go on asking them which stream is theirs

    def capture(run: Callable[[], object]) -> Replay:
        """After a first run on the same stream, which compiles kernels and takes workspaces.

        What waits for the device fails in that run, before a capture has begun.
        """
        with torch.cuda.device(device), _no_garbage_collection():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), _waits_are_errors():
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # The outer context leaves the stream also where torch's own does not, because the capture has failed.
                # Other threads go on meanwhile: they copy frames and take page-locked memory.
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                ):
                    run()
            except RuntimeError:
                failed.append(graph)
                with suppress(RuntimeError):  # it has ended if the capture itself did not fail
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)  # noqa: SLF001 there is no other way
                raise

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay

    return capture


@contextmanager
def _waits_are_errors() -> Iterator[None]:
    """Of torch's operations, in all threads."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


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
