"""Runs a transformers decoder over ragged batches of rows and our paged KV cache."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.attention.native import NativeAttention
from outrider.engine.attention.transformers_hook import STEP_ARGUMENT
from outrider.engine.cpu_kernels.decoder import NativeDecoder, NativeStep
from outrider.engine.cpu_kernels.modules import NativeLayers
from outrider.engine.feature_writer import FeatureWriter
from outrider.engine.features import FeatureReduction
from outrider.engine.gpu_kernels import why_no_triton
from outrider.engine.input_batch import InputBatch, SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache, free_memory_bytes
from outrider.engine.model_spec import ModelSpec
from outrider.engine.step_clock import ForwardPhases
from outrider.engine.step_graphs import MOST_ROWS, Buckets, GraphShapes, StepGraphs, cuda_graphs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RunnableModel(Protocol):
    """What a runner needs of a loaded model (see outrider.model_hub.loaded_model.LoadedModel)."""

    @property
    def model(self) -> PreTrainedModel | None:
        """None where `native` is a NativeDecoder."""

    @property
    def device(self) -> torch.device: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def native(self) -> NativeDecoder | NativeLayers | None:
        """What computes in place of `model`, or in its layers."""


class ModelRunner:
    """The forward pass of one node. Not thread-safe: the engine thread owns it.

    A model that native kernels compute brings its own attention: the backend is not asked then.
    Several runners may share one model, each with its own cache and backend.
    """

    def __init__(
        self,
        model: RunnableModel,
        kv_cache: PagedKVCache,
        attention: AttentionBackend,
        *,
        graphs: GraphShapes | None = None,
        features: FeatureReduction | None = None,
    ) -> None:
        """`graphs`: steps that `warm_up` captures, on a GPU with our own attention. None: none.

        `features`: made of every row for a drafter head. The cache has their plane.
        """
        self._spec = model.spec
        self._kv_cache = kv_cache
        self._native = NativeStep(model.native, kv_cache, features) if isinstance(model.native, NativeDecoder) else None
        if isinstance(model.native, NativeLayers):
            attention = NativeAttention(model.native.kernels)
        self._attention = attention
        self._device = kv_cache.device
        self._modules: _ModuleForward | None = None
        if model.model is not None:
            writer = None if features is None else FeatureWriter(model.model, features, kv_cache, model.native)
            self._modules = _ModuleForward(model.model, model.spec, kv_cache, attention, writer)
        self.phases = ForwardPhases() if self._native is None else self._native.phases
        self._graphs: StepGraphs | None = None
        self.padded_rows: tuple[int, ...] = ()
        """Row counts to which steps are padded, rising; larger steps are not padded. Empty: no step is."""
        if graphs is not None and self._modules is not None and attention.can_be_captured:
            self.padded_rows = graphs.row_counts
            self._graphs = StepGraphs(
                self._modules,
                Buckets(graphs, max_model_len=self._spec.max_model_len, block_size=kv_cache.block_size),
                device=self._device,
                scratch_block=kv_cache.scratch_blocks[0],
                block_size=kv_cache.block_size,
                capture=cuda_graphs(self._device),
            )

    @property
    def attention_name(self) -> str:
        """The backend's name, or "native"."""
        return self._attention.name if self._native is None else "native"

    @property
    def is_asynchronous(self) -> bool:
        """Whether `forward` only queues work on a device; reading its results waits for it."""
        return self._device.type != "cpu"

    def forward(self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None) -> Tensor:
        """Writes the rows' KV into the cache and returns the logits of `batch.logits_rows`.

        Features are in the cache when it returns, and not before the last layer has been reported.

        `on_layer_done(layer)` is called once the rows' keys and values of that layer are
        in the cache, layers rising, from this thread, so that KV is pushed while later layers
        compute.

        Returns [num_logits, vocab_size] float32, with no rows when none need logits. It may be
        an inference tensor: change it in place only within torch.inference_mode().
        """
        if self._native is not None:
            return self._native.forward(batch, on_layer_done=on_layer_done)
        if self._graphs is not None and on_layer_done is None:
            logits = self._graphs.run(batch)
            if logits is not None:
                return logits
        assert self._modules is not None
        return self._modules(batch, on_layer_done)

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
        if self._graphs is not None:
            self._graphs.capture_all()


def open_runner(
    model: RunnableModel,
    attention: AttentionBackend,
    kv_cache: KVCacheConfig,
    *,
    num_rows: int,
    num_logits: int = MOST_ROWS,
    graphs: GraphShapes | None = None,
    main_memory_bytes: int = 0,
    features: FeatureReduction | None = None,
) -> tuple[PagedKVCache, ModelRunner]:
    """A warmed-up runner, and its cache in the memory that the largest step, of `num_rows`, leaves free.

    `num_logits`: rows of that step with logits, at most. `main_memory_bytes`: of that memory, for other things.
    `features`: of every row; the model's specification has their plane.

    Raises what PagedKVCache.sized_for does.
    """
    reserved_bytes = rehearse(
        model,
        attention,
        num_rows=num_rows,
        num_logits=num_logits,
        block_size=kv_cache.block_size,
        graphs=graphs,
        features=features,
    )
    if model.device.type == "cpu":
        reserved_bytes += main_memory_bytes
    cache = PagedKVCache.sized_for(
        model.spec,
        kv_cache,
        device=model.device,
        reserved_bytes=reserved_bytes,
        kernels=None if model.native is None else model.native.kernels,
    )
    runner = ModelRunner(model, cache, attention, graphs=graphs, features=features)
    runner.warm_up()
    return cache, runner


