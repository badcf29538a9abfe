"""Rejection sampling: a draft token x is accepted with probability min(1, p(x) / q(x)).

p is the target's distribution after all of SamplingParams, q the one that the drafter drew x from. After a rejection
the recovered token is drawn from max(p - q, 0), renormalised. Committed tokens have the distribution p for any q, as
long as x was drawn from q, independently of the luck by which it is judged. A drafter that does not draw, as a lookup,
has q(x) = 1. That holds as long as it does not repeat what this method decided earlier with the same luck, for a
request that is sent again with its seed: lookups do not remember what was decided by rejection sampling.

Source: Leviathan et al. 2022 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).

Luck: purpose 2 of the decision's generator, words 0 and 1 for acceptance, 2 and 3 for the recovered token. The race's
arrivals (purposes 0 and 1) decide bonus tokens here and drafts in the drafter: never both for one position, because
a position whose draft token is looked at is decided by purpose 2 alone.

Probabilities of p are integer masses (see `elementary`), and what is done with them is rounded by IEEE 754's float64,
so a decision does not depend on the device, nor on the batch. All of it is queued on the logits' device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from outrider.engine.pending import Pending
from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.transfer import Arrays, upload, upload_ids
from outrider.speculation.token_distribution import TokenDistribution, certain
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.rows import draft_token_masses, row_starts

PURPOSE = 2
_UNIFORM_BITS = 53
_WORD = 0xFFFFFFFF


class RejectionVerifier:
    """Exact in distribution; the tokens themselves depend on the drafts."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @torch.inference_mode()
    def queue(self, logits: Tensor, drafts: Sequence[DraftRows]) -> Pending[list[Verified]]:
        device = logits.device
        starts = row_starts(drafts)
        num_drafts = [len(draft.draft_token_ids) for draft in drafts]
        last_rows = upload_ids([start + num for start, num in zip(starts, num_drafts, strict=True)], device)
        # The token after a draft that stands: the position's race decides it, as without a draft.
        following = self._sampler.decide(
            logits.index_select(0, last_rows), [_after_draft(draft.rows) for draft in drafts]
        )
        num_accepted = torch.zeros_like(last_rows)
        if any(num_drafts):
            masses = draft_token_masses(self._sampler, logits, drafts)
            num_accepted, recovered = _accept(masses, drafts, num_drafts)
            following = torch.where(num_accepted == upload_ids(num_drafts, device), following, recovered)
        rows = np.asarray(
            [
                (sequence, index, token_id)
                for sequence, draft in enumerate(drafts)
                for index, token_id in enumerate((*draft.draft_token_ids, 0))
            ],
            dtype=np.int64,
        )
        sequences, indices, token_ids = upload(rows.T, device).unbind(0)  # each [num_rows]
        stands = indices < num_accepted.index_select(0, sequences)
        token_ids = torch.where(stands, token_ids, following.index_select(0, sequences))
        sampled = self._sampler.with_logprobs(logits, [draft.rows for draft in drafts], token_ids)

        def finish(arrays: Arrays) -> list[Verified]:
            found = sampled.finish(arrays[1:])
            verified: list[Verified] = []
            for draft, start, accepted in zip(drafts, starts, arrays[0].tolist(), strict=True):
                end = start + accepted + 1
                has_logprobs = draft.rows.state.logprobs is not None
                logprobs = tuple(found.logprobs[start:end]) if has_logprobs else ()
                verified.append(Verified(tuple(found.token_ids[start:end]), logprobs))
            return verified

        return Pending((num_accepted, *sampled.tensors), finish)


