"""A head's reduction of hidden states to features, as the kernels read it. Torch-free."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from outrider.engine.cpu_kernels.library import ElementType, FeaturesStruct, MatrixStruct
from outrider.engine.feature_spec import FeatureSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedReduction(FeatureSpec):
    """A reduction whose weights are in this process's memory or mapped from a file.

    Names: "tap_norms" and "norm" in float32, "projection.packed", "projection.bias". What it has not is not there.
    """

    element_type: ElementType  # of hidden states, features and projection
    blobs: Mapping[str, np.ndarray]  # each [num_bytes] uint8, aligned to 64 bytes or more

    @property
    def projection(self) -> MatrixStruct:
        """Points to blobs, which it does not keep alive; empty without one."""
        packed = self._address("projection.packed")
        if packed is None:
            return MatrixStruct()
        num_in = len(self.taps) * self.hidden_size
        return MatrixStruct(packed, self._address("projection.bias"), None, self.width, num_in, self.element_type)

    def struct(self, plane: np.ndarray) -> FeaturesStruct:
        """For decoder steps that write to `plane` [num_blocks, block_size, 1, width]; keeps nothing alive."""
        return FeaturesStruct(
            len(self.taps),
            (ctypes.c_int64 * len(self.taps))(*self.taps),
            self.takes_final_norm,
            self.epsilon,
            self._address("tap_norms"),
            self._address("norm"),
            self.projection,
            plane.ctypes.data,
        )

    def _address(self, name: str) -> int | None:
        blob = self.blobs.get(name)
        return None if blob is None else int(blob.ctypes.data)
