"""Typical acceptance. LOSSY: committed tokens do not have the target model's distribution.

A draft token x is accepted if it is the token that its position's race decides, as in coupled sampling, or if the
target finds it likely enough by itself:

    p(x) > min(threshold, alpha * exp(-H(p)))

with H the entropy of p, in nats: where the target is undecided, less is asked for. Otherwise the race's token is
committed. So acceptance is never below that of coupled sampling, and the text leans towards the drafter's.

Source: Cai et al. 2024, "Medusa" (arXiv 2401.10774), with its threshold 0.09 and alpha 0.3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.pending import Pending
from outrider.engine.sampler import Sampler
from outrider.engine.transfer import upload_ids
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.coupled import accept_drafts
from outrider.speculation.verify.rows import draft_token_masses, draft_token_rows

THRESHOLD = 0.09
ALPHA = 0.3


class TypicalVerifier:
    """Trades fidelity for acceptance. Chosen by a request, or by the router's setting, and by nothing else."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @torch.inference_mode()
    def queue(self, logits: Tensor, drafts: Sequence[DraftRows]) -> Pending[list[Verified]]:
        rows = [draft.rows for draft in drafts]
        token_ids = self._sampler.decide(logits, rows)
        if any(draft.draft_token_ids for draft in drafts):
            token_ids = self._with_typical(token_ids, logits, drafts)
        sampled = self._sampler.with_logprobs(logits, rows, token_ids)
        return Pending(sampled.tensors, lambda arrays: accept_drafts(drafts, sampled.finish(arrays)))

    def _with_typical(self, decided: Tensor, logits: Tensor, drafts: Sequence[DraftRows]) -> Tensor:
        """What was decided [num_rows] int64, and in its place draft tokens that are likely enough."""
        masses = draft_token_masses(self._sampler, logits, drafts)
        token_ids = upload_ids([token_id for draft in drafts for token_id in draft.draft_token_ids], logits.device)
        probs = masses.to(torch.float64) / masses.sum(dim=1, keepdim=True)  # [num draft tokens, num_ids]
        entropy = -torch.xlogy(probs, probs).sum(dim=1, keepdim=True)
        bounds = (ALPHA * torch.exp(-entropy)).clamp(max=THRESHOLD)
        within = token_ids.clamp(max=probs.shape[1] - 1)
        is_likely = (probs.gather(1, within.unsqueeze(1)) > bounds).squeeze(1) & (within == token_ids)
        rows = upload_ids(draft_token_rows(drafts), logits.device)
        return decided.index_copy(0, rows, torch.where(is_likely, token_ids, decided.index_select(0, rows)))
