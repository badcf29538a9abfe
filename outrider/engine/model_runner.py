"""Creates and warms up a model's runner. Torch-free if native kernels compute the model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.engine.attention.base import AttentionBackend
from outrider.engine.cpu_kernels.decoder import NativeDecoder, NativeStep
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.runner_base import ModelRunner

if TYPE_CHECKING:
    from outrider.engine.feature_spec import FeatureSpec


_LONG_CHUNK = 256
"""Number of rows in a chunk that is long enough for attention to gather a prompt's keys."""


def make_runner(
    model: RunnableModel,
    kv_cache: PagedKVCache,
    attention: AttentionBackend | None = None,
    *,
    graphs: GraphShapes | None = None,
    features: FeatureSpec | None = None,
) -> ModelRunner:
    """Makes a runner over this cache. Several runners may share one model, each with its own cache and
    backend.

    `attention`: the backend of a model that torch computes. Native kernels have their own.

    `graphs`: steps that `capture_graphs` captures as CUDA graphs, if our own attention runs on a GPU; None: no steps.

    `features`: the features to write for every row, for a drafter head. The cache must have a plane for them.
    """
    if isinstance(model.native, NativeDecoder):
        return NativeStep(model.native, kv_cache, features, stage=model.stage)
    from outrider.engine.module_steps import ModuleSteps  # imports torch

    return ModuleSteps(model, kv_cache, attention, graphs=graphs, features=features)


def warm_up(runner: ModelRunner, kv_cache: PagedKVCache, max_model_len: int) -> None:
    """Runs steps in the shapes of prefill, verification and decoding once, so that no request waits for thread pools,
    memory or compilation. On a GPU it also runs steps at the end of the window, where attention needs the most memory
    and splits keys. Then it captures the runner's graphs.

    Call it before any block is allocated, because it writes to the first blocks.
    """
    block_size = kv_cache.block_size

    def run(num_rows: int, end: int, blocks: Sequence[int]) -> None:
        windows = [array("i", blocks)] * (kv_cache.num_tables - 1)
        rows = SequenceRows([0] * num_rows, end - num_rows, blocks, num_logits=1, window_tables=windows)
        runner.forward(build_input_batch([rows], block_size))

    length = min(64, kv_cache.num_blocks * block_size, max_model_len)
    blocks = range(-(-length // block_size))
    for num_rows in (length, min(5, length), 1):
        run(num_rows, length, blocks)
    if runner.is_asynchronous:
        window_blocks = [0] * -(-max_model_len // block_size)
        for num_rows in (min(_LONG_CHUNK, max_model_len), 1):
            run(num_rows, max_model_len, window_blocks)
    runner.capture_graphs()
