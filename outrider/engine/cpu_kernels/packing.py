"""Packs a decoder's plain weights for the kernels and collects the results. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from outrider.engine.cpu_kernels.decoder_weights import BIAS, LAYER_NORMS, PACKED, SCALES, MatrixSize
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.matrices import Floats, PackedMatrix, PlainLinear, WeightArena, to_float32
from outrider.engine.kv_cache.array_plane import Words
from outrider.engine.rotation import cosines_and_sines
from outrider.errors import ModelError

WIDTH_STEP = 32
"""Widths of activations must be multiples of this number, so that rows need no padding on any instruction path."""
HEAD_DIM_STEP = 16
"""The dimension of a head must be a multiple of this number."""

_POSITIONS_AT_ONCE = 4096


class DecoderPacking:
    """The weights packed so far, by their names in DecoderWeights."""

    def __init__(self, kernels: CpuKernels, *, quantise: bool = False) -> None:
        self._kernels = kernels
        self._quantise = quantise
        self._arena = WeightArena()
        self.blobs: dict[str, np.ndarray] = {}
        self.matrix_sizes: dict[str, MatrixSize] = {}

    def add(self, name: str, values: np.ndarray | None) -> None:
        """Adds values unchanged. Does nothing for None."""
        if values is not None:
            self.blobs[name] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def add_norm(self, name: str, weight: Words | None) -> None:
        """Adds a norm's weight as float32."""
        self.add(name, None if weight is None else to_float32(weight))

    def add_matrix(self, name: str, linears: Sequence[PlainLinear], *, interleave: bool = False) -> None:
        """Packs linear layers with the same input into one matrix; see PackedMatrix."""
        matrix = PackedMatrix(self._kernels, self._arena, linears, interleave=interleave, quantise=self._quantise)
        self.matrix_sizes[name] = MatrixSize(
            matrix.out_features, matrix.in_features, matrix.format.type, matrix.format.unit_size
        )
        for part, values in ((PACKED, matrix.packed), (BIAS, matrix.bias), (SCALES, matrix.scales)):
            self.add(f"{name}.{part}", values)

    def add_layer(self, index: int, tensors: Mapping[str, Words], prefix: str = "") -> None:
        """Adds a layer of a model in the shape of Llama; its tensors have transformers' names after the prefix."""

        def add_matrix(name: str, *parts: str, interleave: bool = False) -> None:
            names = [f"{prefix}{part}_proj" for part in parts]
            linears = [PlainLinear(tensors[f"{each}.weight"], tensors.get(f"{each}.bias")) for each in names]
            self.add_matrix(f"{index}.{name}", linears, interleave=interleave)

        norms = [tensors[f"{prefix}{name}_layernorm.weight"] for name in ("input", "post_attention")]
        by_head = [tensors.get(f"{prefix}self_attn.{name}_norm.weight") for name in "qk"]
        for name, norm in zip(LAYER_NORMS, [*norms, *by_head], strict=True):
            self.add_norm(f"{index}.{name}", norm)
        add_matrix("qkv", *(f"self_attn.{name}" for name in "qkv"))
        add_matrix("output", "self_attn.o")
        add_matrix("gate_up", "mlp.gate", "mlp.up", interleave=True)
        add_matrix("down", "mlp.down")

    def add_rotation(self, frequencies: Floats, num_positions: int, scaling: float = 1.0) -> tuple[Floats, Floats]:
        """Adds `scaling` times the cosines and sines of angles, which are positions times `frequencies` [head_dim / 2].

        Returns both, each [num_positions, head_dim / 2]. Raises: ModelError if the angles are too large.
        """
        positions = np.arange(num_positions, dtype=np.float32)
        try:
            parts = [
                cosines_and_sines(positions[start : start + _POSITIONS_AT_ONCE, None] * frequencies)
                for start in range(0, num_positions, _POSITIONS_AT_ONCE)
            ]
        except ValueError as error:
            raise ModelError(f"at {num_positions} positions, {error}: set model.max_model_len lower") from error
        cosines, sines = (np.concatenate(part) * np.float32(scaling) for part in zip(*parts, strict=True))
        self.add("cosines", cosines)
        self.add("sines", sines)
        return cosines, sines
