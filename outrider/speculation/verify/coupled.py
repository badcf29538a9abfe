"""Coupled sampling: a draft token is accepted iff it is the token that its position's race decides.

Source: Daliri, Musco, Suresh 2024 (arXiv 2408.07978); see docs/adr/0002. The committed tokens do not depend on the
draft, wherever it came from. In a tree of drafts each row's decision is made after its own path; the text follows the
path whose tokens are what was decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.engine.sampler import Sampler
from outrider.request import TokenLogprobs
from outrider.speculation.acceptance import accept, accept_path
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.rows import runs_of_tree


class CoupledVerifier:
    """The default method."""

    is_exact = True

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def verify(self, logits: Tensor, drafts: Sequence[DraftRows]) -> list[Verified]:
        rows = [rows for draft in drafts for rows in (runs_of_tree(draft) if draft.parents else (draft.rows,))]
        sampled = self._sampler.sample(logits, rows)
        verified: list[Verified] = []
        start = 0
        for draft in drafts:
            end = start + draft.rows.num_rows
            if draft.parents:
                verified.append(_of_tree(draft, sampled.token_ids[start:end], sampled.logprobs[start:end]))
            else:
                token_ids = accept(draft.draft_token_ids, sampled.token_ids[start:end])
                verified.append(Verified(token_ids, tuple(sampled.logprobs[start : start + len(token_ids)])))
            start = end
        return verified


def _of_tree(draft: DraftRows, decided: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Verified:
    path = accept_path(draft.draft_token_ids, draft.parents, decided)
    rows = [0, *(index + 1 for index in path)]
    return Verified(tuple(decided[row] for row in rows), tuple(logprobs[row] for row in rows), path)
