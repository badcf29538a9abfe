"""Batch-invariant linear layers and norms for a transformers model on a GPU.

torch computes the remaining operations, which are elementwise: activations, rotations and sums. If any other operation
of a model depends on the batch, this is detected at load by comparing rows over several batches
(`model_hub.support.depends_on_batch`).
"""

from __future__ import annotations

import triton
from torch import Tensor, nn

from outrider.engine.gpu_kernels.decoder import Norm, rms_norm
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


class DeterministicRMSNorm(nn.Module):
    """An RMS norm that our kernel computes."""

    def __init__(self, weight: Tensor, epsilon: float, rounds_once: bool) -> None:  # noqa: FBT001
        """`weight` [width] float32."""
        super().__init__()
        self._norm = Norm(weight.contiguous(), epsilon, rounds_first=not rounds_once)

    def forward(self, rows: Tensor) -> Tensor:
        """Normalises […, width] over the last dimension."""
        return rms_norm(rows.reshape(-1, rows.shape[-1]).contiguous(), self._norm).view(rows.shape)


def make_deterministic(model: nn.Module) -> None:
    """Replaces the model's linear layers and norms in place."""
    replace_linear_layers(model, DeterministicLinear)
    replace_norms(model, DeterministicRMSNorm)


def deterministic_kernels(dtype: str, capability: str) -> str:
    """Returns a text for a node's numerics, with all that a row's bits depend on. `capability`: such as "sm_90"."""
    tile = Tile()
    return (
        f"triton {triton.__version__} {capability} {dtype}, splits of {tile.split_keys} keys and "
        f"{PRODUCT_TILE.split_features} features"
    )
