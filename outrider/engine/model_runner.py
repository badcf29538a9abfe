"""Runs a decoder over ragged batches of rows and our paged KV cache. Torch-free where native kernels compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from outrider.engine.attention.base import AttentionBackend
from outrider.engine.cpu_kernels.decoder import NativeDecoder, NativeStep
from outrider.engine.device import device_type
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.step_clock import ForwardPhases

if TYPE_CHECKING:
    from outrider.engine.arrays import Array
    from outrider.engine.feature_spec import FeatureSpec
    from outrider.engine.module_steps import ModuleSteps


class ModelRunner:
    """The forward pass of one node. Not thread-safe: the engine thread owns it.

    Several runners may share one model, each with its own cache and backend.
    """

    def __init__(
        self,
        model: RunnableModel,
        kv_cache: PagedKVCache,
        attention: AttentionBackend | None = None,
        *,
        graphs: GraphShapes | None = None,
        features: FeatureSpec | None = None,
    ) -> None:
        """`attention`: of a model that torch computes; native kernels bring their own.

        `graphs`: steps that `warm_up` captures, on a GPU with our own attention. None: none.

        `features`: made of every row for a drafter head. The cache has their plane.
        """
        self._spec = model.spec
        self._kv_cache = kv_cache
        self._steps: NativeStep | ModuleSteps
        if isinstance(model.native, NativeDecoder):
            self._steps = NativeStep(model.native, kv_cache, features)
        else:
            from outrider.engine.module_steps import ModuleSteps  # imports torch

            self._steps = ModuleSteps(model, kv_cache, attention, graphs=graphs, features=features)
        self.attention_name = self._steps.attention_name
        """The backend's name, or "native"."""
        self.phases: ForwardPhases = self._steps.phases
        self.padded_rows = self._steps.padded_rows
        """Row counts to which steps are padded, rising; larger steps are not padded. Empty: no step is."""

    @property
    def can_be_traced(self) -> bool:
        """Whether torch computes forwards: its profiler knows nothing of a native decoder."""
        return not isinstance(self._steps, NativeStep)

    @property
    def is_asynchronous(self) -> bool:
        """Whether `forward` only queues work on a device; reading its results waits for it."""
        return device_type(self._kv_cache.device) != "cpu"

    def forward(self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None) -> Array:
        """Writes the rows' KV into the cache and returns the logits of `batch.logits_rows`.

        Features are in the cache when it returns, and not before the last layer has been reported.

        `on_layer_done(layer)` is called once the rows' keys and values of that layer are
        in the cache, layers rising, from this thread, so that KV is pushed while later layers
        compute.

        Returns [num_logits, vocab_size] float32, with no rows when none need logits: an array of numpy where native
        kernels compute the model or its layers, else a tensor on its device, which nobody may change.
        """
        return self._steps.forward(batch, on_layer_done=on_layer_done)

    def warm_up(self) -> None:
        """Runs the shapes of prefill, verification and decoding once, so that no request pays for thread pools, memory
        and compilation.

        Call it before any block is handed out: it writes to the first ones.
        """
        block_size = self._kv_cache.block_size
        most = min(64, self._kv_cache.num_blocks * block_size, self._spec.max_model_len)
        blocks = range(-(-most // block_size))
        for num_rows in (most, min(5, most), 1):
            rows = SequenceRows([0] * num_rows, most - num_rows, blocks, num_logits=1)
            self.forward(build_input_batch([rows], block_size))
        if not isinstance(self._steps, NativeStep):
            self._steps.capture_graphs()
