"""Batch-invariant linear layers, experts and norms for a transformers model on a GPU.

torch computes the remaining operations, which are elementwise: activations, rotations and sums. If any other operation
of a model depends on the batch, this is detected at load by comparing rows over several batches
(`model_hub.support.depends_on_batch`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor, nn

from outrider.engine.divided_experts import ExpertDivision
from outrider.engine.experts import MakeExperts, replace_experts
from outrider.engine.gpu_kernels.decoder import Norm, rms_norm
from outrider.engine.gpu_kernels.experts import SortedSlots, grouped_linear, sort_slots, sum_of_slots
from outrider.engine.gpu_kernels.layers import PRODUCT_TILE, linear
from outrider.engine.gpu_kernels.work_list import Tile
from outrider.engine.linear import replace_linear_layers, replace_norms


class DeterministicLinear(nn.Module):
    """A linear layer, y = x W^T + b, that our kernel computes."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out_features, in_features]; `bias` [out_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight.contiguous()
        self._bias = bias

    def forward(self, rows: Tensor) -> Tensor:
        """Maps […, in_features] to […, out_features]."""
        flat = rows.reshape(-1, self.in_features).contiguous()
        return linear(flat, self.weight, self._bias).view(*rows.shape[:-1], self.out_features)


class DeterministicExperts(nn.Module):
    """The weighted sum of each row's experts, whose products our kernels compute and whose activation is their own."""

    def __init__(self, experts: Any) -> None:
        """`experts`: transformers' experts, whose weights remain where they are."""
        super().__init__()
        self._experts = experts

    def forward(self, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Maps [num_rows, hidden_size] to the same shape and dtype. `expert_ids` and `weights`: [num_rows, slots]."""
        ids, rows = expert_ids.long().contiguous(), rows.contiguous()
        scales, num_experts = weights.float().contiguous(), self._experts.num_experts
        return sum_of_slots(self.products(rows, ids), ids, scales, num_experts, torch.empty_like(rows))

    def products(self, rows: Tensor, expert_ids: Tensor) -> Tensor:
        """Implements OwnExperts.products, also for several slots of a row: [num_rows * slots, hidden_size]."""
        experts, num_slots = self._experts, expert_ids.numel()
        slots = sort_slots(expert_ids, experts.num_experts)
        up = self._product(rows, slots, "gate_up_proj" if experts.has_gate else "up_proj", rows.dtype, num_slots)
        active = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)  # noqa: SLF001 as gate_of
        return self._product(active.contiguous(), slots, "down_proj", torch.float32, num_slots)

    def memory_of(self, expert: int) -> list[Tensor]:
        """Implements OwnExperts.memory_of."""
        return [parameter.detach()[expert] for parameter in self._experts.parameters(recurse=False)]

    def _product(self, rows: Tensor, slots: SortedSlots, name: str, dtype: torch.dtype, num_slots: int) -> Tensor:
        experts = self._experts
        weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias") if experts.has_bias else None
        num_outputs = weight.shape[2 if experts.is_transposed else 1]
        output = torch.empty((num_slots, num_outputs), dtype=dtype, device=rows.device)
        return grouped_linear(rows, slots, weight, bias, output, is_transposed=experts.is_transposed)


class DeterministicRMSNorm(nn.Module):
    """An RMS norm that our kernel computes."""

    def __init__(self, weight: Tensor, epsilon: float, rounds_once: bool) -> None:  # noqa: FBT001
        """`weight` [width] float32."""
        super().__init__()
        self._norm = Norm(weight.contiguous(), epsilon, rounds_first=not rounds_once)

    def forward(self, rows: Tensor) -> Tensor:
        """Normalises […, width] over the last dimension."""
        return rms_norm(rows.reshape(-1, rows.shape[-1]).contiguous(), self._norm).view(rows.shape)


def make_deterministic(model: nn.Module, division: ExpertDivision | None = None) -> None:
    """Replaces the model's linear layers, experts and norms in place. `division`: as in NativeLayers.replace_in."""
    make_experts: MakeExperts = DeterministicExperts
    if division is not None:
        division.move_others(model)
        make_experts = division.divided(DeterministicExperts)
    replace_experts(model, make_experts, DeterministicLinear)
    replace_linear_layers(model, DeterministicLinear)
    replace_norms(model, DeterministicRMSNorm)


def deterministic_kernels(dtype: str, capability: str) -> str:
    """Returns a text for a node's numerics, with all that a row's bits depend on. `capability`: such as "sm_90"."""
    tile = Tile()
    return (
        f"triton {triton.__version__} {capability} {dtype}, splits of {tile.split_keys} keys and "
        f"{PRODUCT_TILE.split_features} features"
    )
