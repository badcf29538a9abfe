"""From a loaded transformers model, or from a head, to the weights of a native decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.cpu_kernels.decoder_weights import (
    BIAS,
    LAYER_NORMS,
    MODEL_TYPES,
    PACKED,
    SCALES,
    DecoderShape,
    DecoderWeights,
    PackedReduction,
)
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.cpu_kernels.matrices import ELEMENT_TYPES, PackedMatrix, WeightArena
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.features import FeatureReduction
from outrider.engine.model_spec import ModelSpec
from outrider.engine.rotation import cosines_and_sines, inverse_frequencies
from outrider.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WIDTH_STEP = 32
"""Widths of activations are multiples of it, so that no row needs padding on any instruction path."""

_POSITIONS_AT_ONCE = 4096
_COMPARED_POSITIONS = 64
_ALLOWED_ANGLE = 2.5e-7
"""For each position: two units in the last place of a frequency."""


def why_not_native(model: PreTrainedModel, spec: ModelSpec, layers: Sequence[AttentionOptions]) -> str:
    """What keeps a model, to whose layers the kernels apply, from being run as one native call; empty: nothing."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        return f"{config.model_type} is not in the shape of Llama"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    widths = (config.hidden_size, config.intermediate_size, spec.num_heads * spec.head_dim)
    if any(width % WIDTH_STEP for width in widths):
        return f"its widths {widths} are not multiples of {WIDTH_STEP}"
    if any(options.softcap is not None for options in layers) or len({options.scaling for options in layers}) != 1:
        return "its layers attend with a soft cap or with different scales"
    base: Any = model.base_model
    if strange := [name for name, module in base.layers.named_modules() if _is_strange(module)]:
        return f"its {strange[0]} is no plain linear layer"
    cosines, _ = base.rotary_emb(torch.empty(1), torch.zeros((1, 1), dtype=torch.int64))
    if cosines.shape[-1] != spec.head_dim:
        return f"it rotates {cosines.shape[-1]} of {spec.head_dim} dimensions"
    return ""


def _is_strange(module: nn.Module) -> bool:
    """A quantizer's layer in the place of a linear one: it has features in and out, and its weights are not for us."""
    if type(module) is nn.Linear:
        return module.weight.dtype not in ELEMENT_TYPES
    return isinstance(module, nn.Linear) or hasattr(module, "in_features")


def pack_decoder(
    kernels: CpuKernels,
    model: PreTrainedModel,
    spec: ModelSpec,
    layers: Sequence[AttentionOptions],
    *,
    quantise: bool = False,
) -> DecoderWeights:
    """Takes the weights out of `model`, which cannot compute any more afterwards.

    Each is packed and dropped in turn, so that a model is in memory once.

    Args:
        kernels: for whose path the weights are packed.
        model: on the CPU, for which `why_not_native` is empty.
        spec: of the model.
        layers: what each layer asks of attention.
        quantise: keep linear layers, the output layer too, as int8 (lossy).
    """
    packing = DecoderPacking(kernels, quantise=quantise)
    base: Any = model.base_model
    head: Any = model.get_output_embeddings()
    is_tied = head.weight.data_ptr() == base.embed_tokens.weight.data_ptr()
    dtype = head.weight.dtype
    for index, layer in enumerate(base.layers):
        attention, mlp = layer.self_attn, layer.mlp
        by_head = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        norms = (layer.input_layernorm, layer.post_attention_layernorm, *by_head)
        packing.add_layer(
            index,
            [None if norm is None else norm.weight for norm in norms],
            qkv=[attention.q_proj, attention.k_proj, attention.v_proj],
            output=attention.o_proj,
            gate_up=[mlp.gate_proj, mlp.up_proj],
            down=mlp.down_proj,
        )
        _drop_weights(layer)
    for name, table in zip(("cosines", "sines"), _rotation_tables(base.rotary_emb, spec.max_model_len), strict=True):
        packing.add(name, table)
    packing.add_matrix("head", [head])
    if not is_tied:
        packing.add("embedding", base.embed_tokens.weight.detach().clone())
    packing.add_norm("final_norm", base.norm.weight)
    for module in (head, base.embed_tokens, base.norm):
        _drop_weights(module)
    shape = DecoderShape(
        num_layers=spec.num_layers,
        hidden_size=model.config.hidden_size,
        intermediate_size=model.config.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scaling=layers[0].scaling,
        epsilon=model.config.rms_norm_eps,
        element_type=ELEMENT_TYPES[dtype],
        sliding_windows=tuple(options.sliding_window or 0 for options in layers),
        matrix_sizes=packing.matrix_sizes,
    )
    return DecoderWeights(shape, packing.blobs)


