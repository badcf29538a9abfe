"""A runner with its KV cache, sized for the memory that steps leave free: on a GPU the largest ones are rehearsed."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from outrider.engine.attention import AttentionBackend, make_attention_backend
from outrider.engine.device import device_type
from outrider.engine.graph_shapes import MOST_ROWS, GraphShapes
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache, free_memory_bytes
from outrider.engine.model_runner import ModelRunner, make_runner, warm_up
from outrider.engine.runnable_model import RunnableModel

if TYPE_CHECKING:
    from outrider.engine.feature_spec import FeatureSpec


def open_runner(
    model: RunnableModel,
    attention: str,
    kv_cache: KVCacheConfig,
    *,
    num_rows: int,
    num_logits: int = MOST_ROWS,
    graphs: GraphShapes | None = None,
    main_memory_bytes: int = 0,
    features: FeatureSpec | None = None,
) -> tuple[PagedKVCache, ModelRunner]:
    """A warmed-up runner, and its cache in the memory that the largest step, of `num_rows`, leaves free.

    `attention`: as in settings, of a model that torch computes. `num_logits`: rows of that step with logits, at most.
    `main_memory_bytes`: of that memory, for other things.
    `features`: of every row; the model's specification has their plane.

    Raises what make_attention_backend and PagedKVCache.sized_for do.
    """
    backend = None
    if model.model is not None:
        heads = {"num_heads": model.spec.num_heads, "num_kv_heads": model.spec.num_kv_heads}
        backend = make_attention_backend(attention, model.device, model.spec.dtype, **heads)
    reserved_bytes = rehearse(
        model,
        backend,
        num_rows=num_rows,
        num_logits=num_logits,
        block_size=kv_cache.block_size,
        graphs=graphs,
        features=features,
    )
    if device_type(model.device) == "cpu":
        reserved_bytes += main_memory_bytes
    cache = PagedKVCache.sized_for(
        model.spec,
        kv_cache,
        device=model.device,
        reserved_bytes=reserved_bytes,
        kernels=model.cpu_kernels,
    )
    runner = make_runner(model, cache, backend, graphs=graphs, features=features)
    warm_up(runner, cache, model.spec.max_model_len)
    return cache, runner


def rehearse(
    model: RunnableModel,
    attention: AttentionBackend | None,
    *,
    num_rows: int,
    block_size: int,
    num_logits: int = MOST_ROWS,
    graphs: GraphShapes | None = None,
    features: FeatureSpec | None = None,
) -> int:
    """Runs the largest step on a GPU and captures all graphs, over a cache of its own; returns the bytes they took.

    Reserve this many bytes outside the KV pool. 0 on a CPU, whose system finds memory elsewhere.
    """
    device, spec = model.device, model.spec
    if device_type(device) == "cpu":
        return 0
    import torch

    window_blocks = -(-min(num_rows, spec.max_model_len) // block_size)
    num_sequences = -(-num_rows // spec.max_model_len)
    cache = PagedKVCache(
        spec.planes,
        num_blocks=num_sequences * window_blocks,
        block_size=block_size,
        device=device,
        num_scratch_blocks=1,
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    rows = []
    for sequence in range(num_sequences):
        size = min(num_rows - sequence * spec.max_model_len, spec.max_model_len)
        blocks = range(sequence * window_blocks, (sequence + 1) * window_blocks)
        rows.append(SequenceRows([0] * size, 0, blocks, num_logits=min(size, max(num_logits, 0))))
        num_logits -= rows[-1].num_logits
    runner = make_runner(model, cache, attention, graphs=graphs, features=features)
    runner.forward(build_input_batch(rows, block_size))
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free = free_memory_bytes(device)  # graphs take memory of the driver too
    warm_up(runner, cache, spec.max_model_len)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    taken += free - free_memory_bytes(device)
    del runner, cache
    gc.collect()  # whatever else has come to hold them
    torch.cuda.empty_cache()
    return taken
