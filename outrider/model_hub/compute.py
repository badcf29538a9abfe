"""Opens a model with its KV cache and runner, in one or more processes, for prefill and decode nodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.engine.cpu_turns import CpuTurns
from outrider.engine.device import device_type
from outrider.engine.gpu_turns import loading_turn
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.host_memory import open_host_store
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.divided_pool import DividedPool
from outrider.engine.kv_cache.make_pool import make_pool
from outrider.engine.open_runner import open_runner
from outrider.engine.processor import usable_cpus
from outrider.engine.ranks.channel import RankLostError
from outrider.engine.ranks.sharded_cache import DividedKVCache
from outrider.engine.runner_base import ModelRunner
from outrider.errors import ConfigError
from outrider.model_hub.adapters import AdapterTable
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import choose_attention, resolve_device
from outrider.model_hub.loaded_model import LoadedModel, ReductionOf
from outrider.model_hub.open import open_model
from outrider.prefill import MAX_SCORED_ROWS
from outrider.progress import Progress, no_progress

if TYPE_CHECKING:
    from outrider.engine.ranks.sharded_cache import KVCache

PROMPT_ROWS = {"cpu": 256, "cuda": 4096}
"""Prompt tokens per forward pass, by device type. On a CPU, more than 256 rows are no faster per row, and other nodes
on its processors would wait longer. A GPU needs thousands of rows to be fully used, and then also reads keys less
often."""
PIPELINE_CHUNKS = 4
"""Number of times as many prompt tokens per forward pass of a pipeline. The pass is cut into parts, and the more parts,
the shorter the time in which only some stages compute."""


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """A warmed-up model. `ranks` must be entered while the node computes: it watches and ends the other ranks."""

    model: LoadedModel
    kv_cache: KVCache
    runner: ModelRunner
    ranks: AbstractContextManager[object]
    max_rows_per_step: int
    adapters: AdapterTable

    def make_pool(self, config: KVCacheConfig) -> BlockPool:
        """Makes a pool of the cache's blocks, with main memory for evicted ones if that is configured.

        Raises: ConfigError, see open_host_store.
        """
        cache, seed = self.kv_cache, bytes.fromhex(self.model.info.fingerprint)
        named: dict[str, Any] = {"hash_seed": seed, "enable_prefix_cache": config.prefix_cache}
        if isinstance(cache, DividedKVCache):
            return DividedPool(cache.num_ranks, num_blocks=cache.local.num_blocks, block_size=cache.block_size, **named)
        pool = make_pool(cache, max_step_tokens=self.max_rows_per_step, **named)
        if config.host_bytes:
            max_rows = min(self.max_rows_per_step, PROMPT_ROWS[device_type(self.model.device)])
            max_rows = min(max_rows, self.model.info.max_model_len)
            pool.use_host(open_host_store(cache, self.runner, config.host_bytes, max_rows=max_rows))
        return pool

    def describe(self, config: ModelConfig, *, cpu_turns: CpuTurns) -> dict[str, object]:
        """Describes the model for a node's start-up line. `config`: the settings with which it was opened."""
        model, info = self.model, self.model.info
        return {
            "model": info.name,
            "fingerprint": info.fingerprint,
            "dtype": info.dtype,
            "device": model.device,
            "ranks": config.num_ranks,
            "attention_backend": self.runner.attention_name,
            "threads": model.num_threads,
            "cpus": ",".join(map(str, usable_cpus())),
            "numerics": info.numerics,
            "kernels": str(model.kernels),
            "weights": model.weights_source,
            "features": str(info.features or "none"),
            "cpu_turns": cpu_turns.description,
            "adapters": [str(adapter) for adapter in self.adapters.adapters],
            "kv_blocks": self.kv_cache.num_blocks,
            "kv_block_size": self.kv_cache.block_size,
            "max_model_len": info.max_model_len,
        }


def open_model_runtime(
    config: ModelConfig,
    kv_cache: KVCacheConfig,
    *,
    max_rows_per_step: int | None = None,
    graphs: GraphShapes | None = None,
    main_memory_bytes: int = 0,
    features: ReductionOf | None = None,
    on_rank_lost: Callable[[RankLostError], None],
    progress: Progress = no_progress,
) -> ModelRuntime:
    """Loads the model and makes its cache, in this process or in `model.num_ranks` processes, of which this
    one is rank 0.

    `max_rows_per_step`: None if all rows are prompt rows; then their maximum is PROMPT_ROWS.

    `graphs`: steps to capture as CUDA graphs, if `model.cuda_graphs` and the device allow it; the cache leaves memory
    for the graphs.

    `main_memory_bytes`: other main memory that the node may need, which a cache in main memory leaves free.

    `features`: takes the loaded model and returns the reduction whose features a cache plane stores for every row.

    `on_rank_lost`: called from a separate thread if a rank is lost, after which no step can be computed.

    The window is shorter than the model's if memory is short and `model.max_model_len` is not set.

    Raises: what `open_model`, AdapterTable and pool_size raise, ConfigError and RankLostError.
    """
    if config.expert_parallel_size > 1 and kv_cache.host_bytes:
        raise ConfigError("kv_cache.host_memory does not go with model.expert_parallel_size: set it to 0")
    num_rows = max_rows_per_step or PROMPT_ROWS[device_type(resolve_device(config.device))]
    if config.pipeline_parallel_size > 1 and max_rows_per_step is None:
        num_rows *= PIPELINE_CHUNKS
    if config.num_ranks > 1:
        from outrider.model_hub.ranks import open_ranks  # imports torch.distributed

        parts = open_ranks(
            config,
            kv_cache,
            max_rows_per_step=num_rows,
            features=features,
            on_rank_lost=on_rank_lost,
            progress=progress,
        )
        return ModelRuntime(*parts, num_rows, _open_adapters(parts[0], config))
    with loading_turn([resolve_device(config.device)], progress):
        model = open_model(config, progress=progress)
        adapters = _open_adapters(model, config)
        reduction = None if features is None else features(model)
        model = model.with_features(reduction)
        cache, runner, window = open_runner(
            model,
            choose_attention(config, model.device),
            kv_cache,
            num_rows=num_rows,
            num_logits=max_rows_per_step or MAX_SCORED_ROWS,
            graphs=graphs if config.cuda_graphs else None,
            main_memory_bytes=main_memory_bytes,
            adapter_bytes=adapters.reserved_bytes,
            features=reduction,
            may_shorten=not config.max_model_len,
            has_window_tables=True,
        )
    return ModelRuntime(model.with_window(window), cache, runner, nullcontext(), num_rows, adapters)


def _open_adapters(model: LoadedModel, config: ModelConfig) -> AdapterTable:
    return AdapterTable(model, model_name=model.info.name, config=config)
