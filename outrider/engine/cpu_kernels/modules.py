"""Native layers that replace those of a transformers model of any architecture.

They are for models that do not have the shape that decoder.py supports. Linear layers are recognised by their class,
norms by what they compute (see outrider.engine.linear), experts by both (see outrider.engine.experts).
"""

from __future__ import annotations

from ctypes import addressof
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.cpu_kernels.delta_rule import NativeDeltaRule
from outrider.engine.cpu_kernels.interface import structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import Workspace
from outrider.engine.cpu_kernels.matrices import PackedMatrix, WeightArena, rounded_weight
from outrider.engine.cpu_kernels.operators import experts, linear, plain_linear, rms_norm
from outrider.engine.divided_experts import ExpertDivision
from outrider.engine.experts import Gate, GateLogits, gate_of, in_whole_vectors, linears_of, replace_experts
from outrider.engine.kv_cache.tensor_planes import words_of
from outrider.engine.latent_attention import absorb_projections, latent_layers
from outrider.engine.linear import replace_linear_layers, replace_norms
from outrider.engine.linear_attention import delta_layers


class NativeLinear(nn.Module):
    """y = x W^T + b, computed by the native kernel, without a plain copy of W."""

    def __init__(
        self, owner: NativeLayers, weight: Tensor, bias: Tensor | None, *, quantise: str | None = None
    ) -> None:
        """`weight` [out_features, in_features]; `bias` [out_features]; `quantise`: by default that of the owner."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._owner = owner
        plain = plain_linear(weight, bias)
        quantise = owner.quantise if quantise is None else quantise
        self._matrix = PackedMatrix(owner.kernels, owner.arena, [plain], quantise=quantise)

    def forward(self, rows: Tensor) -> Tensor:
        """Maps […, in_features] to […, out_features], in the input's dtype."""
        output = rows.new_empty((*rows.shape[:-1], self.out_features))
        linear(self._owner.kernels, self._owner.workspace, self._matrix.struct, rows.contiguous(), output)
        return output if self.out_features > 1 else output.as_subclass(GateLogits)  # one output: a gate

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


class NativeExperts(nn.Module):
    """Experts, computed by the native kernel: the weighted sum of those that a router chose for each row."""

    def __init__(self, owner: NativeLayers, module: Any, gate: Gate) -> None:
        """`module`: transformers' experts. `gate`: the function between their products."""
        super().__init__()
        self._owner = owner
        pack = partial(PackedMatrix, owner.kernels, owner.arena, quantise=owner.quantise)
        self._gate_up, self._down = [], []
        for index in range(module.num_experts):
            *gate_and_up, down = (plain_linear(*each) for each in linears_of(module, index))
            self._gate_up.append(pack(gate_and_up, interleave=True))
            self._down.append(pack([down]))
        structs = ([each.struct for each in matrices] for matrices in (self._gate_up, self._down))
        self._arrays = [(structures.OutriderMatrix * len(each))(*each) for each in structs]
        self._struct = structures.OutriderExperts(
            module.num_experts, self._gate_up[0].in_features, self._down[0].in_features,
            *map(addressof, self._arrays), *astuple(gate),
        )  # fmt: skip

    def forward(self, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Maps [num_rows, hidden_size] to the same shape and dtype. `expert_ids` and `weights`: [num_rows, slots]."""
        output = torch.empty_like(rows, memory_format=torch.contiguous_format)
        ids, weights = expert_ids.long().contiguous(), weights.float().contiguous()
        experts(self._owner.kernels, self._owner.workspace, self._struct, rows.contiguous(), ids, weights, output)
        return output

    def products(self, rows: Tensor, expert_ids: Tensor) -> Tensor:
        """Implements OwnExperts.products."""
        output = torch.empty((len(rows), 1, rows.shape[1]))
        ids, ones = expert_ids.unsqueeze(1), torch.ones((len(rows), 1))
        experts(self._owner.kernels, self._owner.workspace, self._struct, rows, ids, ones, output)
        return output[:, 0]

    def memory_of(self, expert: int) -> list[Tensor]:
        """Implements OwnExperts.memory_of."""
        matrices = self._gate_up[expert], self._down[expert]
        arrays = [each for matrix in matrices for each in (matrix.packed, matrix.bias, matrix.scales)]
        return [torch.from_numpy(each) for each in arrays if each is not None]


class WholeVectorActivation(nn.Module):
    """A torch activation that computes every element in the same way, wherever it is in the batch."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        """Activates rows of any shape."""
        return in_whole_vectors(self._activation, rows)


class NativeLayers:
    """The state shared by one model's native layers. Not thread-safe: it belongs to the thread that runs the model."""

    def __init__(self, kernels: CpuKernels, *, quantise: str = "") -> None:
        """`quantise`: see PackedMatrix."""
        self.kernels = kernels
        self.quantise = quantise
        self.workspace = Workspace(kernels.library)
        self.arena = WeightArena()

    def replace_in(self, model: nn.Module, division: ExpertDivision | None = None) -> None:
        """Replaces linear layers, experts, latent projections, linear attention and plain norms, and makes torch's
        activations independent of the batch. `division`: the ranks among which experts are divided.
        """
        from transformers.activations import ACT2CLS  # takes seconds; a node with packed weights avoids it

        make_experts = self._make_experts if division is None else division.divided(self._make_experts)
        replace_experts(model, make_experts, partial(NativeLinear, self, quantise=""))
        for attention in latent_layers(model) if self.quantise else ():
            weight = attention.kv_b_proj.weight
            rounded = rounded_weight(words_of(weight.detach()), self.quantise)
            weight.data = torch.from_numpy(rounded).to(weight.dtype)
        absorb_projections(model, partial(NativeProjections, self))
        make_linear = partial(NativeLinear, self)
        for parent, name in list(delta_layers(model)):  # layers in a list would keep their weights alive
            rule = NativeDeltaRule(self.kernels, self.workspace, getattr(parent, name), make_linear)
            setattr(parent, name, rule)
        replace_linear_layers(model, make_linear)
        replace_norms(model, partial(NativeRMSNorm, self))
        kinds: tuple[Any, ...] = tuple(ACT2CLS.values())
        activations = tuple(kind[0] if isinstance(kind, tuple) else kind for kind in kinds)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, activations) and not isinstance(module, WholeVectorActivation):
                    setattr(module, name, WholeVectorActivation(child))

    def _make_experts(self, module: Any) -> NativeExperts | None:
        gate = gate_of(module)
        return None if gate is None else NativeExperts(self, module, gate)
