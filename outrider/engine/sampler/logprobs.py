"""Logprobs of chosen tokens, in the model's distribution or in the one from which they were drawn.

Only masses are added, which are integers (see `elementary`), so a row's logprobs have the same bits in any batch and on
any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from outrider.engine.arrays import Array, Arrays, ids_like, largest_keys, map_row_chunks, namespace
from outrider.engine.pending import Pending
from outrider.engine.sampler.distribution import sampling_distribution
from outrider.engine.sampler.edits import LogitEditor
from outrider.engine.sampler.elementary import log_of_mass, masses_of
from outrider.engine.sampler.order import ids_of_keys, order_keys
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.engine.scheduler import EngineSequence, Scheduled, StepPlan
from outrider.request import LogprobsMode, TokenLogprobs

PIECE_ROWS = 8
"""Number of a prompt's rows that a device processes together, to bound the memory of intermediate results."""


def pending_prompt_logprobs(logits: Array, token_ids: Sequence[int], num_top: int) -> Pending[list[TokenLogprobs]]:
    """Returns the model's logprobs of a prompt's tokens, with `num_top` alternatives each. Does not wait for the
    device.

    Args:
        logits: [num_rows, vocab_size] float32, not changed.
        token_ids: the token after each row.
        num_top: 0 to 20.
    """
    num_top = min(num_top, logits.shape[1])
    ids = ids_like(token_ids, logits)
    pieces = [slice(start, start + PIECE_ROWS) for start in range(0, len(token_ids), PIECE_ROWS)]
    tables = tuple(map_row_chunks(partial(_table, num_top), logits[piece], ids[piece]) for piece in pieces)

    def finish(arrays: Arrays) -> list[TokenLogprobs]:
        return [each for table in arrays for each in _logprobs_of_table(table.tolist(), [num_top] * len(table))]

    return Pending(tables, finish)


ScoredSequence = tuple[EngineSequence, Sequence[TokenLogprobs]]


def split_scored_rows(plan: StepPlan, logits: Array) -> tuple[Array, list[Pending[ScoredSequence]]]:
    """Splits off the last rows of logits, which belong to sequences whose prompts are scored. Call it before these
    sequences advance.

    Returns the other rows, and the new logprobs of each such sequence. Reading these marks their tokens as scored.
    """
    scored: list[Pending[ScoredSequence]] = []
    for item in reversed(plan.scheduled):
        if not item.scored_token_ids:
            break
        logits, rows = logits[: -item.num_rows], logits[-item.num_rows :]
        scored.append(_pending_scores(item, rows))
    return logits, scored


def _pending_scores(item: Scheduled, logits: Array) -> Pending[ScoredSequence]:
    sequence, start, scoring = item.sequence, item.sequence.num_computed, item.sequence.scoring
    assert scoring is not None
    found = pending_prompt_logprobs(logits, item.scored_token_ids, scoring.num_top)
    return Pending(found.arrays, lambda arrays: (sequence, sequence.score(start, found.finish(arrays))))


def pending_logprobs(
    logits: Array, decisions: Sequence[Decision], token_ids: Array, editor: LogitEditor
) -> Pending[list[TokenLogprobs | None]]:
    """Returns logprobs in the requested mode for rows whose samples requested any; None for others. Does not wait.

    Args:
        logits: [num_rows, vocab_size] float32, not changed.
        decisions: one for each row.
        token_ids: [num_rows] int64, the chosen tokens, on the logits' device.
        editor: applies steps 1 to 4, for LOGPROBS_MODE_SAMPLED.
    """
    asked: list[tuple[list[int], list[int]]] = []  # for each mode: rows and their numbers of alternatives
    tables: list[Array] = []
    for mode in LogprobsMode:
        rows = [
            row
            for row, decision in enumerate(decisions)
            if decision.state.logprobs is not None and decision.state.logprobs.mode is mode
        ]
        if not rows:
            continue
        asking = [decisions[row] for row in rows]
        places = ids_like(rows, logits)
        values = logits[places]
        if mode is LogprobsMode.SAMPLED:
            values = sampling_distribution(editor.edit(values, asking), asking)
        nums_top = [decision.state.logprobs.num_top for decision in asking if decision.state.logprobs is not None]
        asked.append((rows, nums_top))
        num_top = min(max(nums_top), values.shape[1])
        tables.append(map_row_chunks(partial(_table, num_top), values, token_ids[places]))

    def finish(arrays: Arrays) -> list[TokenLogprobs | None]:
        answers: list[TokenLogprobs | None] = [None] * len(decisions)
        for (rows, nums_top), table in zip(asked, arrays, strict=True):
            for row, answer in zip(rows, _logprobs_of_table(table.tolist(), nums_top), strict=True):
                answers[row] = answer
        return answers

    return Pending(tuple(tables), finish)


def _table(num_top: int, values: Array, token_ids: Array) -> Array:
    """Returns the numbers from which the logprobs of each row follow: [num_rows, 5 + 2 * num_top] float64.

    `values`: [num_rows, n] float32; their softmax is the distribution.

    Columns: the token of `token_ids` [num_rows], its value, the largest value, the total mass, the token's rank, then
    the ids of the top tokens and their values.
    """
    xp = namespace(values)
    chosen = xp.take_along_axis(values, token_ids[:, None], axis=1)
    largest = xp.max(values, axis=1, keepdims=True)
    masses = xp.sum(masses_of(values, largest), axis=1, keepdims=True)
    ranks = xp.sum(values > chosen, axis=1, keepdims=True) + 1
    top_ids = ids_of_keys(largest_keys(order_keys(values), num_top))
    top_values = xp.take_along_axis(values, top_ids, axis=1)
    columns = (token_ids[:, None], chosen, largest, masses, ranks, top_ids, top_values)
    # float64 holds ids, ranks and values exactly. It rounds the sum of masses, in the same way on every device.
    return xp.concat([xp.astype(column, xp.float64) for column in columns], axis=1)


def _logprobs_of_table(table: Sequence[Sequence[float]], nums_top: Sequence[int]) -> Iterator[TokenLogprobs]:
    for wanted, (token_id, value, most, mass, rank, *top) in zip(nums_top, table, strict=True):
        num_top = len(top) // 2
        log_total = log_of_mass(mass, most)
        alternatives = [*zip(top[:num_top], top[num_top:], strict=True)][:wanted]
        yield TokenLogprobs(
            token_id=int(token_id),
            logprob=_logprob(value, log_total),
            rank=int(rank),
            top=tuple(
                (int(top_id), _logprob(top_value, log_total))
                for top_id, top_value in alternatives
                if top_value > -math.inf
            ),
        )


def _logprob(value: float, log_total: float) -> float:
    """Returns the logprob, but at most 0, since rounding may lift the logprob of a token of probability 1 above 0."""
    return min(0.0, value - log_total)
