"""Steps 5 and 6 of the contract's SamplingParams for whole rows: the distribution that a token is drawn from.

The race does without it: it looks only into blocks that can win. Logprobs and verification methods that compare
probabilities need all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.sampler.draw import divide_by_temperatures
from outrider.engine.sampler.filters import Filters, has_filters
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.engine.transfer import upload_ids


def drawn_from(values: Tensor, decisions: Sequence[Decision]) -> Tensor:
    """Values after steps 5 and 6, -inf where they are filtered out: [num_rows, num_ids]. Greedy rows stay."""
    drawn = [row for row, decision in enumerate(decisions) if not decision.params.is_greedy]
    if not drawn:
        return values
    rows = upload_ids(drawn, values.device)
    params = [decisions[row].params for row in drawn]
    some = divide_by_temperatures(values.index_select(0, rows), params)
    if any(map(has_filters, params)):
        blocks = LogitBlocks.of(some)
        filters = Filters.of(params, blocks, num_candidates=blocks.num_blocks)
        is_out = filters.keys.narrow(1, 0, blocks.num_ids) < filters.limits_with_top_p()
        some = some.masked_fill(is_out, -torch.inf)
    return values.index_copy(0, rows, some)
