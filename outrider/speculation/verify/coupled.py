"""Coupled sampling: a draft token is accepted iff it is the token that its position's race decides.

Source: Daliri, Musco, Suresh 2024 (arXiv 2408.07978); see docs/adr/0002. The committed tokens do not depend on the
draft, wherever it came from.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.engine.sampler import Sampler
from outrider.speculation.acceptance import accept
from outrider.speculation.verify.base import DraftRows, Verified


class CoupledVerifier:
    """The default method."""

    is_exact = True

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def verify(self, logits: Tensor, drafts: Sequence[DraftRows]) -> list[Verified]:
        sampled = self._sampler.sample(logits, [draft.rows for draft in drafts])
        verified: list[Verified] = []
        start = 0
        for draft in drafts:
            token_ids = accept(draft.draft_token_ids, sampled.token_ids[start : start + draft.rows.num_rows])
            verified.append(Verified(token_ids, tuple(sampled.logprobs[start : start + len(token_ids)])))
            start += draft.rows.num_rows
        return verified
