"""Packs a loaded transformers model, or a head, into the weights of a native decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.cpu_kernels.decoder_options import DecoderOptions
from outrider.engine.cpu_kernels.decoder_weights import DecoderWeights, PackedReduction
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.cpu_kernels.operators import ELEMENT_TYPES, plain_linear
from outrider.engine.cpu_kernels.packing import DecoderPacking, pack_weights
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.features import FeatureReduction
from outrider.engine.kv_cache.array_plane import Words
from outrider.engine.kv_cache.tensor_planes import words_of
from outrider.engine.model_spec import ModelSpec
from outrider.engine.scaled_rotations import Rotation
from outrider.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COMPARED_POSITIONS = 64
_ALLOWED_ANGLE = 2.5e-7
"""Allowed angle difference per position: two units in the last place of a frequency."""


def why_not_native(model: PreTrainedModel, options: DecoderOptions | str, layers: Sequence[AttentionOptions]) -> str:
    """Returns why a model cannot run as one native call although the kernels can compute its layers, or "".

    `options`: the result of `decoder_options` for its configuration.
    """
    if isinstance(options, str):
        return options
    shape = options.shape
    for index, (layer, window) in enumerate(zip(layers, shape.sliding_windows, strict=True)):
        found = (layer.scaling, layer.sliding_window or 0, layer.softcap or 0.0)
        if found != (shape.scaling, window, shape.attention_softcap):
            return f"layer {index} attends with (scale, window, soft cap) {found}, unlike its family"
    base: Any = model.base_model
    if unsupported := [name for name, module in base.layers.named_modules() if _is_unsupported_linear(module)]:
        return f"its {unsupported[0]} is not a plain nn.Linear"
    return ""


def _is_unsupported_linear(module: nn.Module) -> bool:
    """Returns whether the module is a linear layer with unsupported weights, such as one that a quantizer made."""
    if type(module) is nn.Linear:
        return module.weight.dtype not in ELEMENT_TYPES
    return isinstance(module, nn.Linear) or hasattr(module, "in_features")


def pack_decoder(
    kernels: CpuKernels, model: PreTrainedModel, options: DecoderOptions, spec: ModelSpec, *, quantise: str = ""
) -> DecoderWeights:
    """Packs the weights of `model`, which cannot compute afterwards.

    Each weight is packed, then dropped, so that the model is in memory only once.

    Args:
        kernels: the kernels for whose instruction path the weights are packed.
        model: on the CPU; `why_not_native` must be empty for it.
        options: the model's options.
        spec: sizes of the model.
        quantise: see pack_weights.
    """
    base: Any = model.base_model
    compare_rotations(base.rotary_emb, options, spec.max_model_len)
    head: Any = model.get_output_embeddings()
    is_tied = head.weight.data_ptr() == base.embed_tokens.weight.data_ptr()
    rotations = tuple(_with_own_frequencies(rotation, base.rotary_emb) for rotation in options.rotations)
    options = replace(options, is_tied=is_tied, rotations=rotations)
    return pack_weights(kernels, options, spec, _Parameters(model), quantise=quantise)


class _Parameters(Mapping[str, Words]):
    """A model's parameters by name. A layer's are dropped when they are read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def __getitem__(self, name: str) -> Words:
        parameter = self._parameters[name]
        words = words_of(parameter)
        if ".layers." in name:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        return words

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


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


def _with_own_frequencies(rotation: Rotation, rotary: Any) -> Rotation:
    """Returns the rotation with the model's own frequencies if they are scaled.

    torch's powers and ours may differ in the last place. Scaled frequencies have always been torch's here, so packed
    models keep their bits.
    """
    layers = rotation.layer_type
    if (rotary.rope_type[layers] if layers else rotary.rope_type) == "default":
        return rotation
    own = getattr(rotary, f"{layers}_inv_freq" if layers else "inv_freq")
    return replace(rotation, frequencies=own.float().numpy())


def compare_rotations(rotary: Any, options: DecoderOptions, num_positions: int) -> None:
    """Compares rotations with those of transformers' module, at positions up to the last one.

    Raises: ModelError if they differ.
    """
    positions = torch.linspace(0, num_positions - 1, _COMPARED_POSITIONS).long()
    for rotation in options.rotations:
        types = [rotation.layer_type] if rotation.layer_type else []
        theirs = rotary(torch.empty(1), positions.unsqueeze(0), *types)
        angles = positions.numpy().astype(np.float32)[:, None] * rotation.frequencies
        for ours, own in zip((np.cos(angles), np.sin(angles)), theirs, strict=True):
            half = rotation.frequencies.size
            difference = float(np.abs(ours * np.float32(rotation.scale) - own[0, :, :half].numpy()).max())
            allowed = _ALLOWED_ANGLE * max(num_positions, 1)  # angles are rounded to float32
            if not (own.shape[-1] == 2 * half and difference <= max(allowed, 1e-5)):
                raise ModelError(f"the model's rotations differ from those of its configuration by {difference:.2g}")
