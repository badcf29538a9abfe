"""min_p, top_k and top_p. They keep a beginning of the tokens' order (see `order`): all keys from a limit on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.engine.sampler.elementary import masses_of
from outrider.engine.sampler.order import LOWEST_KEY, lowest_keys
from outrider.engine.transfer import upload
from outrider.request import SamplingParams

_NEVER_REACHED = torch.iinfo(torch.int64).max


def has_filters(params: SamplingParams) -> bool:
    """Whether step 6 does anything."""
    return params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0


def limits_of(params: Sequence[SamplingParams], values: Tensor, keys: Tensor) -> Tensor:
    """The key of the last token that all filters of a row keep: [num_rows, 1] int64. Waits for no device.

    Args:
        params: of each row.
        values: [num_rows, num_ids] float32, after step 5.
        keys: [num_rows, num_ids] int64, the order keys of the values.
    """
    largest = values.amax(dim=1, keepdim=True)
    limits = torch.maximum(_min_p_limits(params, largest), _top_k_limits(params, keys))
    if any(row.top_p < 1.0 for row in params):
        masses = torch.where(keys >= limits, masses_of(values, largest), 0)
        limits = torch.maximum(limits, _top_p_limits(params, masses, keys, is_nan=largest.isnan()))
    return limits


def _min_p_limits(params: Sequence[SamplingParams], largest: Tensor) -> Tensor:
    """[num_rows, 1] int64. p >= min_p * p_max, as values: v >= v_max + log(min_p)."""
    if all(row.min_p == 0.0 for row in params):
        return torch.full_like(largest, LOWEST_KEY, dtype=torch.int64)
    logs = [math.log(row.min_p) if row.min_p > 0.0 else -math.inf for row in params]
    distances = _column(logs, np.float32, largest.device)
    return torch.where(distances > -torch.inf, lowest_keys(largest + distances), LOWEST_KEY)


def _top_k_limits(params: Sequence[SamplingParams], keys: Tensor) -> Tensor:
    """[num_rows, 1] int64: the key of the last token that each top_k keeps; 0 keeps all."""
    top_ks = [row.top_k if row.top_k < keys.shape[1] else 0 for row in params]
    if not any(top_ks):
        return torch.full_like(keys[:, :1], LOWEST_KEY)
    numbers = _column(top_ks, np.int64, keys.device)
    first = keys.topk(max(top_ks), dim=1).values  # sorted
    return torch.where(numbers > 0, first.gather(1, (numbers - 1).clamp(min=0)), LOWEST_KEY)


def _top_p_limits(params: Sequence[SamplingParams], masses: Tensor, keys: Tensor, *, is_nan: Tensor) -> Tensor:
    """[num_rows, 1] int64: the key of the last token before which there is less than top_p of the mass.

    `masses`: [num_rows, num_ids] int64, 0 of what min_p and top_k leave out. A row with NaN is not bounded.
    """
    shares = _column([row.top_p for row in params], np.float64, masses.device)
    total = masses.sum(dim=1, keepdim=True)
    # The ceiling keeps comparisons among integers. The first token, with no mass before it, always stays.
    bounds = (shares * total.to(torch.float64)).ceil().to(torch.int64).clamp(min=1)
    bounds = torch.where((shares < 1.0) & is_nan.logical_not(), bounds, _NEVER_REACHED)
    keys, order = keys.sort(dim=1, descending=True)
    masses = masses.gather(1, order)
    num_kept = (masses.cumsum(dim=1) - masses < bounds).sum(dim=1, keepdim=True)
    return keys.gather(1, num_kept - 1)


def _column(values: Sequence[float], dtype: type[np.generic], device: torch.device) -> Tensor:
    """[len(values), 1]."""
    return upload(np.asarray(values, dtype=dtype)[:, None], device)
