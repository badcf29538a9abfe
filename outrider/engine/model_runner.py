"""Runs a decoder over ragged batches of rows and our paged KV cache. Torch-free where native kernels compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from outrider.engine.attention.base import AttentionBackend
from outrider.engine.cpu_kernels.decoder import NativeDecoder, NativeStep
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.step_clock import ForwardPhases

if TYPE_CHECKING:
    from outrider.engine.arrays import Array
    from outrider.engine.feature_spec import FeatureSpec
    from outrider.engine.step_graphs import Capturable


_LONG_CHUNK = 256
"""Rows from which on attention may gather the keys of a prompt."""


class ModelRunner(Protocol):
    """The forward pass of one node. Not thread-safe: the engine thread owns it."""

    attention_name: str  # the backend's name, or "native"
    padded_rows: tuple[int, ...]  # row counts to which steps are padded, rising; larger steps are not padded
    phases: ForwardPhases
    can_be_traced: bool  # whether torch computes forwards: its profiler knows nothing of a native decoder
    is_asynchronous: bool  # whether `forward` only queues work on a device; reading its results waits for it

    def forward(self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None) -> Array:
        """Writes the rows' KV into the cache and returns the logits of `batch.logits_rows`.

        Features are in the cache when it returns, and not before the last layer has been reported.

        `on_layer_done(layer)` is called once the rows' keys and values of that layer are
        in the cache, layers rising, from this thread, so that KV is pushed while later layers
        compute.

        Returns [num_logits, vocab_size] float32, with no rows when none need logits: an array of numpy where native
        kernels compute the model or its layers, else a tensor on its device, which nobody may change.
        """

    def lay_out(self, batch: InputBatch) -> InputBatch:
        """The batch as far as the host can prepare it for `forward`: padded and planned, but not uploaded.

        Token ids may still be set. Its logits may have more rows, after those of the batch.
        """

    @property
    def capturable(self) -> Capturable | None:
        """What else CUDA graphs may capture; None where they may capture nothing."""

    def capture_graphs(self) -> None:
        """Captures the steps that are padded, after the first forwards and before any block is handed out."""


def make_runner(
    model: RunnableModel,
    kv_cache: PagedKVCache,
    attention: AttentionBackend | None = None,
    *,
    graphs: GraphShapes | None = None,
    features: FeatureSpec | None = None,
) -> ModelRunner:
    """A runner over this cache. Several may share one model, each with its own cache and backend.

    `attention`: of a model that torch computes; native kernels bring their own.

    `graphs`: steps that `capture_graphs` captures, on a GPU with our own attention. None: none.

    `features`: made of every row for a drafter head. The cache has their plane.
    """
    if isinstance(model.native, NativeDecoder):
        return NativeStep(model.native, kv_cache, features)
    from outrider.engine.module_steps import ModuleSteps  # imports torch

    return ModuleSteps(model, kv_cache, attention, graphs=graphs, features=features)


def warm_up(runner: ModelRunner, kv_cache: PagedKVCache, max_model_len: int) -> None:
    """Runs the shapes of prefill, verification and decoding once, so that no request pays for thread pools, memory
    and compilation. On a GPU also at the end of the window, where attention takes most memory and splits its keys.

    Call it before any block is handed out: it writes to the first ones.
    """
    block_size = kv_cache.block_size

    def run(num_rows: int, end: int, blocks: Sequence[int]) -> None:
        rows = SequenceRows([0] * num_rows, end - num_rows, blocks, num_logits=1)
        runner.forward(build_input_batch([rows], block_size))

    most = min(64, kv_cache.num_blocks * block_size, max_model_len)
    blocks = range(-(-most // block_size))
    for num_rows in (most, min(5, most), 1):
        run(num_rows, most, blocks)
    if runner.is_asynchronous:
        window_blocks = [0] * -(-max_model_len // block_size)
        for num_rows in (min(_LONG_CHUNK, max_model_len), 1):
            run(num_rows, max_model_len, window_blocks)
    runner.capture_graphs()
