"""The forward passes of a loaded draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.engine.gpu_turns import loading_turn
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.open_runner import open_runner
from outrider.engine.runner_base import ModelRunner
from outrider.engine.sampler import Sampler
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import choose_attention, resolve_device
from outrider.model_hub.loaded_model import LoadedModel
from outrider.model_hub.open import open_model
from outrider.progress import Progress, no_progress
from outrider.speculation.path_tree import DraftedToken
from outrider.speculation.proposers.base import ProposerInfo
from outrider.speculation.proposers.draft_forward import DraftForward, PathRows, open_rollouts
from outrider.speculation.proposers.draft_model import MAX_FORWARD_LOGITS, MAX_FORWARD_ROWS, DraftModelProposer

if TYPE_CHECKING:
    from outrider.engine.rollouts import RolloutForward, Rollouts


@dataclass(frozen=True, slots=True)
class ModelForward(DraftForward):
    """The runner, the KV cache and the sampler of one model."""

    pool: BlockPool
    kv_cache: PagedKVCache
    runner: ModelRunner
    sampler: Sampler
    max_model_len: int
    vocab_size: int
    head: None = None
    rollouts: Rollouts | None = None

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        *,
        kv_cache: KVCacheConfig,
        attention: str = "auto",
        graphs: GraphShapes | None = None,
        main_memory_bytes: int = 0,
        may_shorten: bool = False,
    ) -> ModelForward:
        """Returns the forwards of a model with its own cache. Raises: ConfigError if the cache does not fit.

        `may_shorten`: see `open_runner`.
        """
        cache, runner, window = open_runner(
            model,
            attention,
            kv_cache,
            num_rows=MAX_FORWARD_ROWS,
            num_logits=MAX_FORWARD_LOGITS,
            graphs=graphs,
            main_memory_bytes=main_memory_bytes,
            may_shorten=may_shorten,
        )
        pool = BlockPool(
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            hash_seed=model.info.fingerprint.encode(),
            enable_prefix_cache=kv_cache.prefix_cache,
        )
        return cls(pool, cache, runner, model.open_sampler(), window, model.spec.vocab_size)

    def rolling(self) -> RolloutForward | None:
        capturable = self.runner.capturable
        if capturable is None:
            return None
        import torch
        from torch import Tensor

        from outrider.engine.rollouts import RolloutForward

        compute = capturable.forward

        def forward(batch: InputBatch, states: Tensor, depths: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return states, compute(batch), torch.ones_like(depths, dtype=torch.float64)

        return RolloutForward(forward, capturable.plan)

    def _run(self, rows: Sequence[PathRows]) -> list[DraftedToken]:
        fed = [
            SequenceRows(row.token_ids, row.start_position, row.block_ids, min(row.num_decisions, 1)) for row in rows
        ]
        logits = self.runner.forward(build_input_batch(fed, self.pool.block_size))
        return self._decide(logits, rows)


def open_draft_model(
    config: ModelConfig, kv_cache: KVCacheConfig, *, main_memory_bytes: int = 0, progress: Progress = no_progress
) -> DraftModelProposer:
    """Loads a draft model. `main_memory_bytes`: main memory that its cache leaves free.

    Sequences longer than its cache get no drafts. Raises: the errors of `open_model` and `ModelForward.of`.
    """
    with loading_turn([resolve_device(config.device)], progress):
        model = open_model(config, progress=progress)
        if model.spec.linear is not None:
            raise ConfigError(f"{model.spec.architecture} has linear attention, which draft models must not have")
        forward = ModelForward.of(
            model,
            kv_cache=kv_cache,
            attention=choose_attention(config, model.device),
            graphs=GraphShapes(has_rollouts=True) if config.cuda_graphs else None,
            main_memory_bytes=main_memory_bytes,
            may_shorten=not config.max_model_len,
        )
        forward = replace(forward, rollouts=open_rollouts(forward, model.device))
    info = ProposerInfo(
        name=f"draft_model:{model.info.name}",
        vocabulary_fingerprint=model.info.vocabulary_fingerprint,
        memory_bytes=forward.pool.num_blocks * forward.pool.block_size * model.spec.bytes_per_token,
        description={
            "dtype": model.info.dtype,
            "numerics": model.info.numerics,
            "kernels": str(model.kernels),
            "weights": model.weights_source,
            "threads": model.num_threads,
        },
    )
    return DraftModelProposer(forward, info)
