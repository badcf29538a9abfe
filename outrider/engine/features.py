"""A head's reduction of the target's hidden states to features, with torch tensors."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from outrider.engine.cpu_kernels.decoder_weights import PackedReduction
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.cpu_kernels.operators import ELEMENT_TYPES, plain_linear
from outrider.engine.cpu_kernels.packing import DecoderPacking
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.kv_cache.tensor_planes import words_of

_TENSORS = ("tap_norms", "norm", "projection", "bias")


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureReduction(FeatureSpec):
    """A function from the target's hidden states to a head's features. Its weights come from the head's checkpoint, but
    a node with the target evaluates the function.

    taps [num_rows, num_taps * hidden_size] → tap norms or norm, if present → projection → [num_rows, width]. Width and
    fingerprint are computed from the tensors.
    """

    tap_norms: Tensor | None = None  # [num_taps, hidden_size]: RMS-normalises each tap separately
    norm: Tensor | None = None  # [num_taps * hidden_size]: RMS-normalises all taps as one vector
    projection: Tensor | None = None  # [width, num_taps * hidden_size]; None: the feature is a single tap
    bias: Tensor | None = None  # [width]

    def __post_init__(self) -> None:
        tensors = {name: tensor for name in _TENSORS if (tensor := getattr(self, name)) is not None}
        values = {name: tensor.detach().to("cpu", torch.float32).numpy() for name, tensor in tensors.items()}
        width = len(self.taps) * self.hidden_size if self.projection is None else self.projection.shape[0]
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "fingerprint", self.fingerprint_of(values))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> FeatureReduction:
        """Returns a copy with its tensors moved. The copy keeps the fingerprint of the checkpoint's values."""
        moved = copy(self)
        for name in _TENSORS:
            if (tensor := getattr(self, name)) is not None:
                object.__setattr__(moved, name, tensor.to(device, dtype))
        return moved

    def pack(self, kernels: CpuKernels, element_type: ElementType) -> PackedReduction:
        """Packs it for native kernels. `element_type`: the model's type, to which taps and projection are rounded."""
        packing = DecoderPacking(kernels)
        for name in ("tap_norms", "norm"):
            if (norm := getattr(self, name)) is not None:
                packing.add_norm(f"reduction.{name}", words_of(norm.float()))
        if self.projection is not None:
            (dtype,) = (dtype for dtype, element in ELEMENT_TYPES.items() if element is element_type)
            packing.add_matrix("reduction.projection", [plain_linear(self.projection.to(dtype), self.bias)])
        spec = {field.name: getattr(self, field.name) for field in fields(FeatureSpec)}
        return PackedReduction(**spec, element_type=element_type, blobs=packing.blobs)

    def __call__(self, taps: Tensor) -> Tensor:
        """Reduces taps with torch: [num_rows, num_taps * hidden_size] → [num_rows, width]."""
        if self.tap_norms is not None:
            split = taps.view(len(taps), len(self.taps), self.hidden_size)
            taps = rms_norm(split, self.tap_norms, self.epsilon).flatten(1)
        if self.norm is not None:
            taps = rms_norm(taps, self.norm, self.epsilon)
        if self.projection is None:
            return taps
        return torch.nn.functional.linear(taps, self.projection, self.bias)


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Applies an RMS norm over the last dimension in float32. The weight is broadcast; the result has the shape and
    dtype of `rows`.
    """
    values = rows.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (weight.float() * values).to(rows.dtype)
