"""Weights in small integers with one scale for each group of inputs, as quantised checkpoints store them. Torch-free.

Every supported checkpoint format converts to a `GroupedWeight` without loss. `PackedMatrix` packs it for the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class GroupFactors:
    """One factor for each output feature and group: units × steps.

    GGUF's K formats store them in two levels, each unit with several steps. Others have no steps. Keeping both levels
    makes the factors exact and small.
    """

    units: npt.NDArray[np.float16]  # [out_features, in_features / inputs of one unit]
    steps: npt.NDArray[np.int8] | None = None  # [out_features, in_features / group_size], -128 to 127; None: all 1

    def values(self, num_groups: int) -> npt.NDArray[np.float32]:
        """Returns the factors, exactly: [out_features, num_groups]."""
        units = np.repeat(self.units.astype(np.float32), num_groups // self.units.shape[1], axis=1)
        return units if self.steps is None else units * self.steps


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """W [out_features, in_features] in groups of consecutive inputs: W = scale · code - minimum.

    in_features must be a multiple of group_size. The codes fit in 4 bits if all are in -8 … 7 without minima, or in
    0 … 15 with them.
    """

    codes: npt.NDArray[np.int8]  # [out_features, in_features]
    group_size: int  # 16, 32, 64 or 128
    scales: GroupFactors
    minima: GroupFactors | None = None  # None: all 0

    @property
    def shape(self) -> tuple[int, int]:
        out_features, in_features = self.codes.shape
        return out_features, in_features

    @property
    def num_groups(self) -> int:
        """Number of groups of one output feature."""
        return self.codes.shape[1] // self.group_size

    def dequantise(self) -> npt.NDArray[np.float32]:
        """Returns W in float32: [out_features, in_features]. Each step is rounded to float32."""
        grouped = self.codes.reshape(len(self.codes), self.num_groups, self.group_size).astype(np.float32)
        grouped *= self.scales.values(self.num_groups)[:, :, None]
        if self.minima is not None:
            grouped -= self.minima.values(self.num_groups)[:, :, None]
        return grouped.reshape(self.codes.shape)
