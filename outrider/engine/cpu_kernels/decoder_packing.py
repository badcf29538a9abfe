"""Packs a loaded transformers model, or a head, into the weights of a native decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.cpu_kernels.decoder_weights import MODEL_TYPES, DecoderShape, DecoderWeights, PackedReduction
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.cpu_kernels.matrices import Floats
from outrider.engine.cpu_kernels.operators import ELEMENT_TYPES, plain_linear
from outrider.engine.cpu_kernels.packing import WIDTH_STEP, DecoderPacking
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.features import FeatureReduction
from outrider.engine.kv_cache.tensor_planes import words_of
from outrider.engine.model_spec import ModelSpec
from outrider.engine.rotation import inverse_frequencies
from outrider.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COMPARED_POSITIONS = 64
_ALLOWED_ANGLE = 2.5e-7
"""Allowed angle difference per position: two units in the last place of a frequency."""


def why_not_native(model: PreTrainedModel, spec: ModelSpec, layers: Sequence[AttentionOptions]) -> str:
    """Returns why a model cannot run as one native call although the kernels can compute its layers, or ""."""
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
    if unsupported := [name for name, module in base.layers.named_modules() if _is_unsupported_linear(module)]:
        return f"its {unsupported[0]} is not a plain nn.Linear"
    cosines, _ = base.rotary_emb(torch.empty(1), torch.zeros((1, 1), dtype=torch.int64))
    if cosines.shape[-1] != spec.head_dim:
        return f"it rotates {cosines.shape[-1]} of {spec.head_dim} dimensions"
    return ""


def _is_unsupported_linear(module: nn.Module) -> bool:
    """Returns whether the module is a linear layer with unsupported weights, such as one that a quantizer made."""
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
    """Packs the weights of `model`, which cannot compute afterwards.

    Each weight is packed, then dropped, so that the model is in memory only once.

    Args:
        kernels: the kernels for whose instruction path the weights are packed.
        model: on the CPU; `why_not_native` must be empty for it.
        spec: sizes of the model.
        layers: each layer's attention options.
        quantise: whether to store linear layers, including the output layer, as int8 (lossy).
    """
    packing = DecoderPacking(kernels, quantise=quantise)
    base: Any = model.base_model
    head: Any = model.get_output_embeddings()
    is_tied = head.weight.data_ptr() == base.embed_tokens.weight.data_ptr()
    dtype = head.weight.dtype
    for index, layer in enumerate(base.layers):
        packing.add_layer(index, {name: words_of(each) for name, each in layer.named_parameters()})
        _drop_weights(layer)
    rotary = base.rotary_emb
    tables = packing.add_rotation(_frequencies(rotary), spec.max_model_len, rotary.attention_scaling)
    _compare_with_own(rotary, *tables)
    packing.add_matrix("head", [plain_linear(head.weight, head.bias)])
    if not is_tied:
        packing.add("embedding", words_of(base.embed_tokens.weight).copy())
    packing.add_norm("final_norm", words_of(base.norm.weight))
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


def pack_reduction(kernels: CpuKernels, reduction: FeatureSpec, element_type: ElementType) -> PackedReduction:
    """Packs a FeatureReduction. `element_type`: the model's type, to which taps and projection are rounded."""
    assert isinstance(reduction, FeatureReduction)
    packing = DecoderPacking(kernels)
    for name in ("tap_norms", "norm"):
        if (norm := getattr(reduction, name)) is not None:
            packing.add_norm(f"reduction.{name}", words_of(norm.float()))
    if reduction.projection is not None:
        (dtype,) = (dtype for dtype, element in ELEMENT_TYPES.items() if element is element_type)
        packing.add_matrix("reduction.projection", [plain_linear(reduction.projection.to(dtype), reduction.bias)])
    spec = {field.name: getattr(reduction, field.name) for field in fields(FeatureSpec)}
    return PackedReduction(**spec, element_type=element_type, blobs=packing.blobs)


def _frequencies(rotary: Any) -> Floats:
    """Returns the rotation's frequencies [head_dim / 2], computed by our own arithmetic if they are the usual ones."""
    frequencies: Floats = rotary.inv_freq.float().numpy()
    if rotary.rope_type == "default":
        own = inverse_frequencies(rotary.config.rope_parameters["rope_theta"], 2 * len(frequencies))
        if np.allclose(own, frequencies, rtol=1e-6, atol=0.0):  # otherwise the model defines them differently
            return own
    return frequencies


def _compare_with_own(rotary: Any, cosines: Floats, sines: Floats) -> None:
    """Compares cosines and sines [num_positions, head_dim / 2] with the model's own, at positions up to the last one.

    Raises: ModelError if they differ.
    """
    num_positions, half = cosines.shape
    positions = torch.linspace(0, num_positions - 1, _COMPARED_POSITIONS).long()
    for ours, theirs in zip((cosines, sines), rotary(torch.empty(1), positions.unsqueeze(0)), strict=True):
        difference = float(np.abs(ours[positions.numpy()] - theirs[0, :, :half].numpy()).max())
        allowed = _ALLOWED_ANGLE * max(num_positions, 1)  # angles are rounded to float32
        if not difference <= max(allowed, 1e-5):
            raise ModelError(f"the model's rotations differ from those by its frequencies by {difference:.2g}")


def _drop_weights(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
