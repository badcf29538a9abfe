"""Weights of a decoder, and of a head's reduction, in the kernels' format: sizes, and blobs by name. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from outrider.engine.cpu_kernels.interface import address_of, structures
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.rotation import Turn

PACKED, BIAS, SCALES = "packed", "bias", "scales"
"""The last parts of blobs' names, which follow the name of a matrix."""
LAYER_NORMS = ("input_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm", "query_norm", "key_norm")
LAYER_MATRICES = ("qkv", "value", "output", "gate_up", "down")


class MatrixSize(NamedTuple):
    """Size and format of a packed matrix."""

    out_features: int
    in_features: int
    type: int  # an ElementType
    unit_size: int = 0  # see PackedFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes and constants of a decoder. For those with defaults, see OutriderDecoder in source/api.h."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # the first dimensions of each head, which are rotated
    scaling: float  # multiplies query · key
    epsilon: float  # added to the norms' mean square
    element_type: ElementType  # type of activations, embedding, and weights that are not int8
    sliding_windows: tuple[int, ...]  # by layer; 0: none
    rotations: tuple[int, ...]  # by layer: the number of its rotation in the names of blobs; -1: none
    matrix_sizes: Mapping[str, MatrixSize]  # by name
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    logits_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    is_gelu: bool = False
    rounds_norms_once: bool = False
    norms_all_heads: bool = False
    begins_normalised: bool = False  # for drafter heads
    keeps_normalised: bool = False  # same

    @classmethod
    def of_json(cls, shape: Mapping[str, Any]) -> DecoderShape:
        """Restores a shape from the JSON of its `asdict`."""
        sizes = {name: MatrixSize(*size) for name, size in shape["matrix_sizes"].items()}
        by_layer = {name: tuple(shape[name]) for name in ("sliding_windows", "rotations")}
        return cls(**{**shape, **by_layer, "element_type": ElementType(shape["element_type"]), "matrix_sizes": sizes})


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A model packed by `pack_weights`, in this process's memory or mapped from a file.

    Names: "cosines.0" and "sines.0" of the first rotation, "embedding" (unless the output layer shares it),
    "final_norm", "head.packed"; for layer 3, "3.input_norm" and its other LAYER_NORMS, and for its LAYER_MATRICES
    "3.qkv.packed", "3.qkv.bias", "3.qkv.scales"; for a drafter head, "feature_norm" and "target_ids". Weights that a
    model does not have are absent.
    """

    shape: DecoderShape
    blobs: Mapping[str, np.ndarray]  # each [num_bytes] uint8, aligned to 64 bytes or more

    def address(self, name: str) -> int | None:
        """Returns a blob's address, or None if no blob has that name."""
        return address_of(self.blobs.get(name))

    def matrix(self, name: str) -> Structure:
        """Returns an OutriderMatrix, which points to blobs but does not keep them alive.

        Its `packed` is null if the decoder does not have the matrix.
        """
        return _matrix(self.blobs, name, self.shape.matrix_sizes.get(name, MatrixSize(0, 0, ElementType.FLOAT32)))

    def turn(self, layer: int, num_positions: int) -> Turn | None:
        """Returns the rotation of a layer's keys by `num_positions`; None if it does not rotate keys."""
        number, half = self.shape.rotations[layer], self.shape.rotary_dim // 2
        if number < 0:
            return None
        cosines, sines = (self.blobs[f"{name}.{number}"].view(np.float32) for name in ("cosines", "sines"))
        place = slice(num_positions * half, (num_positions + 1) * half)
        scale = cosines[0]  # of both, as an angle of 0 has the cosine 1
        return Turn(cosines[place] / scale, sines[place] / scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedReduction(FeatureSpec):
    """A head's reduction of hidden states to features, packed by `FeatureReduction.pack`.

    Names: "reduction.tap_norms" and "reduction.norm" in float32, "reduction.projection.packed",
    "reduction.projection.bias". Tensors that the reduction does not have are absent; `blobs` may include others.
    """

    element_type: ElementType  # type of hidden states, features and projection
    blobs: Mapping[str, np.ndarray]  # as in DecoderWeights

    @property
    def projection(self) -> Structure:
        """An OutriderMatrix, which does not keep its blobs alive; `packed` is null if there is no projection."""
        size = MatrixSize(self.width, len(self.taps) * self.hidden_size, self.element_type)
        return _matrix(self.blobs, "reduction.projection", size)

    def struct(self, plane: np.ndarray) -> Structure:
        """Returns an OutriderFeatures for decoder steps that write to `plane` [num_blocks, block_size, 1, width].

        It points to the plane and to memory of this reduction, but keeps neither alive.
        """
        return structures.OutriderFeatures(
            len(self.taps),
            address_of(self._tap_numbers),
            self.takes_final_norm,
            self.epsilon,
            *(address_of(self.blobs.get(f"reduction.{name}")) for name in ("tap_norms", "norm")),
            self.projection,
            address_of(plane),
        )

    @cached_property
    def _tap_numbers(self) -> np.ndarray:
        return np.asarray(self.taps, dtype=np.int64)


def _matrix(blobs: Mapping[str, np.ndarray], name: str, size: MatrixSize) -> Structure:
    return structures.OutriderMatrix(
        *(address_of(blobs.get(f"{name}.{part}")) for part in (PACKED, BIAS, SCALES)), *size
    )
