"""Rejection sampling: a draft token x is accepted with probability min(1, p(x) / q(x)).

p is the target's distribution after all of SamplingParams, q the one that the drafter drew x from. After a rejection
the recovered token is drawn from max(p - q, 0), renormalised. Committed tokens have the distribution p for any q, as
long as x was drawn from q; a drafter that does not draw, as a lookup, has q(x) = 1, which is always true.

Source: Leviathan et al. 2022 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).

Luck: purpose 2 of the decision's generator, words 0 and 1 for acceptance, 2 and 3 for the recovered token. The race's
arrivals (purposes 0 and 1) decide bonus tokens here and drafts in the drafter: never both for one position, because
a position whose draft token is looked at is decided by purpose 2 alone.

Probabilities of p are integer masses (see `elementary`), so a decision does not depend on the device, nor on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.sampler.sequence_sampling import Decision
from outrider.engine.transfer import download, upload_ids
from outrider.speculation.token_distribution import TokenDistribution, certain
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.rows import draft_token_masses, row_starts, with_logprobs

PURPOSE = 2
_UNIFORM_BITS = 53


@dataclass(frozen=True, slots=True)
class _Rejected:
    """A position whose token is still to be drawn."""

    place: int  # of the draft among the verified
    row: int  # among the draft rows
    decision: Decision
    distribution: TokenDistribution


class RejectionVerifier:
    """Exact in distribution; the tokens themselves depend on the drafts."""

    is_exact = True

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @torch.inference_mode()
    def verify(self, logits: Tensor, drafts: Sequence[DraftRows]) -> list[Verified]:
        starts = row_starts(drafts)
        has_drafts = any(draft.draft_token_ids for draft in drafts)
        masses = draft_token_masses(self._sampler, logits, drafts) if has_drafts else logits.new_zeros((0, 1))
        accepted, rejected = self._accept(masses, drafts)
        recovered = dict(zip((each.place for each in rejected), _recover(masses, rejected), strict=True))
        bonus = self._bonus(logits, drafts, starts, [i for i in range(len(drafts)) if i not in recovered])
        token_ids = [
            (*draft.draft_token_ids[:num_accepted], recovered[place] if place in recovered else bonus[place])
            for place, (draft, num_accepted) in enumerate(zip(drafts, accepted, strict=True))
        ]
        return with_logprobs(self._sampler, logits, drafts, token_ids)

    def _accept(self, masses: Tensor, drafts: Sequence[DraftRows]) -> tuple[list[int], list[_Rejected]]:
        """How many draft tokens of each stand, and the positions at which one does not."""
        token_ids = [token_id for draft in drafts for token_id in draft.draft_token_ids]
        targets: list[list[int]] = []  # of each draft token: its mass, and that of all
        if token_ids:
            # An id beyond the vocabulary has no mass.
            within = upload_ids([min(token_id, masses.shape[1] - 1) for token_id in token_ids], masses.device)
            own = masses.gather(1, within.unsqueeze(1))
            targets = download(torch.cat([own, masses.sum(dim=1, keepdim=True)], dim=1))
        accepted: list[int] = []
        rejected: list[_Rejected] = []
        row = 0
        for place, draft in enumerate(drafts):
            num_accepted = 0
            for index, (token_id, decision) in enumerate(
                zip(draft.draft_token_ids, draft.rows.decisions(), strict=False)
            ):
                distribution = draft.distributions[index] if draft.distributions else certain(token_id)
                mass, total = targets[row + index]
                target_prob = mass / total if token_id < masses.shape[1] else 0.0
                if not _uniform(decision) * distribution.probability_of(token_id) < target_prob:
                    rejected.append(_Rejected(place, row + index, decision, distribution))
                    break
                num_accepted += 1
            accepted.append(num_accepted)
            row += len(draft.draft_token_ids)
        return accepted, rejected

    def _bonus(
        self, logits: Tensor, drafts: Sequence[DraftRows], starts: Sequence[int], places: Sequence[int]
    ) -> dict[int, int]:
        """The token after a draft that stands: the position's race decides it, as without a draft."""
        if not places:
            return {}
        last = [starts[place] + len(drafts[place].draft_token_ids) for place in places]
        rows = [_after_draft(drafts[place].rows) for place in places]
        sampled = self._sampler.sample(logits.index_select(0, upload_ids(last, logits.device)), rows)
        return dict(zip(places, sampled.token_ids, strict=True))


def _after_draft(rows: SampleRows) -> SampleRows:
    """The row after the draft, alone."""
    return SampleRows(
        rows.state,
        rows.position + len(rows.draft_token_ids),
        assumed_token_ids=rows.assumed_token_ids + rows.draft_token_ids,
    )


def _uniform(decision: Decision) -> float:
    """In [0, 1), for acceptance."""
    high, low, _, _ = decision.key.words(PURPOSE)
    return ((high << 32 | low) >> (64 - _UNIFORM_BITS)) * 2.0**-_UNIFORM_BITS


def _recover(masses: Tensor, rejected: Sequence[_Rejected]) -> list[int]:
    """A token from max(p - q, 0) for each, by inversion: [num draft tokens, num_ids] int64 masses of p."""
    if not rejected:
        return []
    target = masses.index_select(0, upload_ids([each.row for each in rejected], masses.device))
    totals = [total for (total,) in download(target.sum(dim=1, keepdim=True))]
    num_ids = masses.shape[1]
    left = target.clone()
    for row, (each, total) in enumerate(zip(rejected, totals, strict=True)):
        known = [(i, w) for i, w in zip(each.distribution.token_ids, each.distribution.probabilities, strict=True)]
        scale = total / each.distribution.total
        ids = upload_ids([token_id for token_id, _ in known if token_id < num_ids], masses.device)
        drafted = upload_ids([round(weight * scale) for token_id, weight in known if token_id < num_ids], masses.device)
        left[row, ids] = (left[row, ids] - drafted).clamp_(min=0)
    # p and q may be equal but for rounding, which leaves nothing.
    left = torch.where(left.sum(dim=1, keepdim=True) > 0, left, target)
    cumulative = left.cumsum(dim=1)
    sums = [total for (total,) in download(cumulative[:, -1:])]
    places = [_place(each.decision, total) for each, total in zip(rejected, sums, strict=True)]
    found = torch.searchsorted(cumulative, upload_ids(places, masses.device).unsqueeze(1), right=True)
    return [token_id for (token_id,) in download(found)]


def _place(decision: Decision, total: int) -> int:
    """A whole number in [0, total)."""
    _, _, high, low = decision.key.words(PURPOSE)
    return ((high << 32 | low) * total) >> 64
