"""Logprobs of a chosen token: the model's own, or of the distribution that it was drawn from."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from outrider.engine.sampler.filters import Filters, first_in_order, has_filters
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.request import SamplingParams, TokenLogprobs

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def model_logprobs(logits: Floats, token_id: int, *, num_top: int) -> TokenLogprobs:
    """LOGPROBS_MODE_MODEL: log-softmax of the raw logits [vocab] float32."""
    blocks = LogitBlocks.of(
        logits[None], np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.float32), num_ids=len(logits)
    )
    return _of_whole_row(blocks, 0, token_id, num_top=num_top)


def sampled_logprobs(
    blocks: LogitBlocks, row: int, params: SamplingParams, token_id: int, *, num_top: int
) -> TokenLogprobs:
    """LOGPROBS_MODE_SAMPLED: of what the token was drawn from.

    Args:
        blocks: values after steps 1 to 5; for greedy rows after step 4, at temperature 1.
        row: which of its rows.
        params: the filters of step 6, unless it is greedy.
        token_id: the chosen token.
        num_top: alternatives wanted; those of probability 0 are left out.
    """
    if params.is_greedy:
        return _of_whole_row(blocks, row, token_id, num_top=num_top)
    if not has_filters(params):
        return _of_whole_row(blocks, row, token_id, num_top=num_top)
    blocks = blocks.select(np.asarray([row], dtype=np.int64))
    token_ids, values = Filters([params], blocks).kept(0)
    log_total = _log_sum_exp(values)
    value = blocks.value(0, token_id)
    return TokenLogprobs(
        token_id=token_id,
        logprob=_logprob(value, log_total),
        rank=1 + int(np.count_nonzero(values > value)),
        top=_top(token_ids[:num_top], values[:num_top], log_total),
    )


def _of_whole_row(blocks: LogitBlocks, row: int, token_id: int, *, num_top: int) -> TokenLogprobs:
    values = blocks.whole_row(row)
    value = values[token_id]
    log_total = _log_sum_exp(values)
    return TokenLogprobs(
        token_id=token_id,
        logprob=_logprob(value, log_total),
        rank=1 + int(np.count_nonzero(values > value)),
        top=_top(*first_in_order(blocks, row, num_top), log_total),
    )


def _top(token_ids: Ints, values: Floats, log_total: float) -> tuple[tuple[int, float], ...]:
    return tuple(
        (token_id, _logprob(value, log_total))
        for token_id, value in zip(token_ids.tolist(), values, strict=True)
        if value > -math.inf
    )


def _logprob(value: np.float32, log_total: float) -> float:
    """At most 0: rounding may leave a certain token an ulp above."""
    return min(0.0, float(value) - log_total)


def _log_sum_exp(values: Floats) -> float:
    largest = values.max()
    if np.isinf(largest):  # a bias beyond float32, or nothing left: the equals share everything
        return float(largest)
    return float(largest) + math.log(float(np.exp(values - largest).sum(dtype=np.float64)))
