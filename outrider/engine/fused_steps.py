"""The forward passes of a model that our GPU kernels compute beside torch's products."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from outrider.engine.attention.base import AttentionBackend
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.feature_writer import FeatureWriter, Tap
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.module_steps import TorchSteps
from outrider.engine.runnable_model import RunnableModel


class FusedSteps(TorchSteps):
    """Forwards by a FusedDecoder, over any attention backend."""

    def __init__(
        self,
        model: RunnableModel,
        kv_cache: PagedKVCache,
        attention: AttentionBackend | None,
        *,
        graphs: GraphShapes | None = None,
        features: FeatureSpec | None = None,
    ) -> None:
        """As make_runner."""
        assert model.fused is not None
        assert attention is not None
        writer = None if features is None else FeatureWriter(features, kv_cache)
        super().__init__(model, kv_cache, attention, graphs=graphs, features=writer)
        self._decoder = model.fused

    def _logits(self, batch: InputBatch, on_layer_done: Callable[[int], None] | None, tap: Tap | None) -> Tensor | None:
        states = self._decoder.forward(batch, self._kv_cache, self._attention, on_layer_done=on_layer_done, tap=tap)
        if batch.num_logits == 0:
            return None
        if batch.num_logits < batch.num_rows:
            states = states.index_select(0, batch.on(self._kv_cache.device).logits_rows)
        return self._decoder.logits(states)
