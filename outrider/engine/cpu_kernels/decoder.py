"""A whole decoder in one native call, for models in the shape of Llama, Mistral, Qwen2 and Qwen3.

Built from a loaded transformers model, whose weights it takes over: each is packed and
dropped in turn, so that a model is in memory once. Whether the result is the same model is
checked by whoever loads it, on logits (see outrider.model_hub.support).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import BatchStruct, DecoderStruct, LayerStruct, MatrixStruct, Workspace
from outrider.engine.cpu_kernels.matrices import ELEMENT_TYPES, PackedMatrix, WeightArena
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_spec import ModelSpec

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_WIDTH_STEP = 32
"""Widths of activations are multiples of it, so that no row needs padding on any instruction path."""

_POSITIONS_AT_ONCE = 4096


def why_not_native(model: PreTrainedModel, spec: ModelSpec, layers: Sequence[AttentionOptions]) -> str:
    """What keeps a model, to whose layers the kernels apply, from being run as one native call; empty: nothing."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        return f"{config.model_type} is not in the shape of Llama"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    widths = (config.hidden_size, config.intermediate_size, spec.num_heads * spec.head_dim)
    if any(width % _WIDTH_STEP for width in widths):
        return f"its widths {widths} are not multiples of {_WIDTH_STEP}"
    if any(options.softcap is not None for options in layers) or len({options.scaling for options in layers}) != 1:
        return "its layers attend with a soft cap or with different scales"
    base: Any = model.base_model
    cosines, _ = base.rotary_emb(torch.empty(1), torch.zeros((1, 1), dtype=torch.int64))
    if cosines.shape[-1] != spec.head_dim:
        return f"it rotates {cosines.shape[-1]} of {spec.head_dim} dimensions"
    return ""


