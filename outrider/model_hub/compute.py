"""A model with the memory, and the processes, that it computes with: what prefill and decode nodes are built on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.engine.attention import make_attention_backend
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.model_runner import ModelRunner, open_runner
from outrider.engine.ranks.channel import RankLostError
from outrider.engine.step_graphs import GraphShapes
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import attention_of
from outrider.model_hub.loaded_model import LoadedModel
from outrider.model_hub.open import open_model
from outrider.model_hub.progress import Progress, no_progress

if TYPE_CHECKING:
    from outrider.engine.kv_cache.base import KVCache


@dataclass(frozen=True, slots=True)
class Compute:
    """Warmed up. `ranks` is entered while the node computes: it watches other processes, if any, and ends them."""

    model: LoadedModel
    kv_cache: KVCache
    runner: ModelRunner
    ranks: AbstractContextManager[object]


def open_compute(
    config: ModelConfig,
    kv_cache: KVCacheConfig,
    *,
    max_rows_per_step: int,
    graphs: GraphShapes | None = None,
    on_rank_lost: Callable[[RankLostError], None],
    progress: Progress = no_progress,
) -> Compute:
    """Loads the model and makes its cache: in this process, or in `model.tensor_parallel_size` of which this is rank 0.

    `graphs`: steps that are captured, if `model.cuda_graphs` and the device allow it; their memory is not the cache's.
    `on_rank_lost`: called from a thread of its own; no step can be computed any more. Raises what `open_model` and
    PagedKVCache.sized_for do, and RankLostError.
    """
    if config.tensor_parallel_size > 1:
        from outrider.model_hub.ranks import open_ranks  # imports torch.distributed

        return open_ranks(
            config, kv_cache, max_rows_per_step=max_rows_per_step, on_rank_lost=on_rank_lost, progress=progress
        )
    model = open_model(config, progress=progress)
    attention = make_attention_backend(attention_of(config, model.device), model.device, model.spec.dtype)
    graphs = graphs if config.cuda_graphs else None
    cache, runner = open_runner(model, attention, kv_cache, num_rows=max_rows_per_step, graphs=graphs)
    return Compute(model, cache, runner, nullcontext())
