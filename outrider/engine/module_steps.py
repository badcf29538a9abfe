"""The forward pass of a model that torch computes, through a fused decoder or through transformers' modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.engine.attention.base import AttentionBackend, AttentionOptions
from outrider.engine.attention.native import NativeAttention
from outrider.engine.attention.transformers_hook import STEP_ARGUMENT
from outrider.engine.cpu_kernels.delta_rule import NativeDeltaRule, StepStates
from outrider.engine.cpu_kernels.modules import NativeLayers
from outrider.engine.device import device_type
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.feature_writer import FeatureWriter, layers_of
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.planes import STATE_PLANE
from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES, tensor_of
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.runner_base import ModelRunner
from outrider.engine.stages import Stage
from outrider.engine.step_graphs import Capturable, StepGraphs, cuda_graphs
from outrider.engine.torch_adapter import AdapterRows

if TYPE_CHECKING:
    from outrider.engine.arrays import Array


class ModuleSteps(ModelRunner):
    """A runner of a model that torch computes. If the model's layers are native, attention is native too."""

    can_be_traced = True

    def __init__(
        self,
        model: RunnableModel,
        kv_cache: PagedKVCache,
        attention: AttentionBackend | None,
        *,
        graphs: GraphShapes | None = None,
        features: FeatureSpec | None = None,
    ) -> None:
        """Takes the arguments of make_runner."""
        assert model.model is not None
        if isinstance(model.native, NativeLayers):
            attention = NativeAttention(model.native.kernels)
        assert attention is not None
        self.attention_name = attention.name
        self.is_asynchronous = device_type(kv_cache.device) != "cpu"
        self._model = model.model
        self._fused = model.fused
        self._vocab_size = model.spec.vocab_size
        self._num_layers = model.spec.num_layers
        self._hidden_size = model.model.config.get_text_config(decoder=True).hidden_size
        self._dtype = TORCH_DTYPES[model.spec.dtype]
        self._stage = model.stage
        self._first_layer = 0 if model.stage is None else model.stage.layers.start
        self._is_native = model.native is not None
        self._kv_cache = kv_cache
        self._attention = attention
        self._features = None if features is None else FeatureWriter(model.model, features, kv_cache, model.native)
        self._graphs: StepGraphs | None = None
        if graphs is not None and attention.can_be_captured:
            device = torch.device(kv_cache.device)
            self._graphs = StepGraphs(
                graphs,
                device=device,
                scratch_blocks=kv_cache.scratch_blocks,
                block_size=kv_cache.block_size,
                capture=cuda_graphs(device),
                plan=attention.plan,
            )

    def forward(
        self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None, states: Tensor | None = None
    ) -> Array:
        """Implements ModelRunner.forward.

        A stage that is not the first takes the rows' hidden `states` after the stage before it; one that is not the
        last returns them: [num_rows, hidden_size].
        """
        if self._stage is not None:
            return self._compute_stage(self._stage, batch, states, on_layer_done)
        if self._graphs is not None and (logits := self._graphs.run(batch)) is not None:
            if on_layer_done is not None:
                for layer in range(self._num_layers):
                    on_layer_done(layer)
            return logits
        logits = self._compute(batch, on_layer_done)
        return logits.numpy() if self._is_native else logits

    def prepare_ahead(self, batch: InputBatch) -> InputBatch:
        """Implements ModelRunner.prepare_ahead."""
        padded = None if self._graphs is None else self._graphs.padded(batch)
        return self._attention.plan(batch) if padded is None else padded

    @property
    def capturable(self) -> Capturable | None:
        """Implements ModelRunner.capturable."""
        return None if self._graphs is None else Capturable(self._compute, self._attention.plan)

    def capture_graphs(self) -> None:
        """Implements ModelRunner.capture_graphs."""
        if self._graphs is not None:
            self._graphs.capture_all(self._compute)
            self.padded_rows = self._graphs.row_counts

    @torch.inference_mode()
    def _compute(self, batch: InputBatch, on_layer_done: Callable[[int], None] | None = None) -> Tensor:
        """Does what `forward` does, without graphs, and returns the logits on the model's device."""
        batch = self._attention.plan(batch)
        slots = batch.slots_on(self._kv_cache.device)
        adapters = AdapterRows(batch, self._kv_cache.device) if batch.adapters else None
        with nullcontext() if self._features is None else self._features.writing(slots):
            if self._fused is not None:
                return self._fused.forward(
                    batch, self._kv_cache, self._attention, self._features, on_layer_done, adapters=adapters
                )
            with nullcontext() if adapters is None else adapters.added_in(self._model):
                return self._by_modules(batch, on_layer_done)

    def _compute_stage(
        self, stage: Stage, batch: InputBatch, states: Tensor | None, on_layer_done: Callable[[int], None] | None
    ) -> Array:
        """Does what `forward` does for a stage, by hooks of its first and its last layer."""
        layers, leaving = layers_of(self._model.get_decoder(), self._num_layers), []

        def enter(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            if states is None:
                return None
            rows = states.unsqueeze(0)
            return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows})

        def leave(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            leaving.append((output if isinstance(output, Tensor) else output[0])[0])

        entering = layers[0].register_forward_pre_hook(enter, with_kwargs=True)
        with entering, layers[-1].register_forward_hook(leave):
            logits = self._compute(batch, on_layer_done)
        if not stage.is_last:
            return leaving[0]
        return logits.numpy() if self._is_native else logits

    def empty_states(self, num_rows: int) -> Tensor:
        """Allocates the hidden states of rows: [num_rows, hidden_size]."""
        return torch.empty((num_rows, self._hidden_size), dtype=self._dtype, device=self._kv_cache.device)

    @torch.inference_mode()
    def hidden_rows(self, batch: InputBatch, on_layer_done: Callable[[int], None] | None = None) -> Tensor:
        """Does what `forward` does before the output layer: returns [num_logits, hidden_size] for `logits_of`."""
        batch = self._attention.plan(batch)
        rows: Tensor = self._model.base_model(**self._arguments(batch, on_layer_done)).last_hidden_state[0]
        return rows[batch.on(self._kv_cache.device).logits_rows]

    @torch.inference_mode()
    def logits_of(self, rows: Tensor) -> Array:
        """Returns the logits of such rows, perhaps of other ranks, in the form of `forward`."""
        if not len(rows):
            return np.empty((0, self._vocab_size), dtype=np.float32)
        output_layer = copy.copy(self._model)  # the same modules, except for the decoder
        given = _GivenRows(rows)
        output_layer.__dict__["_modules"] = self._model._modules | {self._model.base_model_prefix: given}  # noqa: SLF001
        logits: Tensor = output_layer(input_ids=None, use_cache=False).logits[0].float()
        return logits.numpy() if self._is_native else logits

    def _arguments(self, batch: InputBatch, on_layer_done: Callable[[int], None] | None) -> dict[str, Any]:
        """Returns the arguments of the model's modules."""
        device = self._kv_cache.device
        on_device = batch.on(device)
        return {
            "input_ids": on_device.token_ids.unsqueeze(0),  # [1, num_rows]
            "position_ids": on_device.positions.unsqueeze(0),
            "use_cache": False,
            STEP_ARGUMENT: PagedStep(
                self._kv_cache, self._attention, batch, on_layer_done, first_layer=self._first_layer
            ),
        }

    def _by_modules(self, batch: InputBatch, on_layer_done: Callable[[int], None] | None) -> Tensor:
        device, arguments = self._kv_cache.device, self._arguments(batch, on_layer_done)
        if batch.num_logits == 0 or (self._stage is not None and not self._stage.is_last):
            self._model.base_model(**arguments)
            return torch.empty((0, self._vocab_size), device=device)
        if batch.selects_logits:
            arguments["logits_to_keep"] = batch.on(device).logits_rows
        logits: Tensor = self._model(**arguments).logits[0]  # [num_logits, vocab_size]
        return logits.float()


class _GivenRows(nn.Module):
    """Takes the place of a decoder whose hidden states are known."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, **_arguments: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast  # takes seconds, but not in a model of modules

        return MoeModelOutputWithPast(last_hidden_state=self._rows.unsqueeze(0))


class PagedStep:
    """One forward pass over a cache: a LayerAttention, and a LinearStep. It writes what a layer stores of the rows to
    the cache, then computes over the cache.
    """

    def __init__(
        self,
        kv_cache: PagedKVCache,
        attention: AttentionBackend,
        batch: InputBatch,
        on_layer_done: Callable[[int], None] | None = None,
        *,
        first_layer: int = 0,
    ) -> None:
        """`first_layer`: the model's layer that is the cache's first."""
        groups = range(batch.num_groups)
        self._kv_cache, self._attention, self._batch = kv_cache, attention, batch
        self._plans = [attention.prepare(batch, group) for group in groups]
        self._slots = [batch.slots_on(kv_cache.device, group) for group in groups]
        self._on_layer_done = on_layer_done
        self._first_layer = first_layer
        self._states: StepStates | None = None

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        _extras: Mapping[str, Any],
    ) -> Tensor:
        """Implements LayerAttention."""
        index = layer - self._first_layer
        keys, values = self._kv_cache.keys[index], self._kv_cache.values[index]
        group = self._group_of(index)
        self._attention.store(key, value, keys, values, self._slots[group])
        if self._on_layer_done is not None:
            self._on_layer_done(layer)
        return self._attention.attend(self._plans[group], query, keys, values, options)

    def apply_delta_rule(self, layer: int, rule: NativeDeltaRule, rows: Tensor, gates: Tensor) -> Tensor:
        """Implements LinearStep."""
        self._states = self._states or StepStates(self._batch)
        index = layer - self._first_layer
        group = self._group_of(index)
        stored = tensor_of(self._kv_cache.keys[index]).flatten(0, 2)
        stored.index_copy_(0, self._slots[group], rows)
        (place,) = self._kv_cache.layer_groups[-1].places(range(index, index + 1))
        states = self._kv_cache.layers(STATE_PLANE)[place].squeeze(1)
        output = rule.compute(self._plans[group][0], self._states, stored, states, gates)
        if self._on_layer_done is not None:
            self._on_layer_done(layer)
        return output

    def _group_of(self, index: int) -> int:
        return self._kv_cache.group_of[index] if len(self._slots) > 1 else 0
