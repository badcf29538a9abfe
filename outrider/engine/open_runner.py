"""A runner with its KV cache, sized for the memory that steps leave: on a GPU the largest ones are rehearsed."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from outrider.engine.attention import AttentionBackend, make_attention_backend
from outrider.engine.device import device_type
from outrider.engine.graph_shapes import MOST_ROWS, GraphShapes
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.memory import KVRoom
from outrider.engine.model_runner import ModelRunner, make_runner, warm_up
from outrider.engine.runnable_model import RunnableModel

if TYPE_CHECKING:
    from outrider.engine.feature_spec import FeatureSpec
    from outrider.engine.model_spec import ModelSpec

GRAPH_LAYER_BYTES = 1 << 18
"""What the driver takes for a graph, by layer. Estimated, where NVML does not tell: 128 MiB for 16 graphs of 32."""

Model = TypeVar("Model", bound=RunnableModel)


def open_runner(
    model: Model,
    attention: str,
    kv_cache: KVCacheConfig,
    *,
    num_rows: int,
    num_logits: int = MOST_ROWS,
    graphs: GraphShapes | None = None,
    main_memory_bytes: int = 0,
    features: FeatureSpec | None = None,
    may_shorten: bool = False,
) -> tuple[Model, PagedKVCache, ModelRunner]:
    """A warmed-up runner, and its cache in the memory that the largest step, of `num_rows`, leaves free.

    `attention`: as in settings, of a model that torch computes. `num_logits`: rows of that step with logits, at most.
    `main_memory_bytes`: of that memory, for other things.
    `features`: of every row; the model's specification has their plane.
    `may_shorten`: serve a shorter window than the model's where memory holds no more; the model is returned with it.

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
    room = KVRoom.of(model.device, reserved_bytes)
    if may_shorten:
        model = model.with_window(served_window(model.spec, kv_cache, room))
    cache = PagedKVCache.sized_for(model.spec, kv_cache, room, device=model.device, kernels=model.cpu_kernels)
    runner = make_runner(model, cache, backend, graphs=graphs, features=features)
    warm_up(runner, cache, model.spec.max_model_len)
    return model, cache, runner


def served_window(spec: ModelSpec, kv_cache: KVCacheConfig, room: KVRoom) -> int:
    """Tokens of the model's window, or of as much of it as the cache will hold, which standard error then says."""
    window = PagedKVCache.window_for(spec, kv_cache, room)
    if window < spec.max_model_len:
        sys.stderr.write(
            f"no memory for the model's window of {spec.max_model_len} tokens: sequences have at most {window}. "
            "Set model.max_model_len, or give more memory (kv_cache.memory)\n"
        )
    return window


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
    """Runs the largest step on a GPU and captures the largest graphs, over a cache of its own; returns what steps and
    all graphs take, in bytes, by this process's own account.

    Reserve this many bytes outside the KV pool. 0 on a CPU, whose system finds memory elsewhere.
    """
    device, spec = model.device, model.spec
    if device_type(device) == "cpu":
        return 0
    import torch

    from outrider.engine.gpu_memory import driver_bytes

    window_blocks = -(-min(num_rows, spec.max_model_len) // block_size)
    num_sequences = -(-num_rows // spec.max_model_len)
    cache = PagedKVCache(
        spec.planes,
        num_blocks=num_sequences * window_blocks,
        block_size=block_size,
        device=device,
        num_scratch_blocks=1,
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    rows = []
    for sequence in range(num_sequences):
        size = min(num_rows - sequence * spec.max_model_len, spec.max_model_len)
        blocks = range(sequence * window_blocks, (sequence + 1) * window_blocks)
        rows.append(SequenceRows([0] * size, 0, blocks, num_logits=min(size, max(num_logits, 0))))
        num_logits -= rows[-1].num_logits
    largest = None if graphs is None else replace(graphs, is_rehearsal=True)
    runner = make_runner(model, cache, attention, graphs=largest, features=features)
    runner.forward(build_input_batch(rows, block_size))
    torch.cuda.synchronize(device)
    driver = driver_bytes(device)
    warm_up(runner, cache, spec.max_model_len)
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_reserved(device) - before  # the pool of graphs is beside what steps have left
    if graphs is not None and runner.padded_rows:
        num_kinds = 1 + graphs.has_trees
        now = driver_bytes(device)
        known = None if driver is None or now is None else max(now - driver, 0) // num_kinds
        graph_bytes = spec.num_layers * GRAPH_LAYER_BYTES if known is None else known
        taken += graph_bytes * len(runner.padded_rows) * num_kinds
    del runner, cache
    gc.collect()  # whatever else has come to hold them
    torch.cuda.empty_cache()
    return taken
