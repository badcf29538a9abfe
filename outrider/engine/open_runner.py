"""Opens a runner and a KV cache in the memory that steps leave free. On a GPU, that memory is measured first."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.engine.attention import AttentionBackend, make_attention_backend
from outrider.engine.device import device_type
from outrider.engine.graph_shapes import MAX_BUCKET_ROWS, GraphShapes
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.memory import KVMemory, pool_size
from outrider.engine.model_runner import make_runner, warm_up
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.runner_base import ModelRunner

if TYPE_CHECKING:
    from outrider.engine.feature_spec import FeatureSpec

GRAPH_LAYER_BYTES = 1 << 18
"""Estimated bytes that the driver takes for a layer of about 40 kernels in a CUDA graph: 128 MiB for 16 graphs of 32
layers."""
FUSED_LAYER_BYTES = GRAPH_LAYER_BYTES // 4
"""Estimated bytes that the driver takes for a fused layer of about 10 kernels in a CUDA graph."""


def open_runner(
    model: RunnableModel,
    attention: str,
    kv_cache: KVCacheConfig,
    *,
    num_rows: int,
    num_logits: int = MAX_BUCKET_ROWS,
    graphs: GraphShapes | None = None,
    main_memory_bytes: int = 0,
    adapter_bytes: int = 0,
    features: FeatureSpec | None = None,
    may_shorten: bool = False,
    has_window_tables: bool = False,
) -> tuple[PagedKVCache, ModelRunner, int]:
    """Returns a cache in the memory that the largest step (`num_rows` rows) leaves free, a warmed-up runner over it,
    and the window, which is the number of tokens of the longest sequence.

    `attention`: the name of an attention backend, as in settings, for a model that torch computes.

    `num_logits`: the maximum number of rows with logits in a step.

    `main_memory_bytes`: main memory that the cache leaves for other uses; `adapter_bytes`: memory of the model's device
    that it leaves for adapters.

    `features`: the features to write for every row; the model's specification must have their plane.

    `may_shorten`: whether the window may be shorter than the model's if memory is short.

    `has_window_tables`: whether sequences have a block table for each sliding window of the model's layers.

    Raises: the errors of make_attention_backend and pool_size.
    """
    backend = None
    if model.model is not None:
        shape = model.spec.attention_shape
        backend = make_attention_backend(attention, model.device, model.spec.dtype, **shape)
    reserved_bytes = profile_run(
        model,
        backend,
        num_rows=num_rows,
        num_logits=num_logits,
        block_size=kv_cache.block_size,
        graphs=graphs,
        features=features,
    )
    reserved_bytes += adapter_bytes
    if device_type(model.device) == "cpu":
        reserved_bytes += main_memory_bytes
    room = KVMemory.of(model.device, reserved_bytes)
    max_step_tokens = num_rows if has_window_tables else None
    size = pool_size(model.spec, kv_cache, room, may_shorten=may_shorten, max_step_tokens=max_step_tokens)
    cache = model.make_cache(size.num_blocks, kv_cache.block_size, size.window_blocks, size.state_slots)
    runner = make_runner(model, cache, backend, graphs=graphs, features=features)
    warm_up(runner, cache, size.max_model_len)
    return cache, runner, size.max_model_len


def profile_run(
    model: RunnableModel,
    attention: AttentionBackend | None,
    *,
    num_rows: int,
    block_size: int,
    num_logits: int = MAX_BUCKET_ROWS,
    graphs: GraphShapes | None = None,
    features: FeatureSpec | None = None,
) -> int:
    """Returns the bytes to reserve for steps and CUDA graphs outside the KV pool; 0 on a CPU, which needs no reserve.

    On a GPU it runs the largest step and captures the largest graphs over a temporary cache, and measures the memory
    that this process then takes.
    """
    device, max_model_len = model.device, model.spec.max_model_len
    if device_type(device) == "cpu":
        return 0
    import torch

    num_sequences = -(-num_rows // max_model_len)
    size, num_logits = -(-num_rows // num_sequences), -(-num_logits // num_sequences)
    num_blocks = -(-size // block_size)
    tables = [range(seq * num_blocks, (seq + 1) * num_blocks) for seq in range(num_sequences)]
    cache = model.make_cache(num_sequences * num_blocks, block_size)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    largest = None if graphs is None else replace(graphs, is_profile_run=True)
    runner = make_runner(model, cache, attention, graphs=largest, features=features)
    rows = [SequenceRows([0] * size, 0, table, num_logits=min(num_logits, size)) for table in tables]
    runner.forward(build_input_batch(rows, block_size))
    warm_up(runner, cache, max_model_len)
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_reserved(device) - before  # graphs have a pool separate from memory that steps reuse
    if graphs is not None and runner.padded_rows:
        layer_bytes = GRAPH_LAYER_BYTES if model.fused is None else FUSED_LAYER_BYTES
        taken += graphs.num_forwards * model.spec.num_layers * layer_bytes
    del runner, cache
    gc.collect()  # releases anything else that refers to them
    torch.cuda.empty_cache()
    return taken
