"""Latent attention (MLA) with absorbed projections.

The keys and values of all heads are projections of one latent vector of a token, beside a few rotated dimensions that
all heads share. Only these two vectors are stored (`stored_vectors`). A layer's `kv_b_proj` would expand them to the
keys and values of each head. Instead, a query is multiplied by its head's projection of keys, so that it can be
compared with latent vectors, and the weighted sum of latent vectors is multiplied by the head's projection of values.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MakeProjections = Callable[[Tensor], nn.Module]
"""Makes a module from one weight for each head, [num_heads, out_features, in_features]. The module maps rows
[num_heads, num_rows, in_features] to [num_heads, num_rows, out_features]."""


class TorchProjections(nn.Module):
    """One linear layer for each head, computed by torch."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self._weights = nn.Parameter(weights.mT.contiguous(), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        """See MakeProjections."""
        return torch.bmm(rows, self._weights)


class AbsorbedProjection(nn.Module):
    """Takes the place of a layer's `kv_b_proj`."""

    def __init__(self, attention: Any, make_projections: MakeProjections) -> None:
        super().__init__()
        self.latent_dim: int = attention.kv_lora_rank
        self._sizes = [attention.qk_nope_head_dim, attention.qk_rope_head_dim]
        by_head = attention.kv_b_proj.weight.detach().unflatten(0, (-1, self._sizes[0] + attention.v_head_dim))
        self._of_keys = make_projections(by_head[:, : self._sizes[0]].mT)
        self._of_values = make_projections(by_head[:, self._sizes[0] :])

    def absorb(self, query: Tensor) -> Tensor:
        """Returns queries for latent vectors and rotated dimensions: [num_rows, num_heads, latent_dim + rotated].

        `query`: [num_rows, num_heads, dimensions that are not rotated + rotated].
        """
        plain, rotated = query.split(self._sizes, -1)
        return torch.cat([self._of_keys(plain.transpose(0, 1)).transpose(0, 1), rotated], -1)

    def expand(self, attended: Tensor) -> Tensor:
        """Maps weighted latent vectors [num_rows, num_heads, latent_dim] to values [num_rows, num_heads, value_dim]."""
        values: Tensor = self._of_values(attended.transpose(0, 1)).transpose(0, 1)
        return values


def latent_layers(model: nn.Module) -> Iterator[Any]:
    """Yields the modules of latent attention, in transformers' layout."""
    return (module for module in model.modules() if hasattr(module, "expand_kv"))


def latent_shape(attention: Any) -> tuple[int, int, int]:
    """Returns the number of KV heads, `head_dim` and `latent_dim`, as ModelSpec has them."""
    return 1, attention.kv_lora_rank + attention.qk_rope_head_dim, attention.kv_lora_rank


def absorb_projections(model: nn.Module, make_projections: MakeProjections) -> None:
    """Replaces `kv_b_proj` of all latent attention, which then passes what it stores to attention as key and value."""
    for attention in list(latent_layers(model)):
        attention.kv_b_proj = AbsorbedProjection(attention, make_projections)
        attention.expand_kv = _as_stored


def _as_stored(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return rotated, latent
