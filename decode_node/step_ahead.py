"""The next step of plain decoding, laid out while a device computes the current one.

Consecutive steps of plain decoding differ only in one token per sequence, so the next batch is laid out ahead, without
token ids. If every sequence continues, that batch is launched as soon as the ids are known, and the host commits and
reports them while the device computes again. Planning after the commit would have given the same batch, unless drafts
that are worth less than the time saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decode_node.step import LaunchedStep, PlannedSequence
from outrider.drafting.book import StepDrafts
from outrider.engine.engine import Engine
from outrider.engine.input_batch import InputBatch, SequenceRows
from outrider.engine.scheduler import StepPlan
from outrider.speculation.verify.base import Verified

UNKNOWN_TOKEN_ID = 0


def lay_out_next(step: LaunchedStep, engine: Engine) -> InputBatch | None:
    """Returns the batch that follows if every sequence continues by one token, and reserves its blocks.

    Returns None if the scheduler might plan something else.
    """
    scheduler, planned = engine.scheduler, step.planned
    all_run = scheduler.num_running == len(planned) and not scheduler.num_waiting
    if not all_run or min(engine.pool.free_by_group) < len(planned) or not all(map(_may_continue, planned)):
        return None
    rows: list[SequenceRows] = []
    for item in planned:
        sequence = item.scheduled.sequence
        kv, position = sequence.kv, len(sequence.token_ids)
        if kv is None or not kv.has_reserved(position):  # e.g. a fork that shares its last block
            return None
        assert kv.state is None, "models with recurrent states run on CPUs only, where no step is laid out ahead"
        kv.reserve(position + 1)
        rows.append(
            SequenceRows(
                (UNKNOWN_TOKEN_ID,),
                position,
                kv.block_table(),
                1,
                adapter=sequence.adapter,
                window_tables=kv.window_tables(),
            )
        )
    return engine.prepare_ahead(rows)


def launch_next(
    batch: InputBatch,
    step: LaunchedStep,
    verified: Sequence[Verified],
    engine: Engine,
    clock: Callable[[], float],
) -> LaunchedStep | None:
    """Launches the batch of `lay_out_next` before the step is committed. Returns None if a sequence has ended."""
    token_ids = [outcome.token_ids[0] for outcome in verified]
    for item, token_id in zip(step.planned, token_ids, strict=True):
        if token_id in item.sample.stop_token_ids:
            return None
    launched_at = clock()
    logits = engine.run(batch, token_ids)
    return LaunchedStep(StepPlan(step.plan.scheduled), step.planned, logits, launched_at, StepDrafts(), is_ahead=True)


def _may_continue(item: PlannedSequence) -> bool:
    """Returns whether the step decides exactly one token of the sequence, and another one may follow."""
    scheduled, sample = item.scheduled, item.sample
    has_one_row = scheduled.num_rows == 1 and scheduled.reaches_end and not scheduled.scored_token_ids
    return (
        has_one_row and not item.draft.token_ids and sample.sampling.constraint is None and sample.num_tokens_left > 1
    )
