"""Native layers that replace those of a transformers model of any architecture.

They are for models that do not have the shape that decoder.py supports. Linear layers are recognised by their class,
norms by what they compute (see outrider.engine.linear).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import Workspace
from outrider.engine.cpu_kernels.matrices import PackedMatrix, WeightArena, rounded_weight
from outrider.engine.cpu_kernels.operators import linear, plain_linear, rms_norm
from outrider.engine.kv_cache.tensor_planes import words_of
from outrider.engine.latent_attention import absorb_projections, latent_layers
from outrider.engine.linear import replace_linear_layers, replace_norms

_MAX_VECTOR_SIZE = 64
"""Maximum number of elements in one of torch's vectors: two AVX-512 registers of bfloat16."""


class NativeLinear(nn.Module):
    """y = x W^T + b, computed by the native kernel, without a plain copy of W."""

    def __init__(self, owner: NativeLayers, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out_features, in_features]; `bias` [out_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._owner = owner
        plain = plain_linear(weight, bias)
        self._matrix = PackedMatrix(owner.kernels, owner.arena, [plain], quantise=owner.quantise)

    def forward(self, rows: Tensor) -> Tensor:
        """Maps […, in_features] to […, out_features], in the input's dtype."""
        output = rows.new_empty((*rows.shape[:-1], self.out_features))
        linear(self._owner.kernels, self._owner.workspace, self._matrix.struct, rows.contiguous(), output)
        return output

    @property
    def weight(self) -> Tensor:
        """A plain copy [out_features, in_features] float32, for the rare code that reads a layer's weight."""
        return torch.stack([torch.from_numpy(self._matrix.row(index)) for index in range(self.out_features)])


class NativeProjections(nn.Module):
    """One linear layer for each head, see MakeProjections. Rounded weights are stored unquantised."""

    def __init__(self, owner: NativeLayers, weights: Tensor) -> None:
        super().__init__()
        self._owner = owner
        self._matrices = [PackedMatrix(owner.kernels, owner.arena, [plain_linear(each, None)]) for each in weights]

    def forward(self, rows: Tensor) -> Tensor:
        """See MakeProjections."""
        rows = rows.contiguous()
        output = rows.new_empty((*rows.shape[:-1], self._matrices[0].out_features))
        for matrix, x, y in zip(self._matrices, rows, output, strict=True):
            linear(self._owner.kernels, self._owner.workspace, matrix.struct, x, y)
        return output


class NativeRMSNorm(nn.Module):
    """RMS norm, computed by the native kernel."""

    def __init__(self, owner: NativeLayers, weight: Tensor, epsilon: float, rounds_once: bool) -> None:  # noqa: FBT001
        super().__init__()
        self._owner = owner
        self._weight = weight.detach().float().contiguous()
        self._epsilon = epsilon
        self._rounds_once = rounds_once

    def forward(self, rows: Tensor) -> Tensor:
        """Normalises […, width] over the last dimension."""
        rows = rows.contiguous()
        output = torch.empty_like(rows)
        rms_norm(self._owner.kernels, rows, self._weight, self._epsilon, output, rounds_once=self._rounds_once)
        return output


class WholeVectorActivation(nn.Module):
    """A torch activation that computes every element in the same way, wherever it is in the batch.

    torch computes elementwise functions in vectors, and the remaining elements with other code, whose exponential
    differs in the last bit. Padding avoids a remainder. Each of torch's threads would have a remainder, so torch must
    use one thread.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        """Activates rows of any shape."""
        flat = rows.reshape(-1)
        padded = nn.functional.pad(flat, (0, -flat.numel() % _MAX_VECTOR_SIZE))
        output: Tensor = self._activation(padded)[: flat.numel()].view(rows.shape)
        return output


class NativeLayers:
    """The state shared by one model's native layers. Not thread-safe: it belongs to the thread that runs the model."""

    def __init__(self, kernels: CpuKernels, *, quantise: str = "") -> None:
        """`quantise`: see PackedMatrix."""
        self.kernels = kernels
        self.quantise = quantise
        self.workspace = Workspace(kernels.library)
        self.arena = WeightArena()

    def replace_in(self, model: nn.Module) -> None:
        """Replaces linear layers, latent projections and plain norms, and makes torch's activations independent of the
        batch.
        """
        from transformers.activations import ACT2CLS  # takes seconds; a node with packed weights avoids it

        for attention in latent_layers(model) if self.quantise else ():
            weight = attention.kv_b_proj.weight
            rounded = rounded_weight(words_of(weight.detach()), self.quantise)
            weight.data = torch.from_numpy(rounded).to(weight.dtype)
        absorb_projections(model, partial(NativeProjections, self))
        replace_linear_layers(model, partial(NativeLinear, self))
        replace_norms(model, partial(NativeRMSNorm, self))
        kinds: tuple[Any, ...] = tuple(ACT2CLS.values())
        activations = tuple(kind[0] if isinstance(kind, tuple) else kind for kind in kinds)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, activations) and not isinstance(module, WholeVectorActivation):
                    setattr(module, name, WholeVectorActivation(child))
