"""Layers of a transformers model replaced by native ones, whatever the architecture.

For models that are not in the shape that decoder.py knows. Linear layers are known by
their class, norms by what they compute (see outrider.engine.linear).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import Workspace
from outrider.engine.cpu_kernels.matrices import PackedMatrix, WeightArena
from outrider.engine.cpu_kernels.operators import linear, plain_linear, rms_norm
from outrider.engine.linear import replace_linear_layers, replace_norms

_LARGEST_VECTOR = 64
"""Elements that torch takes at once: two AVX-512 registers of bfloat16."""


class NativeLinear(nn.Module):
    """y = x W^T + b by the packed kernel. Holds no plain copy of W."""

    def __init__(self, owner: NativeLayers, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out_features, in_features]; `bias` [out_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._owner = owner
        plain = plain_linear(weight, bias)
        self._matrix = PackedMatrix(owner.kernels, owner.arena, [plain], quantise=owner.quantise)

    def forward(self, rows: Tensor) -> Tensor:
        """[…, in_features] → […, out_features], of the input's dtype."""
        output = rows.new_empty((*rows.shape[:-1], self.out_features))
        linear(self._owner.kernels, self._owner.workspace, self._matrix.struct, rows.contiguous(), output)
        return output

    @property
    def weight(self) -> Tensor:
        """A plain copy, [out_features, in_features] float32, for the rare code that asks a layer for its weight."""
        return torch.stack([torch.from_numpy(self._matrix.row(index)) for index in range(self.out_features)])


class NativeRMSNorm(nn.Module):
    """Root mean square normalisation by the native kernel."""

    def __init__(self, owner: NativeLayers, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self._owner = owner
        self._weight = weight.detach().float().contiguous()
        self._epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        """[…, width] → the same."""
        rows = rows.contiguous()
        output = torch.empty_like(rows)
        rms_norm(self._owner.kernels, rows, self._weight, self._epsilon, output)
        return output


class WholeVectorActivation(nn.Module):
    """A torch activation whose every element goes the same way, wherever in the batch it stands.

    torch computes elementwise functions in vectors, and what is left over at the end by
    other code, whose exponential differs in the last bit. Padded, nothing is left over; what
    a split over threads leaves over at the seams is not seen here: torch must run one.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        """Any shape → the same."""
        flat = rows.reshape(-1)
        padded = nn.functional.pad(flat, (0, -flat.numel() % _LARGEST_VECTOR))
        output: Tensor = self._activation(padded)[: flat.numel()].view(rows.shape)
        return output


class NativeLayers:
    """What the native layers of one model share. Not thread-safe: they belong to the thread that runs the model."""

    def __init__(self, kernels: CpuKernels, *, quantise: bool = False) -> None:
        """`quantise` computes linear layers in int8 (lossy)."""
        self.kernels = kernels
        self.quantise = quantise
        self.workspace = Workspace(kernels.library)
        self.arena = WeightArena()

    def replace_in(self, model: nn.Module) -> None:
        """Linear layers and plain norms; what torch still computes of activations no longer depends on the batch."""
        from transformers.activations import ACT2CLS  # takes seconds, which a node with packed weights does not have

        replace_linear_layers(model, partial(NativeLinear, self))
        replace_norms(model, partial(NativeRMSNorm, self))
        kinds: tuple[Any, ...] = tuple(ACT2CLS.values())
        activations = tuple(kind[0] if isinstance(kind, tuple) else kind for kind in kinds)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, activations) and not isinstance(module, WholeVectorActivation):
                    setattr(module, name, WholeVectorActivation(child))
