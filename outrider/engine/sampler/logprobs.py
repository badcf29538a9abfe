"""Logprobs of chosen tokens: the model's own, or of the distribution that they were drawn from.

Sums are of masses (integers), so a row's logprobs are the same bits in any batch and on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.engine.sampler.distribution import drawn_from
from outrider.engine.sampler.edits import LogitEditor
from outrider.engine.sampler.elementary import log_of_mass, masses_of
from outrider.engine.sampler.order import ids_of_keys, order_keys
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.engine.transfer import download, upload_ids
from outrider.request import LogprobsMode, TokenLogprobs


@torch.inference_mode()
def logprobs_of(
    logits: Tensor, decisions: Sequence[Decision], token_ids: Sequence[int], editor: LogitEditor
) -> list[TokenLogprobs | None]:
    """Of the rows whose samples asked for them, each by its mode; None for the others.

    Args:
        logits: [num_rows, vocab_size] float32, not changed.
        decisions: one for each row.
        token_ids: the chosen tokens.
        editor: steps 1 to 4, for LOGPROBS_MODE_SAMPLED.
    """
    answers: list[TokenLogprobs | None] = [None] * len(decisions)
    for mode in LogprobsMode:
        rows = [
            row
            for row, decision in enumerate(decisions)
            if decision.state.logprobs is not None and decision.state.logprobs.mode is mode
        ]
        if not rows:
            continue
        asking = [decisions[row] for row in rows]
        values = logits.index_select(0, upload_ids(rows, logits.device))
        if mode is LogprobsMode.SAMPLED:
            values = drawn_from(editor.edit(values, asking), asking)
        chosen = [token_ids[row] for row in rows]
        for row, answer in zip(rows, _logprobs_of_values(values, asking, chosen), strict=True):
            answers[row] = answer
    return answers


def _logprobs_of_values(
    values: Tensor, decisions: Sequence[Decision], token_ids: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """Of values [num_rows, n] float32 that a softmax makes a distribution."""
    nums_top = [decision.state.logprobs.num_top for decision in decisions if decision.state.logprobs is not None]
    num_top = min(max(nums_top), values.shape[1])
    chosen = values.gather(1, upload_ids(token_ids, values.device).unsqueeze(1))
    largest = values.amax(dim=1, keepdim=True)
    masses = masses_of(values, largest).sum(dim=1, keepdim=True)
    ranks = (values > chosen).sum(dim=1, keepdim=True) + 1
    ids = torch.arange(values.shape[1], device=values.device)
    top_ids = ids_of_keys(order_keys(values, ids).topk(num_top, dim=1).values)
    columns = (chosen, largest, masses, ranks, top_ids, values.gather(1, top_ids))
    # float64 holds ids, ranks and values as they are, and rounds a sum of masses like any other integer.
    read = download(torch.cat([column.to(torch.float64) for column in columns], dim=1))
    for token_id, wanted, (value, most, mass, rank, *top) in zip(token_ids, nums_top, read, strict=True):
        log_total = log_of_mass(mass, most)
        alternatives = zip(top[:wanted], top[num_top : num_top + wanted], strict=True)
        yield TokenLogprobs(
            token_id=token_id,
            logprob=_logprob(value, log_total),
            rank=int(rank),
            top=tuple(
                (int(top_id), _logprob(top_value, log_total))
                for top_id, top_value in alternatives
                if top_value > -math.inf
            ),
        )


def _logprob(value: float, log_total: float) -> float:
    """At most 0: rounding may leave a certain token an ulp above."""
    return min(0.0, value - log_total)
