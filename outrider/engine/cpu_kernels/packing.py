"""Packs a decoder's weights for the kernels and collects the results. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.engine.arrays import to_bfloat16
from outrider.engine.cpu_kernels.decoder_options import FAMILIES, DecoderOptions, Family
from outrider.engine.cpu_kernels.decoder_weights import BIAS, PACKED, SCALES, DecoderWeights, MatrixSize
from outrider.engine.cpu_kernels.group_packing import have_one_format
from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.cpu_kernels.matrices import (
    WORD_TYPES,
    Floats,
    PackedMatrix,
    PlainLinear,
    WeightArena,
    to_float32,
)
from outrider.engine.kv_cache.array_plane import Words
from outrider.engine.model_spec import ModelSpec
from outrider.engine.rotation import cosines_and_sines
from outrider.errors import ModelError

MATRICES = {
    "qkv": ("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Names of a layer's matrices in transformers: of the one that has all parts, then of single parts."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OPTIONAL_NORMS = ("query_norm", "key_norm")
_ELEMENT_TYPES = {"float32": ElementType.FLOAT32, "bfloat16": ElementType.BFLOAT16}
_POSITIONS_AT_ONCE = 4096


class DecoderPacking:
    """The weights packed so far, by their names in DecoderWeights."""

    def __init__(self, kernels: CpuKernels, *, quantise: str = "", element_type: ElementType | None = None) -> None:
        """`quantise`: see PackedMatrix. `element_type`: the type to which plain weights are rounded; None: they
        keep theirs.
        """
        self._kernels = kernels
        self._quantise = quantise
        self._element_type = element_type
        self._arena = WeightArena()
        self.blobs: dict[str, np.ndarray] = {}
        self.matrix_sizes: dict[str, MatrixSize] = {}

    def add(self, name: str, values: np.ndarray | None) -> None:
        """Adds values unchanged. Does nothing for None."""
        if values is not None:
            self.blobs[name] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def _typed(self, weight: Any) -> Any:
        """Returns plain weights in the element type, and others unchanged."""
        if self._element_type is None or weight is None or isinstance(weight, GroupedWeight):
            return weight
        return _of_type(weight, self._element_type)

    def add_norm(self, name: str, weight: Words | GroupedWeight, offset: float = 0.0) -> None:
        """Adds a norm's weight plus `offset` as float32."""
        self.add(name, to_float32(self._typed(_plain(weight))) + np.float32(offset))

    def add_matrix(self, name: str, linears: Sequence[PlainLinear], *, interleave: bool = False) -> None:
        """Packs linear layers with the same input into one matrix; see PackedMatrix."""
        linears = [PlainLinear(self._typed(each.weight), self._typed(each.bias)) for each in linears]
        matrix = PackedMatrix(self._kernels, self._arena, linears, interleave=interleave, quantise=self._quantise)
        self.matrix_sizes[name] = MatrixSize(
            matrix.out_features, matrix.in_features, matrix.format.type, matrix.format.unit_size
        )
        for part, values in ((PACKED, matrix.packed), (BIAS, matrix.bias), (SCALES, matrix.scales)):
            self.add(f"{name}.{part}", values)

    def add_layer(
        self,
        index: int,
        tensors: Mapping[str, Words | GroupedWeight],
        prefix: str = "",
        family: Family = FAMILIES["llama"],
    ) -> None:
        """Adds a layer, whose tensors have transformers' names after the prefix. Raises: KeyError if one is missing."""
        for name, place in family.norms.items():
            weight = f"{prefix}{place}.weight"
            if name not in _OPTIONAL_NORMS or weight in tensors:
                self.add_norm(f"{index}.{name}", tensors[weight], family.norm_offset)
        for name, (whole, *parts) in MATRICES.items():
            names = [whole] if f"{prefix}{whole}.weight" in tensors or not parts else parts
            places = [prefix + each for each in names]
            linears = [PlainLinear(tensors[f"{each}.weight"], _bias(tensors, each)) for each in places]
            if name == "qkv" and len(linears) > 1 and not have_one_format([linears[0].weight, linears[-1].weight]):
                self.add_matrix(f"{index}.value", [linears.pop()])
            self.add_matrix(f"{index}.{name}", linears, interleave=name == "gate_up")

    def add_rotation(self, frequencies: Floats, num_positions: int, scaling: float = 1.0, *, number: int = 0) -> None:
        """Adds `scaling` times the cosines and sines of angles, which are positions times `frequencies`.

        `frequencies`: [rotary_dim / 2]. Raises: ModelError if the angles are too large.
        """
        positions = np.arange(num_positions, dtype=np.float32)
        try:
            parts = [
                cosines_and_sines(positions[start : start + _POSITIONS_AT_ONCE, None] * frequencies)
                for start in range(0, num_positions, _POSITIONS_AT_ONCE)
            ]
        except ValueError as error:
            raise ModelError(f"at {num_positions} positions, {error}: set model.max_model_len lower") from error
        for name, of_parts in zip(("cosines", "sines"), zip(*parts, strict=True), strict=True):
            self.add(f"{name}.{number}", np.concatenate(of_parts) * np.float32(scaling))


