"""Rows of a step, as verification methods need them: where each draft's begin, what they are drawn from, logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.sampler.elementary import masses_of
from outrider.engine.transfer import upload_ids
from outrider.speculation.draft_tree import ROOT
from outrider.speculation.verify.base import DraftRows, Verified


def row_starts(drafts: Sequence[DraftRows]) -> list[int]:
    """The first row of each draft."""
    return list(accumulate((draft.rows.num_rows for draft in drafts[:-1]), initial=0))


def runs_of_tree(draft: DraftRows) -> list[SampleRows]:
    """The rows of a tree, in order, as runs in which each token follows the one before it.

    What leads to a run is assumed to be generated, as for drafts: penalties and min_tokens count a row's own path.
    """
    rows = draft.rows
    paths: list[tuple[int, ...]] = []  # to each draft token, itself included
    firsts = [ROOT]  # of each run: the draft token whose row begins it
    for index, (token_id, parent) in enumerate(zip(rows.draft_token_ids, draft.parents, strict=True)):
        paths.append((*(paths[parent] if parent != ROOT else ()), token_id))
        if parent != index - 1:
            firsts.append(index)
    runs: list[SampleRows] = []
    for first, following in zip(firsts, [*firsts[1:], len(paths)], strict=True):
        path = paths[first] if first != ROOT else ()
        runs.append(
            rows._replace(
                position=rows.position + len(path),
                draft_token_ids=rows.draft_token_ids[first + 1 : following],
                assumed_token_ids=rows.assumed_token_ids + path,
            )
        )
    return runs


def draft_token_masses(sampler: Sampler, logits: Tensor, drafts: Sequence[DraftRows]) -> Tensor:
    """The target's distributions at the positions of draft tokens.

    Args:
        sampler: of the target.
        logits: [num_rows, vocab_size] float32, of all rows of the drafts.
        drafts: with at least one draft token among them.

    Returns:
        [num draft tokens, num_ids] int64, a row's probabilities but for a factor.
    """
    rows = [
        start + index
        for start, draft in zip(row_starts(drafts), drafts, strict=True)
        for index in range(len(draft.draft_token_ids))
    ]
    parts = [
        draft.rows._replace(draft_token_ids=draft.draft_token_ids[:-1]) for draft in drafts if draft.draft_token_ids
    ]
    return _masses(sampler, logits.index_select(0, upload_ids(rows, logits.device)), parts)


def _masses(sampler: Sampler, logits: Tensor, rows: Sequence[SampleRows]) -> Tensor:
    values = sampler.distribution(logits, rows)
    largest = values.amax(dim=1, keepdim=True)
    masses = masses_of(values, largest)
    broken = largest.isfinite().logical_not().squeeze(1)
    if broken.any():  # no distribution: NaN, nothing left, or a bias beyond float32. The race still decides.
        token_ids = upload_ids(sampler.sample(logits, rows).token_ids, logits.device)
        masses[broken] = 0
        masses[broken, token_ids[broken]] = 1
    return masses


def with_logprobs(
    sampler: Sampler, logits: Tensor, drafts: Sequence[DraftRows], token_ids: Sequence[tuple[int, ...]]
) -> list[Verified]:
    """The outcome that these tokens are, with the logprobs that were asked for. `logits` are those of all rows."""
    if all(draft.rows.state.logprobs is None for draft in drafts):
        return [Verified(tokens, (None,) * len(tokens)) for tokens in token_ids]
    rows = [
        start + index
        for start, tokens in zip(row_starts(drafts), token_ids, strict=True)
        for index in range(len(tokens))
    ]
    parts = [
        draft.rows._replace(draft_token_ids=draft.draft_token_ids[: len(tokens) - 1])
        for draft, tokens in zip(drafts, token_ids, strict=True)
    ]
    flat = [token_id for tokens in token_ids for token_id in tokens]
    found = iter(sampler.logprobs(logits.index_select(0, upload_ids(rows, logits.device)), parts, flat))
    return [Verified(tokens, tuple(next(found) for _ in tokens)) for tokens in token_ids]
