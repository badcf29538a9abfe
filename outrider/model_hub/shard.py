"""One rank's part of a model. All ranks run this code alike, since a collective needs all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.engine.memory import KVMemory
from outrider.model_hub.config import ModelConfig
from outrider.progress import Progress, no_progress

if TYPE_CHECKING:
    from outrider.engine.attention.base import AttentionBackend
    from outrider.engine.feature_spec import FeatureSpec
    from outrider.engine.kv_cache.paged_cache import PagedKVCache
    from outrider.engine.runner_base import ModelRunner
    from outrider.model_hub.loaded_model import LoadedModel

START_SECONDS = 600.0
"""Maximum seconds that another rank may take to start, and then to load its shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a rank. The rank answers None once it has imported what it needs, then joins the others.

    After loading its shard, the rank sends the memory available for KV, and receives the number of blocks to allocate
    and the taps of the features that rank 0 writes.
    """

    config: ModelConfig
    rank: int
    store: Path  # the file of the process group's store
    block_size: int
    max_rows_per_step: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model, and its attention backend."""

    model: LoadedModel
    attention: AttentionBackend | None  # None if a native decoder computes the model
    room: KVMemory  # memory available for KV on the rank's device
    is_data_parallel: bool = False  # whether ranks divide the sequences

    def make_runner(
        self, kv_cache: PagedKVCache, taps: tuple[int, ...], features: FeatureSpec | None = None
    ) -> ModelRunner:
        """Makes the runner of this rank's part over its own cache. `taps`: of the features that rank 0 writes."""
        from outrider.engine.model_runner import make_runner

        if self.is_data_parallel:
            from outrider.engine.data_parallel import DataParallelRunner

            return DataParallelRunner(self.model, kv_cache, self.attention)
        if self.model.stage is None:
            return make_runner(self.model, kv_cache, self.attention, features=features)
        from outrider.engine.stage_runner import StageRunner

        model = replace(self.model, stage=replace(self.model.stage, taps=taps))
        steps: Any = make_runner(model, kv_cache, self.attention, features=features)
        return StageRunner(model, steps)


def open_shard(start: Start, *, progress: Progress = no_progress) -> Shard:
    """Joins the other ranks and loads this rank's shard. Raises: what `load_model` raises."""
    from outrider.engine.attention import make_attention_backend
    from outrider.engine.open_runner import profile_run
    from outrider.model_hub.kernels import choose_attention
    from outrider.model_hub.tensor_parallel import join, set_collective_timeout

    is_data_parallel = start.config.expert_parallel_size > 1
    timeout_seconds = START_SECONDS if is_data_parallel else start.timeout_seconds  # loading exchanges rows
    join(start.config, start.rank, start.store, timeout_seconds=timeout_seconds)
    if start.config.pipeline_parallel_size > 1:
        from outrider.model_hub.pipeline import open_stage

        model = open_stage(start.config, start.rank, progress=progress)
    else:
        from outrider.model_hub.load import load_model  # imports transformers

        model = load_model(start.config, progress=progress)
    attention = None
    if model.model is not None:
        name, shape = choose_attention(start.config, model.device), model.spec.attention_shape
        attention = make_attention_backend(name, model.device, model.spec.dtype, **shape)
    reserved = profile_run(model, attention, num_rows=start.max_rows_per_step, block_size=start.block_size)
    if model.model is not None:
        set_collective_timeout(model.model, timeout_seconds=start.timeout_seconds)
    if is_data_parallel and start.rank:
        from outrider.model_hub.expert_parallel import drop_output_layer

        drop_output_layer(model)
    return Shard(model, attention, KVMemory.of(model.device, reserved), is_data_parallel)
