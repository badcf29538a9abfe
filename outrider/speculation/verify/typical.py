"""Typical acceptance. LOSSY: committed tokens do not have the target model's distribution.

A draft token x is accepted if it is the token that its position's race decides, as in coupled sampling, or if the
target finds it likely enough by itself:

    p(x) > min(threshold, alpha * exp(-H(p)))

with H the entropy of p, in nats: where the target is undecided, less is asked for. Otherwise the race's token is
committed. So acceptance is never below that of coupled sampling, and the text leans towards the drafter's.

Source: Cai et al. 2024, "Medusa" (arXiv 2401.10774), with its threshold 0.09 and alpha 0.3 as defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.sampler import Sampler
from outrider.engine.transfer import download, upload_ids
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.rows import draft_token_masses, row_starts, with_logprobs


@dataclass(frozen=True, slots=True)
class TypicalThresholds:
    """When a draft token is taken although the race decides otherwise; Medusa's posterior threshold and alpha."""

    threshold: float = 0.09
    alpha: float = 0.3


class TypicalVerifier:
    """Trades fidelity for acceptance. Chosen by a request, or by the router's setting, and by nothing else."""

    is_exact = False

    def __init__(self, sampler: Sampler, thresholds: TypicalThresholds | None = None) -> None:
        self._sampler = sampler
        self._thresholds = thresholds or TypicalThresholds()

    @torch.inference_mode()
    def verify(self, logits: Tensor, drafts: Sequence[DraftRows]) -> list[Verified]:
        decided = self._sampler.sample(logits, [draft.rows for draft in drafts]).token_ids
        is_typical = self._find_typical(logits, drafts)
        token_ids: list[tuple[int, ...]] = []
        for draft, start in zip(drafts, row_starts(drafts), strict=True):
            tokens: list[int] = []
            for index, token_id in enumerate(draft.draft_token_ids):
                if token_id != decided[start + index] and start + index not in is_typical:
                    break
                tokens.append(token_id)
            token_ids.append((*tokens, decided[start + len(tokens)]))
        return with_logprobs(self._sampler, logits, drafts, token_ids)

    def _find_typical(self, logits: Tensor, drafts: Sequence[DraftRows]) -> frozenset[int]:
        """The rows whose draft token is likely enough."""
        rows = [
            start + index
            for start, draft in zip(row_starts(drafts), drafts, strict=True)
            for index in range(len(draft.draft_token_ids))
        ]
        if not rows:
            return frozenset()
        masses = draft_token_masses(self._sampler, logits, drafts)
        token_ids = [token_id for draft in drafts for token_id in draft.draft_token_ids]
        probs = masses.to(torch.float64) / masses.sum(dim=1, keepdim=True)  # [num draft tokens, num_ids]
        entropy = -torch.xlogy(probs, probs).sum(dim=1, keepdim=True)
        bounds = (self._thresholds.alpha * torch.exp(-entropy)).clamp(max=self._thresholds.threshold)
        within = upload_ids([min(token_id, probs.shape[1] - 1) for token_id in token_ids], probs.device).unsqueeze(1)
        likely = download((probs.gather(1, within) > bounds) & (within == upload_ids(token_ids, probs.device)[:, None]))
        return frozenset(row for row, (is_likely,) in zip(rows, likely, strict=True) if is_likely)