class DecoderPacking:
    """What has been packed so far, by its name in DecoderWeights."""

    def __init__(self, kernels: CpuKernels, *, quantise: bool = False) -> None:
        self._kernels = kernels
        self._quantise = quantise
        self._arena = WeightArena()
        self.blobs: dict[str, np.ndarray] = {}
        self.matrix_sizes: dict[str, tuple[int, int]] = {}

    def add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.blobs[name] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()

    def add_norm(self, name: str, weight: Tensor | None) -> None:
        """In float32."""
        self.add(name, None if weight is None else weight.float())

    def add_matrix(self, name: str, linears: Sequence[Any], *, interleave: bool = False) -> None:
        matrix = PackedMatrix(
            self._kernels,
            self._arena,
            [linear.weight for linear in linears],
            [linear.bias for linear in linears],
            interleave=interleave,
            quantise=self._quantise,
        )
        self.matrix_sizes[name] = (matrix.out_features, matrix.in_features)
        for part, tensor in ((PACKED, matrix.packed), (BIAS, matrix.bias), (SCALES, matrix.scales)):
            self.add(f"{name}.{part}", tensor)

    def add_layer(
        self,
        index: int,
        norms: Sequence[Tensor | None],
        *,
        qkv: Sequence[Any],
        output: Any,
        gate_up: Sequence[Any],
        down: Any,
    ) -> None:
        """`norms`: by LAYER_NORMS. The others have a weight and a bias each."""
        for name, norm in zip(LAYER_NORMS, norms, strict=True):
            self.add_norm(f"{index}.{name}", norm)
        self.add_matrix(f"{index}.qkv", qkv)
        self.add_matrix(f"{index}.output", [output])
        self.add_matrix(f"{index}.gate_up", gate_up, interleave=True)
        self.add_matrix(f"{index}.down", [down])


def pack_reduction(kernels: CpuKernels, reduction: FeatureSpec, element_type: ElementType) -> PackedReduction:
    """Of a FeatureReduction. `element_type`: of the model, to which taps and projection are rounded."""
    assert isinstance(reduction, FeatureReduction)
    packing = DecoderPacking(kernels)
    packing.add_norm("reduction.tap_norms", reduction.tap_norms)
    packing.add_norm("reduction.norm", reduction.norm)
    if reduction.projection is not None:
        (dtype,) = (dtype for dtype, element in ELEMENT_TYPES.items() if element is element_type)
        projection = SimpleNamespace(weight=reduction.projection.to(dtype), bias=reduction.bias)
        packing.add_matrix("reduction.projection", [projection])
    spec = {field.name: getattr(reduction, field.name) for field in fields(FeatureSpec)}
    return PackedReduction(**spec, element_type=element_type, blobs=packing.blobs)


def _rotation_tables(rotary: Any, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, by our own arithmetic: each [num_positions, head_dim / 2].

    Raises: ModelError where the model's own differ, at its far positions too, and for angles that are too large.
    """
    frequencies = rotary.inv_freq.float().numpy()  # [head_dim / 2]
    if rotary.rope_type == "default":
        own = inverse_frequencies(rotary.config.rope_parameters["rope_theta"], 2 * len(frequencies))
        if np.allclose(own, frequencies, rtol=1e-6, atol=0.0):  # otherwise the model means something else by it
            frequencies = own
    positions = np.arange(num_positions, dtype=np.float32)
    try:
        tables = [
            cosines_and_sines(positions[start : start + _POSITIONS_AT_ONCE, None] * frequencies)
            for start in range(0, num_positions, _POSITIONS_AT_ONCE)
        ]
    except ValueError as error:
        raise ModelError(f"at {num_positions} positions, {error}: set model.max_model_len lower") from error
    scaling = np.float32(rotary.attention_scaling)
    cosines, sines = (torch.from_numpy(np.concatenate(parts) * scaling) for parts in zip(*tables, strict=True))
    _compare_with_own(rotary, cosines, sines)
    return cosines, sines


def _compare_with_own(rotary: Any, cosines: Tensor, sines: Tensor) -> None:
    """Raises: ModelError."""
    num_positions, half = cosines.shape
    positions = torch.linspace(0, num_positions - 1, _COMPARED_POSITIONS).long()
    for ours, theirs in zip((cosines, sines), rotary(torch.empty(1), positions.unsqueeze(0)), strict=True):
        difference = float((ours[positions] - theirs[0, :, :half]).abs().max())
        allowed = _ALLOWED_ANGLE * max(num_positions, 1)  # angles are rounded to float32
        if not difference <= max(allowed, 1e-5):
            raise ModelError(f"the model rotates otherwise than its frequencies say, by {difference:.2g}")


def _drop_weights(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
