"""min_p, top_k and top_p. Each keeps the first tokens in order (see `order`): those whose key is at least a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.engine.arrays import Array, largest_keys, namespace, to_array_like
from outrider.engine.sampler.elementary import masses_of
from outrider.engine.sampler.order import LOWEST_KEY, lowest_keys, values_of_keys
from outrider.request import SamplingParams

_NEVER_REACHED = (1 << 63) - 1


def has_filters(params: SamplingParams) -> bool:
    """Returns whether a filter is set, so that step 6 of SamplingParams has an effect."""
    return params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0


def limits_of(params: Sequence[SamplingParams], values: Array, keys: Array) -> Array:
    """Returns the key of the last token that all filters of a row keep: [num_rows, 1] int64. Does not wait for a
    device.

    Args:
        params: one for each row.
        values: [num_rows, num_ids] float32, after step 5.
        keys: [num_rows, num_ids] int64, the order keys of the values.
    """
    xp = namespace(values)
    largest = xp.max(values, axis=1, keepdims=True)
    limits = xp.maximum(_min_p_limits(params, largest), _top_k_limits(params, keys))
    if any(row.top_p < 1.0 for row in params):
        limits = xp.maximum(limits, _top_p_limits(params, largest, keys, limits))
    return limits


def _min_p_limits(params: Sequence[SamplingParams], largest: Array) -> Array:
    """Returns [num_rows, 1] int64: the lowest key that min_p keeps.

    For values, the condition p >= min_p * p_max is v >= v_max + log(min_p).
    """
    xp = namespace(largest)
    if all(row.min_p == 0.0 for row in params):
        return xp.full_like(largest, LOWEST_KEY, dtype=xp.int64)
    logs = [math.log(row.min_p) if row.min_p > 0.0 else -math.inf for row in params]
    distances = _column(logs, np.float32, largest)
    return xp.where(distances > -math.inf, lowest_keys(largest + distances), LOWEST_KEY)


def _top_k_limits(params: Sequence[SamplingParams], keys: Array) -> Array:
    """Returns [num_rows, 1] int64: the key of the last token that top_k keeps; a top_k of 0 keeps all."""
    top_ks = [row.top_k if row.top_k < keys.shape[1] else 0 for row in params]
    xp = namespace(keys)
    if not any(top_ks):
        return xp.full_like(keys[:, :1], LOWEST_KEY)
    numbers = _column(top_ks, np.int64, keys)
    last = xp.take_along_axis(largest_keys(keys, max(top_ks)), xp.clip(numbers - 1, min=0), axis=1)
    return xp.where(numbers > 0, last, LOWEST_KEY)


def _top_p_limits(params: Sequence[SamplingParams], largest: Array, keys: Array, limits: Array) -> Array:
    """Returns [num_rows, 1] int64: the key of the last token before which there is less than top_p of the mass.

    `limits`: the limits of min_p and top_k; tokens that they remove have no mass. A row with NaN has no limit.
    """
    xp = namespace(keys)
    keys = xp.sort(keys, axis=1)
    masses = masses_of(values_of_keys(keys), largest)
    masses *= keys >= limits
    shares = _column([row.top_p for row in params], np.float64, keys)
    total = xp.sum(masses, axis=1, keepdims=True)
    # The ceiling makes bounds integers, as masses are. The first token, with no mass before it, always stays.
    bounds = xp.clip(xp.astype(xp.ceil(shares * xp.astype(total, xp.float64)), xp.int64), min=1)
    bounds = xp.where((shares < 1.0) & xp.logical_not(xp.isnan(largest)), bounds, _NEVER_REACHED)
    num_out = xp.sum(total - xp.cumulative_sum(masses, axis=1) >= bounds, axis=1, keepdims=True)
    return xp.take_along_axis(keys, num_out, axis=1)


def _column(values: Sequence[float], dtype: type[np.generic], array: Array) -> Array:
    """Returns the values as [len(values), 1] on the array's device."""
    return to_array_like(np.asarray(values, dtype=dtype)[:, None], array)
