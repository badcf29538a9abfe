"""Steps 5 and 6 of the contract's SamplingParams for whole rows: the distribution that a token is drawn from.

The kernels' race does without it: it looks only into blocks that can win. Torch's race, logprobs and verification
methods that compare probabilities need all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.engine.sampler.filters import has_filters, limits_of
from outrider.engine.sampler.order import order_keys
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.engine.transfer import upload, upload_ids
from outrider.request import SamplingParams


def drawn_from(values: Tensor, decisions: Sequence[Decision]) -> Tensor:
    """Values after steps 5 and 6, -inf where they are filtered out: [num_rows, num_ids]. Greedy rows stay."""
    drawn = [row for row, decision in enumerate(decisions) if not decision.params.is_greedy]
    if not drawn:
        return values
    rows = upload_ids(drawn, values.device)
    params = [decisions[row].params for row in drawn]
    some = divide_by_temperatures(values.index_select(0, rows), params)
    if any(map(has_filters, params)):
        keys = order_keys(some, torch.arange(some.shape[1], device=some.device))
        is_out = (keys < limits_of(params, some, keys)) & some.isnan().logical_not()
        some = some.masked_fill(is_out, -torch.inf)
    return values.index_copy(0, rows, some)


def divide_by_temperatures(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Step 5 for rows that are not greedy: [num_rows, num_ids] float32."""
    if all(each.temperature == 1.0 for each in params):
        return values
    # Not by a number: a GPU would multiply by its reciprocal.
    return values / upload(np.asarray([[each.temperature] for each in params], dtype=np.float32), values.device)
