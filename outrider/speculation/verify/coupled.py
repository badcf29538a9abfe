"""Coupled sampling: a draft token is accepted iff it is the token that its position's race decides.

Source: Daliri, Musco, Suresh 2024 (arXiv 2408.07978); see docs/adr/0002. The committed tokens do not depend on the
draft, wherever it came from. In a tree of drafts each row's decision is made after its own path; the text follows the
path whose tokens are what was decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.arrays import Array
from outrider.engine.pending import Pending
from outrider.engine.sampler import SampledRows, Sampler, SampleRows
from outrider.request import TokenLogprobs
from outrider.speculation.acceptance import accept, accept_path
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.rows import runs_of_tree


class CoupledVerifier:
    """The default method."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def queue(self, logits: Array, drafts: Sequence[DraftRows]) -> Pending[list[Verified]]:
        rows: list[SampleRows] = []
        for draft in drafts:
            if draft.parents:
                rows += runs_of_tree(draft)
            else:
                rows.append(draft.rows)
        sampled = self._sampler.queue(logits, rows)
        return Pending(sampled.arrays, lambda arrays: accept_drafts(drafts, sampled.finish(arrays)))


def accept_drafts(drafts: Sequence[DraftRows], sampled: SampledRows) -> list[Verified]:
    """Draft tokens stand as far as they are what was decided for their rows."""
    decided = tuple(sampled.token_ids)
    verified: list[Verified] = []
    start = 0
    for draft in drafts:
        draft_token_ids = draft.rows.draft_token_ids
        end = start + len(draft_token_ids) + 1
        if draft.parents:
            verified.append(_of_tree(draft, decided[start:end], sampled.logprobs[start:end]))
        else:
            token_ids = accept(draft_token_ids, decided[start:end])
            has_logprobs = draft.rows.state.logprobs is not None
            logprobs = tuple(sampled.logprobs[start : start + len(token_ids)]) if has_logprobs else ()
            verified.append(Verified(token_ids, logprobs))
        start = end
    return verified


def _of_tree(draft: DraftRows, decided: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Verified:
    path = accept_path(draft.draft_token_ids, draft.parents, decided)
    rows = [0, *(index + 1 for index in path)]
    return Verified(tuple(decided[row] for row in rows), tuple(logprobs[row] for row in rows), path)