class NativeDecoder:
    """The forward of a whole model over our paged cache. Holds the weights; steps keep theirs in a workspace."""

    def __init__(
        self,
        kernels: CpuKernels,
        model: PreTrainedModel,
        spec: ModelSpec,
        layers: Sequence[AttentionOptions],
        *,
        quantise: bool = False,
    ) -> None:
        """Takes the weights out of `model`, which cannot compute any more afterwards.

        Args:
            kernels: what computes.
            model: on the CPU, for which `why_not_native` is empty.
            spec: of the model.
            layers: what each layer asks of attention.
            quantise: keep linear layers as int8 (lossy); the output layer stays as it is.
        """
        self.kernels = kernels
        self._spec = spec
        self._kept: list[Any] = []  # whatever the structures point to
        self._arena = WeightArena()
        self._quantise = quantise
        self.num_weight_bytes = 0
        base: Any = model.base_model
        head: Any = model.get_output_embeddings()
        is_tied = head.weight.data_ptr() == base.embed_tokens.weight.data_ptr()
        dtype = head.weight.dtype

        self._layers = (LayerStruct * spec.num_layers)()
        for index, (layer, options) in enumerate(zip(base.layers, layers, strict=True)):
            self._layers[index] = self._layer(layer, options)
        cosines, sines = (self._keep(table) for table in _rotation_tables(base.rotary_emb, spec.max_model_len))
        packed_head = self._matrix([head], quantise=False)
        embedding = None if is_tied else self._keep(base.embed_tokens.weight.detach().clone())
        final_norm = self._keep(base.norm.weight.detach().float())
        for module in (head, base.embed_tokens, base.norm):
            _drop_weights(module)
        self._struct = DecoderStruct(
            spec.num_layers,
            model.config.hidden_size,
            model.config.intermediate_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            packed_head.out_features,
            layers[0].scaling,
            model.config.rms_norm_eps,
            ELEMENT_TYPES[dtype],
            cosines,
            sines,
            embedding,
            final_norm,
            packed_head,
            self._layers,
        )

    def new_step(self, kv_cache: PagedKVCache) -> NativeStep:
        """What one runner computes its forwards with."""
        return NativeStep(self, self._struct, kv_cache)

    def _layer(self, layer: Any, options: AttentionOptions) -> LayerStruct:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        norms = [
            None if norm is None else self._keep(norm.weight.detach().float())
            for norm in (layer.input_layernorm, layer.post_attention_layernorm, query_norm, key_norm)
        ]
        struct = LayerStruct(
            *norms,
            self._matrix([attention.q_proj, attention.k_proj, attention.v_proj]),
            self._matrix([attention.o_proj]),
            self._matrix([mlp.gate_proj, mlp.up_proj], interleave=True),
            self._matrix([mlp.down_proj]),
            options.sliding_window or 0,
        )
        _drop_weights(layer)
        return struct

    def _matrix(
        self, linears: Sequence[Any], *, interleave: bool = False, quantise: bool | None = None
    ) -> MatrixStruct:
        matrix = PackedMatrix(
            self.kernels,
            self._arena,
            [linear.weight for linear in linears],
            [linear.bias for linear in linears],
            interleave=interleave,
            quantise=self._quantise if quantise is None else quantise,
        )
        self._kept.append(matrix)
        self.num_weight_bytes += matrix.num_bytes
        return matrix.struct

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor that lives as long as this decoder."""
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


class NativeStep:
    """Forwards of one runner: its workspace, and where its cache lies. Not thread-safe."""

    def __init__(self, decoder: NativeDecoder, struct: DecoderStruct, kv_cache: PagedKVCache) -> None:
        self._decoder = decoder  # keeps what `struct` points to
        self._struct = struct
        self._kv_cache = kv_cache
        self._functions = decoder.kernels.library.functions
        self._team = decoder.kernels.team
        self._workspace = Workspace(decoder.kernels.library)
        pointers = ctypes.c_void_p * struct.num_layers
        self._keys = pointers(*(keys.data_ptr() for keys in kv_cache.keys))
        self._values = pointers(*(values.data_ptr() for values in kv_cache.values))

    def forward(self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None) -> Tensor:
        """As ModelRunner.forward: [num_logits, vocab_size] float32."""
        struct = batch_struct(batch)
        if on_layer_done is None:
            self._run_layers(struct, 0, self._struct.num_layers)
        else:
            for layer in range(self._struct.num_layers):
                self._run_layers(struct, layer, layer + 1)
                on_layer_done(layer)
        logits = torch.empty((batch.num_logits, self._struct.vocab_size))
        self._functions.outrider_decoder_logits(
            self._team.handle,
            self._workspace.handle,
            self._struct,
            _address(batch.arrays.logits_rows),
            batch.num_logits,
            logits.data_ptr(),
        )
        return logits

    @property
    def phases(self) -> NativePhases:
        return NativePhases(self._workspace)

    def _run_layers(self, batch: BatchStruct, first: int, last: int) -> None:
        self._functions.outrider_decoder_layers(
            self._team.handle, self._workspace.handle, self._struct, batch, self._keys, self._values, first, last
        )


class NativePhases:
    """ForwardPhases of native steps: counted inside the call. A callback between layers is not in them."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def start(self) -> None:
        self._workspace.take_times()
        self._workspace.measure(is_on=True)

    def exclude(self, nanoseconds: int) -> None:
        return

    def take(self) -> dict[str, int]:
        return self._workspace.take_times()

    def stop(self) -> None:
        self._workspace.measure(is_on=False)


def batch_struct(batch: InputBatch) -> BatchStruct:
    """Points to the batch's memory, which must outlive it; nothing keeps it alive but the batch."""
    arrays = batch.arrays
    return BatchStruct(
        batch.num_rows,
        batch.num_seqs,
        batch.max_blocks,
        batch.block_size,
        _address(arrays.token_ids),
        _address(arrays.positions),
        _address(arrays.slot_mapping),
        _address(arrays.query_start_loc),
        _address(arrays.seq_lens),
        _address(arrays.block_tables),
    )


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]


def _rotation_tables(rotary: nn.Module, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, as the model itself computes them: each [num_positions, head_dim / 2]."""
    tables: list[tuple[Tensor, Tensor]] = []
    for start in range(0, num_positions, _POSITIONS_AT_ONCE):
        positions = torch.arange(start, min(start + _POSITIONS_AT_ONCE, num_positions)).unsqueeze(0)
        cosines, sines = rotary(torch.empty(1), positions)  # each [1, n, head_dim], both halves alike
        half = cosines.shape[-1] // 2
        tables.append((cosines[0, :, :half], sines[0, :, :half]))
    return torch.cat([cosines for cosines, _ in tables]), torch.cat([sines for _, sines in tables])


def _drop_weights(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
