"""Steps 5 and 6 of the contract's SamplingParams for whole rows: the distribution from which a token is drawn.

The race of the kernels does not need the distribution, since that race looks only into blocks that can win. The race
of `ArrayDecider`, logprobs and verification methods that compare probabilities need all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.engine.arrays import Array, ids_like, map_row_chunks, namespace, to_array_like, without_warnings
from outrider.engine.sampler.filters import has_filters, limits_of
from outrider.engine.sampler.order import order_keys
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.request import SamplingParams


def sampling_distribution(values: Array, decisions: Sequence[Decision]) -> Array:
    """Returns the values after steps 5 and 6, -inf for filtered tokens: [num_rows, num_ids]. Greedy rows are unchanged.

    The result is a copy if some rows, but not all, are greedy.
    """
    return map_row_chunks(_drawn_from, values, decisions)


@without_warnings
def _drawn_from(values: Array, decisions: Sequence[Decision]) -> Array:
    drawn = [row for row, decision in enumerate(decisions) if not decision.params.is_greedy]
    if not drawn:
        return values
    xp = namespace(values)
    params = [decisions[row].params for row in drawn]
    rows = None if len(drawn) == len(decisions) else ids_like(drawn, values)
    some = divide_by_temperatures(values if rows is None else values[rows], params)
    if any(map(has_filters, params)):
        keys = order_keys(some)
        some = xp.where((keys < limits_of(params, some, keys)) & xp.logical_not(xp.isnan(some)), -math.inf, some)
    if rows is None:
        return some
    values = xp.astype(values, xp.float32)
    values[rows] = some
    return values


def divide_by_temperatures(values: Array, params: Sequence[SamplingParams]) -> Array:
    """Applies step 5 to rows that are not greedy: [num_rows, num_ids] float32."""
    if all(each.temperature == 1.0 for each in params):
        return values
    # Divides by an array, because a GPU would replace division by a number with multiplication by its reciprocal.
    return values / to_array_like(np.asarray([[each.temperature] for each in params], dtype=np.float32), values)
