"""From a head's reduction in tensors to that of the kernels, by which rows have the same bits in any batch."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType, Workspace
from outrider.engine.cpu_kernels.matrices import ELEMENT_TYPES, PackedMatrix, WeightArena
from outrider.engine.cpu_kernels.operators import linear, rms_norm
from outrider.engine.cpu_kernels.reduction import PackedReduction
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.features import FeatureReduction


def pack_reduction(kernels: CpuKernels, reduction: FeatureSpec, element_type: ElementType) -> PackedReduction:
    """Of a FeatureReduction. `element_type`: of the model, to which taps and projection are rounded."""
    assert isinstance(reduction, FeatureReduction)
    tensors = {"tap_norms": reduction.tap_norms, "norm": reduction.norm}
    if reduction.projection is not None:
        (dtype,) = (dtype for dtype, element in ELEMENT_TYPES.items() if element is element_type)
        weight = reduction.projection.to("cpu", dtype)
        matrix = PackedMatrix(kernels, WeightArena(), [weight], [reduction.bias])
        tensors |= {"projection.packed": matrix.packed, "projection.bias": matrix.bias}
    blobs = {name: _bytes(tensor) for name, tensor in tensors.items() if tensor is not None}
    spec = {field.name: getattr(reduction, field.name) for field in fields(FeatureSpec)}
    return PackedReduction(**spec, element_type=element_type, blobs=blobs)


def reduce(kernels: CpuKernels, reduction: PackedReduction, taps: Tensor, workspace: Workspace) -> Tensor:
    """As FeatureReduction's call: [num_rows, num_taps * hidden_size] → [num_rows, width]."""
    taps, size = taps.contiguous(), reduction.hidden_size
    if (blob := reduction.blobs.get("tap_norms")) is not None:
        parts = [part.contiguous() for part in taps.split(size, dim=1)]
        for part, weight in zip(parts, _norms(blob).view(-1, size), strict=True):
            rms_norm(kernels, part, weight, reduction.epsilon, part)
        taps = torch.cat(parts, dim=1)
    if (blob := reduction.blobs.get("norm")) is not None:
        rms_norm(kernels, taps, _norms(blob), reduction.epsilon, taps)
    if not reduction.projection.packed:
        return taps
    features = taps.new_empty((len(taps), reduction.width))
    linear(kernels, workspace, reduction.projection, taps, features)
    return features


def _bytes(tensor: Tensor) -> np.ndarray:
    """A matrix's as they are, a norm's in float32."""
    plain = tensor if tensor.dtype == torch.uint8 else tensor.to("cpu", torch.float32)
    array: np.ndarray = plain.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def _norms(blob: np.ndarray) -> Tensor:
    return torch.from_numpy(blob).view(torch.float32)
