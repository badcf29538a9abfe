"""Steps as CUDA graphs: the forward pass of a padded batch as one launch.

A graph reads one buffer and writes one tensor of logits, at the addresses of its capture. A batch is padded to its
bucket's shape with sequences of one row, which write to a scratch block that no sequence has, and with sequences
without rows. So a padded batch is an ordinary batch, and padding changes no other row.

All graphs are captured before the first request. They share memory, since one is replayed at a time and its only result
is in the buffer of logits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from outrider.engine.graph_shapes import Bucket, Buckets, pad
from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch
from outrider.engine.transfer import page_locked

Replay = Callable[[], None]
"""Queues captured work again, over what lies at the same addresses; nobody waits."""
GraphCapture = Callable[[Callable[[], object]], Replay]
"""Runs a function, and captures what it queues. What it allocates may be taken by other captured work."""


class StepGraphs:
    """A graph for each bucket. One owner thread."""

    def __init__(
        self,
        buckets: Buckets,
        *,
        device: torch.device,
        scratch_block: int,
        block_size: int,
        capture: GraphCapture,
    ) -> None:
        self._buckets = buckets
        self._device = device
        self._scratch_block = scratch_block
        self._block_size = block_size
        self._capture = capture
        self._graphs: dict[Bucket, tuple[Tensor, Replay]] = {}  # with the buffer of its batch
        self._logits: Tensor | None = None  # [most rows, vocab_size] float32, which every graph writes

    @torch.inference_mode()
    def capture_all(self, forward: Callable[[InputBatch], Tensor]) -> None:
        """A graph for each bucket, of steps that write to the scratch block only.

        `forward`: of a batch whose tensors are on `device`; all that differs within a bucket it reads there. It is not
        kept: graphs that held their runner would be a reference cycle, and device memory would wait for a collection.
        """
        nothing = build_input_batch([SequenceRows([0], 0, (self._scratch_block,), 1)], self._block_size)
        for bucket in self._buckets.to_capture():
            padded = pad(nothing, bucket, self._scratch_block)
            buffer = padded.copy_to(self._device)
            if self._logits is None:
                self._logits = torch.empty_like(forward(padded))
            logits = self._logits.narrow(0, 0, bucket.num_rows)
            self._graphs[bucket] = buffer, self._capture(partial(_write_logits, forward, padded, logits))

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> Tensor | None:
        """Logits [num_logits, vocab_size] float32, valid until the next run. None: no bucket holds the batch."""
        bucket = self._buckets.of(batch)
        graph = None if bucket is None else self._graphs.get(bucket)
        if bucket is None or graph is None or self._logits is None:
            return None
        buffer, replay = graph
        packed = pad(batch, bucket, self._scratch_block).packed()
        buffer.copy_(page_locked(packed, self._device), non_blocking=True)
        replay()
        return self._logits.narrow(0, 0, batch.num_logits)


def _write_logits(forward: Callable[[InputBatch], Tensor], padded: InputBatch, logits: Tensor) -> None:
    logits.copy_(forward(padded))


def cuda_graphs(device: torch.device) -> GraphCapture:
    """CUDA graphs of `device` that share one pool of memory, and one stream: cuBLAS has a workspace for each."""
    with torch.cuda.device(device):
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()

    def capture(run: Callable[[], object]) -> Replay:
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

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay

    return capture


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
