"""A head's reduction of hidden states to features, by the kernels: rows have the same bits in any batch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import FeaturesStruct, MatrixStruct, Workspace
from outrider.engine.cpu_kernels.matrices import PackedMatrix, WeightArena
from outrider.engine.cpu_kernels.operators import linear, rms_norm
from outrider.engine.features import FeatureReduction


class NativeReduction:
    """A FeatureReduction in the layout of the kernels."""

    def __init__(self, kernels: CpuKernels, reduction: FeatureReduction, dtype: torch.dtype) -> None:
        """`dtype`: of the model, to which taps and projection are rounded."""
        self._kernels = kernels
        self._reduction = reduction
        self._tap_norms = _float32(reduction.tap_norms)
        self._norm = _float32(reduction.norm)
        self._projection: PackedMatrix | None = None
        if reduction.projection is not None:
            weight = reduction.projection.to("cpu", dtype)
            self._projection = PackedMatrix(kernels, WeightArena(), [weight], [reduction.bias])

    def struct(self, plane: Tensor) -> FeaturesStruct:
        """For decoder steps that write to `plane` [num_blocks, block_size, 1, width]; keeps nothing alive."""
        taps = self._reduction.taps
        return FeaturesStruct(
            len(taps),
            (ctypes.c_int64 * len(taps))(*taps),
            self._reduction.takes_final_norm,
            self._reduction.epsilon,
            None if self._tap_norms is None else self._tap_norms.data_ptr(),
            None if self._norm is None else self._norm.data_ptr(),
            MatrixStruct() if self._projection is None else self._projection.struct,
            plane.data_ptr(),
        )

    def reduce(self, taps: Tensor, workspace: Workspace) -> Tensor:
        """As FeatureReduction's call: [num_rows, num_taps * hidden_size] → [num_rows, width]."""
        reduction = self._reduction
        taps = taps.contiguous()
        if self._tap_norms is not None:
            parts = [part.contiguous() for part in taps.split(reduction.hidden_size, dim=1)]
            for part, weight in zip(parts, self._tap_norms, strict=True):
                rms_norm(self._kernels, part, weight, reduction.epsilon, part)
            taps = torch.cat(parts, dim=1)
        if self._norm is not None:
            rms_norm(self._kernels, taps, self._norm, reduction.epsilon, taps)
        if self._projection is None:
            return taps
        features = taps.new_empty((len(taps), self._projection.out_features))
        linear(self._kernels, workspace, self._projection.struct, taps, features)
        return features


def _float32(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.to("cpu", torch.float32).contiguous()