def pack_weights(
    kernels: CpuKernels,
    options: DecoderOptions,
    spec: ModelSpec,
    tensors: Mapping[str, Words | GroupedWeight],
    *,
    quantise: str = "",
) -> DecoderWeights:
    """Packs a model, reading one tensor at a time.

    Args:
        kernels: the kernels for whose instruction path the weights are packed.
        options: the model's options.
        spec: its sizes; `spec.dtype` is the type of activations, embedding, and weights that are not quantised.
        tensors: by transformers' names. Plain weights of another type are rounded to `spec.dtype`.
        quantise: "int8" or "int4", to which plain linear layers, the output layer included, are rounded; "": not.

    Raises: ModelError if a tensor is missing, or if the angles of a rotation are too large.
    """
    element_type, family = _ELEMENT_TYPES[spec.dtype], options.family
    packing = DecoderPacking(kernels, quantise=quantise, element_type=element_type)
    is_tied = options.is_tied and not (EMBEDDING in tensors and HEAD in tensors)
    embedding = HEAD if is_tied and HEAD in tensors else EMBEDDING
    try:
        for layer in range(spec.num_layers):
            packing.add_layer(layer, tensors, f"model.layers.{layer}.", family)
        packing.add_matrix("head", [PlainLinear(tensors[embedding if is_tied else HEAD], _bias(tensors, "lm_head"))])
        if not is_tied:
            packing.add("embedding", _of_type(_plain(tensors[embedding]), element_type))
        packing.add_norm("final_norm", tensors["model.norm.weight"], family.norm_offset)
    except KeyError as error:
        raise ModelError(f"{options.architecture}: the weights lack {error}: they are incomplete") from error
    for number, rotation in enumerate(options.rotations):
        assert not rotation.is_scaled, "transformers scales frequencies"
        packing.add_rotation(rotation.frequencies, spec.max_model_len, rotation.scale, number=number)
    scale = np.array([options.shape.embedding_scale], np.float32)
    if family.scales_embedding:  # the scale has the type of the embedding, as in training
        scale = to_float32(_of_type(scale, element_type))
    shape = replace(
        options.shape, element_type=element_type, embedding_scale=float(scale[0]), matrix_sizes=packing.matrix_sizes
    )
    return DecoderWeights(shape, packing.blobs)


def _bias(tensors: Mapping[str, Words | GroupedWeight], name: str) -> Words | None:
    bias = tensors.get(f"{name}.bias")
    return None if bias is None else _plain(bias)


def _plain(weight: Words | GroupedWeight) -> Words:
    return weight.dequantise() if isinstance(weight, GroupedWeight) else weight


def _of_type(words: Words, element_type: ElementType) -> Words:
    """Returns the words, rounded to the type if they have another one."""
    if WORD_TYPES[words.dtype] is element_type:
        return words
    return to_bfloat16(words) if element_type is ElementType.BFLOAT16 else to_float32(words)
