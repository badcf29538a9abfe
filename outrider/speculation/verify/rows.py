"""The rows of a step and their distributions, as verification methods need them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from outrider.engine.arrays import Array, ids_like, map_row_chunks, namespace
from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.sampler.elementary import masses_of
from outrider.engine.sampler.order import first_argmax
from outrider.speculation.draft_tree import ROOT
from outrider.speculation.verify.base import DraftRows


def row_starts(drafts: Sequence[DraftRows]) -> list[int]:
    """Returns the index of the first row of each draft."""
    return list(accumulate((draft.rows.num_rows for draft in drafts[:-1]), initial=0))


def draft_token_rows(drafts: Sequence[DraftRows]) -> list[int]:
    """Returns the indices of the rows that decide about draft tokens, in order."""
    return [
        start + index
        for start, draft in zip(row_starts(drafts), drafts, strict=True)
        for index in range(len(draft.draft_token_ids))
    ]


def runs_of(draft: DraftRows) -> list[SampleRows]:
    """Returns the rows of a draft, in order, as runs in which each token follows the one before it; a chain is one run.

    As in a chain, the tokens on the path to a run count as generated: penalties and min_tokens apply to each row's own
    path.
    """
    if not draft.parents:
        return [draft.rows]
    state, position, token_ids, assumed_token_ids = draft.rows
    paths: list[tuple[int, ...]] = []  # for each draft token, the path up to and including it
    firsts = [ROOT]  # the draft token whose row begins each run
    for index, (token_id, parent) in enumerate(zip(token_ids, draft.parents, strict=True)):
        paths.append((*(paths[parent] if parent != ROOT else ()), token_id))
        if parent != index - 1:
            firsts.append(index)
    runs: list[SampleRows] = []
    for first, following in zip(firsts, [*firsts[1:], len(paths)], strict=True):
        path = paths[first] if first != ROOT else ()
        runs.append(SampleRows(state, position + len(path), token_ids[first + 1 : following], assumed_token_ids + path))
    return runs


def draft_token_masses(sampler: Sampler, logits: Array, drafts: Sequence[DraftRows]) -> Array:
    """Returns the target's distributions at the positions of draft tokens.

    Args:
        sampler: the target's sampler.
        logits: [num_rows, vocab_size] float32, of all rows of the drafts.
        drafts: at least one of them has a draft token.

    Returns:
        [num draft tokens, num_ids] int64, each row proportional to its probabilities.
    """
    rows = draft_token_rows(drafts)
    parts = [
        draft.rows._replace(draft_token_ids=draft.draft_token_ids[:-1]) for draft in drafts if draft.draft_token_ids
    ]
    return map_row_chunks(_masses, sampler.distribution(logits[ids_like(rows, logits)], parts))


def _masses(values: Array) -> Array:
    xp = namespace(values)
    largest = xp.max(values, axis=1, keepdims=True)
    # There is no distribution if a logit is NaN, no token is allowed, or a bias exceeds float32's range. The race then
    # chooses the first of the largest values, so this token gets all the mass.
    is_broken = xp.logical_not(xp.isfinite(largest))
    masses = masses_of(values, largest)
    masses *= xp.logical_not(is_broken)
    masses[xp.arange(len(values), device=values.device), first_argmax(values)] += is_broken[:, 0]
    return masses
