"""The forward pass of rank 0, which sends the same batch to the other ranks."""

from __future__ import annotations

from collections.abc import Callable

from outrider.engine.arrays import Array
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.input_batch import InputBatch
from outrider.engine.model_runner import ModelRunner
from outrider.engine.ranks.commands import Step
from outrider.engine.ranks.group import RankGroup
from outrider.engine.ranks.sharded_cache import ShardedKVCache
from outrider.engine.runnable_model import RunnableModel


class LeadingRunner(ModelRunner):
    """A ModelRunner of rank 0's shard. Steps are not captured as graphs."""

    def __init__(
        self,
        model: RunnableModel,
        kv_cache: ShardedKVCache,
        attention: AttentionBackend,
        ranks: RankGroup,
        features: FeatureSpec | None = None,
    ) -> None:
        super().__init__(model, kv_cache.local, attention, features=features)
        self._ranks = ranks

    def forward(self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None) -> Array:
        """As ModelRunner.forward. Raises RankLostError when another rank is gone."""

        def layer_done(layer: int) -> None:
            self._ranks.layer_done(layer)
            if on_layer_done is not None:
                on_layer_done(layer)

        with self._ranks.running(Step(batch)):
            return super().forward(batch, on_layer_done=layer_done)