def _accept(masses: Tensor, drafts: Sequence[DraftRows], num_drafts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """How many tokens of each draft stand, and what takes the place of the first that does not: each [num_seqs] int64.

    `masses`: [num draft tokens, num_ids] int64, of p. Where a whole draft stands, the second means nothing.
    """
    device = masses.device
    token_ids = [token_id for draft in drafts for token_id in draft.draft_token_ids]
    distributions = [
        draft.distributions[index] if draft.distributions else certain(token_id)
        for draft in drafts
        for index, token_id in enumerate(draft.draft_token_ids)
    ]
    words = [
        decision.key.words(PURPOSE)
        for draft in drafts
        for _, decision in zip(draft.draft_token_ids, draft.rows.decisions(), strict=False)
    ]
    bounds = [
        _uniform(*luck[:2]) * distribution.probability_of(token_id)
        for luck, distribution, token_id in zip(words, distributions, token_ids, strict=True)
    ]
    ids = upload_ids(token_ids, device)
    within = ids.clamp(max=masses.shape[1] - 1)
    own = masses.gather(1, within.unsqueeze(1)).squeeze(1)
    probs = own.to(torch.float64) / masses.sum(dim=1).to(torch.float64)
    # An id beyond the vocabulary has no mass.
    is_accepted = (upload(np.asarray(bounds, dtype=np.float64), device) < probs) & (ids == within)

    firsts = list(accumulate(num_drafts[:-1], initial=0))  # draft token of each draft
    most = max(num_drafts)
    table = [
        [first + index if index < num else len(token_ids) for index in range(most)]
        for first, num in zip(firsts, num_drafts, strict=True)
    ]
    places = upload(np.asarray(table, dtype=np.int64), device)  # [num_seqs, most], of draft tokens; behind them: none
    stands = torch.cat([is_accepted.to(torch.int64), is_accepted.new_zeros(1, dtype=torch.int64)])
    num_accepted = stands.index_select(0, places.flatten()).view(places.shape).cumprod(dim=1).sum(dim=1)
    first_rejected = (upload_ids(firsts, device) + num_accepted).clamp(max=len(token_ids) - 1)
    luck = upload(np.asarray([each[2:] for each in words], dtype=np.int64), device).index_select(0, first_rejected)
    weights = _weights(distributions, masses.shape[1], device)
    recovered = _recover(
        masses.index_select(0, first_rejected), [each.index_select(0, first_rejected) for each in weights], luck
    )
    return num_accepted, recovered


def _after_draft(rows: SampleRows) -> SampleRows:
    """The row after the draft, alone."""
    assumed_token_ids = rows.assumed_token_ids + rows.draft_token_ids
    return SampleRows(rows.state, rows.position + len(rows.draft_token_ids), assumed_token_ids=assumed_token_ids)


def _uniform(high: int, low: int) -> float:
    """In [0, 1), for acceptance."""
    return ((high << 32 | low) >> (64 - _UNIFORM_BITS)) * 2.0**-_UNIFORM_BITS


def _weights(
    distributions: Sequence[TokenDistribution], num_ids: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and weights of each q, [n, most] int64 and float64, and the sum of its weights [n].

    An id beyond the vocabulary has weight 0.
    """
    most = max(len(each.token_ids) for each in distributions)
    ids = np.zeros((len(distributions), most), dtype=np.int64)
    weights = np.zeros((len(distributions), most))
    for row, each in enumerate(distributions):
        ids[row, : len(each.token_ids)] = each.token_ids
        weights[row, : len(each.token_ids)] = each.probabilities
    weights[ids >= num_ids] = 0.0
    ids[ids >= num_ids] = 0
    totals = np.asarray([each.total for each in distributions])
    return upload(ids, device), upload(weights, device), upload(totals, device)


def _recover(target: Tensor, drafted: Sequence[Tensor], luck: Tensor) -> Tensor:
    """A token from max(p - q, 0) for each row, by inversion: [num_rows] int64.

    Args:
        target: [num_rows, num_ids] int64, masses of p.
        drafted: of q, as of `_weights`.
        luck: [num_rows, 2] int64, two words.
    """
    ids, weights, totals = drafted
    scales = target.sum(dim=1).to(torch.float64) / totals
    left = target.scatter_add(1, ids, -(weights * scales.unsqueeze(1)).round().to(torch.int64)).clamp_(min=0)
    # p and q may be equal but for rounding, which leaves nothing.
    left = torch.where(left.sum(dim=1, keepdim=True) > 0, left, target)
    cumulative = left.cumsum(dim=1)
    places = _share(luck, cumulative.select(1, -1))
    return torch.searchsorted(cumulative, places.unsqueeze(1), right=True).squeeze(1)


def _share(luck: Tensor, totals: Tensor) -> Tensor:
    """A whole number in [0, total) for each: the high half of the product of 64 bits of luck and the total.

    luck: [n, 2] int64, two words; totals: [n] int64, positive.
    """
    high, low = luck.unbind(1)
    total_high, total_low = totals >> 32, totals & _WORD
    # A product of two words may wrap to a negative number, whose bits are the product's.
    middle, other = high * total_low, low * total_high
    carry = (((low * total_low) >> 32) & _WORD) + (middle & _WORD) + (other & _WORD)
    return high * total_high + ((middle >> 32) & _WORD) + ((other >> 32) & _WORD) + (carry >> 32)
