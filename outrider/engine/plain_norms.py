"""Replaces the RMS norms of a transformers model, whatever their classes are called.

A module is one if its outputs are those of root mean square normalisation with its weight, or, as in Gemma, with one
plus its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_PROBED_ROWS = 4
_ALLOWED_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of the largest output: rounding in another order, not another function."""

MakeNorm = Callable[[Tensor, float], nn.Module]
"""From a weight [width] float32 and what is added to the mean square."""


@torch.no_grad()
def replace_norms(model: nn.Module, make_norm: MakeNorm) -> None:
    """Replaces the RMS norms of `model`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            norm = _as_norm(child, make_norm)
            if norm is not None:
                setattr(module, name, norm)


def _as_norm(module: Any, make_norm: MakeNorm) -> nn.Module | None:
    """A norm that gives what `module` gives on random rows; None if there is none."""
    weight: Any = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    has_one_weight = [name for name, _ in module.named_parameters()] == ["weight"] and not list(module.children())
    if not (has_one_weight and weight.ndim == 1 and isinstance(epsilon, float)):
        return None
    if weight.dtype not in _ALLOWED_DIFFERENCE:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((_PROBED_ROWS, weight.numel()), generator=generator).to(weight.device, weight.dtype)
    try:
        expected = module(rows)
    except (RuntimeError, TypeError):
        return None
    if expected.shape != rows.shape or expected.dtype != rows.dtype:
        return None
    allowed = _ALLOWED_DIFFERENCE[weight.dtype] * float(expected.abs().max())
    for candidate in (weight.detach().float(), 1.0 + weight.detach().float()):
        norm = make_norm(candidate, epsilon)
        if float((norm(rows) - expected).abs().max()) <= allowed:
            return norm
    return None