def rehearse(
    model: RunnableModel,
    attention: AttentionBackend,
    *,
    num_rows: int,
    block_size: int,
    num_logits: int = MOST_ROWS,
    graphs: GraphShapes | None = None,
    features: FeatureReduction | None = None,
) -> int:
    """Runs the largest step on a GPU and captures all graphs, over a cache of its own; returns the bytes they took.

    Reserve this many bytes outside the KV pool. 0 on a CPU, whose system finds memory elsewhere.
    """
    device, spec = model.device, model.spec
    if device.type == "cpu":
        return 0
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
    runner = ModelRunner(model, cache, attention, graphs=graphs, features=features)
    runner.forward(build_input_batch(rows, block_size))
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free = free_memory_bytes(device)  # graphs take memory of the driver too
    runner.warm_up()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    taken += free - free_memory_bytes(device)
    del runner, cache
    gc.collect()  # whatever else has come to hold them
    torch.cuda.empty_cache()
    return taken


def store_in_torch(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """As `gpu_kernels.cache.store`."""
    key_cache.flatten(0, 1).index_copy_(0, slots, keys)
    value_cache.flatten(0, 1).index_copy_(0, slots, values)


class _ModuleForward:
    """The forward pass of a model made of torch modules.

    An object of its own, which StepGraphs and ModelRunner both hold: graphs that held their runner would be a reference
    cycle, and device memory would wait for a garbage collection.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        kv_cache: PagedKVCache,
        attention: AttentionBackend,
        features: FeatureWriter | None = None,
    ) -> None:
        self._model = model
        self._features = features
        self._vocab_size = spec.vocab_size
        self._kv_cache = kv_cache
        self._attention = attention

    @torch.inference_mode()
    def __call__(self, batch: InputBatch, on_layer_done: Callable[[int], None] | None = None) -> Tensor:
        """As ModelRunner.forward."""
        if self._features is None:
            return self._forward(batch, on_layer_done)
        with self._features.writing(batch.on(self._kv_cache.device).slot_mapping):
            return self._forward(batch, on_layer_done)

    def _forward(self, batch: InputBatch, on_layer_done: Callable[[int], None] | None) -> Tensor:
        device = self._kv_cache.device
        step = PagedStep(batch, self._kv_cache, self._attention, on_layer_done)
        on_device = batch.on(device)
        arguments: dict[str, Any] = {
            "input_ids": on_device.token_ids.unsqueeze(0),  # [1, num_rows]
            "position_ids": on_device.positions.unsqueeze(0),
            "use_cache": False,
            STEP_ARGUMENT: step,
        }
        if batch.num_logits == 0:
            self._model.base_model(**arguments)
            return torch.empty((0, self._vocab_size), device=device)
        if batch.num_logits < batch.num_rows:
            arguments["logits_to_keep"] = on_device.logits_rows
        logits: Tensor = self._model(**arguments).logits[0]  # [num_logits, vocab_size]
        return logits.float()


class PagedStep:
    """One forward's attention: writes each layer's new keys and values, then attends over the cache."""

    __slots__ = ("_attention", "_kv_cache", "_on_layer_done", "_plan", "_slots", "_store")

    def __init__(
        self,
        batch: InputBatch,
        kv_cache: PagedKVCache,
        attention: AttentionBackend,
        on_layer_done: Callable[[int], None] | None,
    ) -> None:
        self._kv_cache = kv_cache
        self._attention = attention
        self._on_layer_done = on_layer_done
        self._plan = attention.prepare(batch)
        self._slots = batch.on(kv_cache.device).slot_mapping
        self._store = attention.store if isinstance(attention, NativeAttention) else store_in_torch
        if not why_no_triton(kv_cache.device):
            from outrider.engine.gpu_kernels.cache import store

            self._store = store

    def attend(
        self,
        layer: int,
        query: Tensor,  # [num_rows, num_heads, head_dim]
        key: Tensor,  # [num_rows, num_kv_heads, head_dim]
        value: Tensor,  # [num_rows, num_kv_heads, head_dim]
        options: AttentionOptions,
        extras: Mapping[str, Any],
    ) -> Tensor:
        """Returns [num_rows, num_heads, head_dim]."""
        key_cache = self._kv_cache.keys[layer]
        value_cache = self._kv_cache.values[layer]
        self._store(key, value, key_cache, value_cache, self._slots)
        if self._on_layer_done is not None:
            self._on_layer_done(layer)
        return self._attention.attend(self._plan, query, key_cache, value_cache, options)
