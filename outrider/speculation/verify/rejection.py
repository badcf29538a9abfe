"""Rejection sampling: a draft token x is accepted with probability min(1, p(x) / q(x)).

p is the target's distribution after all SamplingParams are applied, q the distribution that the drafter drew x from.
After a rejection the recovered token is drawn from max(p - q, 0), renormalised. Committed tokens have the distribution
p for any q, if x was drawn from q independently of the random words that decide about it. A drafter that does not draw,
e.g. a lookup, has q(x) = 1. This is valid unless the drafter repeats earlier decisions of this method that used the
same random words, for example when a request is sent again with the same seed. So lookups do not remember the tokens
that rejection sampling decided.

Source: Leviathan et al. 2022 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).

The random words are those of purpose 2 of the decision's generator: words 0 and 1 decide acceptance, 2 and 3 the
recovered token. The race's words (purposes 0 and 1) decide bonus tokens here and drafts in the drafter, but never both
at one position, because a position whose draft token is verified is decided by purpose 2 alone.

The probabilities of p are kept as unnormalised integer masses (see `elementary`), and operations on them round as IEEE
754 prescribes for float64. So a decision depends neither on the device nor on the batch. All operations are queued on
the logits' device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from outrider.engine.arrays import Array, Arrays, ids_like, namespace, to_array_like
from outrider.engine.pending import Pending
from outrider.engine.sampler import Sampler, SampleRows
from outrider.speculation.token_distribution import TokenDistribution, certain
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.rows import draft_token_masses, row_starts

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PURPOSE = 2
_UNIFORM_BITS = 53
_WORD = 0xFFFFFFFF


class RejectionVerifier:
    """Rejection sampling. It is exact in distribution; the tokens themselves depend on the drafts."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def queue(self, logits: Array, drafts: Sequence[DraftRows]) -> Pending[list[Verified]]:
        xp = namespace(logits)
        starts = row_starts(drafts)
        num_drafts = [len(draft.draft_token_ids) for draft in drafts]
        last_rows = ids_like([start + num for start, num in zip(starts, num_drafts, strict=True)], logits)
        # The race decides the token after a fully accepted draft, as it does without a draft.
        following = self._sampler.decide(logits[last_rows], [_after_draft(draft.rows) for draft in drafts])
        num_accepted = xp.zeros_like(last_rows)
        if any(num_drafts):
            masses = draft_token_masses(self._sampler, logits, drafts)
            num_accepted, recovered = _accept(masses, drafts, num_drafts)
            following = xp.where(num_accepted == ids_like(num_drafts, logits), following, recovered)
        rows = np.asarray(
            [
                (sequence, index, token_id)
                for sequence, draft in enumerate(drafts)
                for index, token_id in enumerate((*draft.draft_token_ids, 0))
            ],
            dtype=np.int64,
        )
        sequences, indices, token_ids = to_array_like(rows.T, logits)  # each [num_rows]
        token_ids = xp.where(indices < num_accepted[sequences], token_ids, following[sequences])
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

        return Pending((num_accepted, *sampled.arrays), finish)


def _accept(masses: Array, drafts: Sequence[DraftRows], num_drafts: Sequence[int]) -> tuple[Array, Array]:
    """Returns, for each draft, the number of accepted tokens and the token in place of the first rejected one.

    Both are [num_seqs] int64. The second has no meaning if the whole draft was accepted. `masses`: the masses of p,
    [num draft tokens, num_ids] int64.
    """
    xp = namespace(masses)
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
        _uniform(*each[:2]) * distribution.probability_of(token_id)
        for each, distribution, token_id in zip(words, distributions, token_ids, strict=True)
    ]
    ids = ids_like(token_ids, masses)
    within = xp.clip(ids, max=masses.shape[1] - 1)
    own = xp.take_along_axis(masses, within[:, None], axis=1)[:, 0]
    probs = xp.astype(own, xp.float64) / xp.astype(xp.sum(masses, axis=1), xp.float64)
    # An id beyond the vocabulary has no mass and is never accepted.
    is_accepted = (to_array_like(np.asarray(bounds, dtype=np.float64), masses) < probs) & (ids == within)

    firsts = list(accumulate(num_drafts[:-1], initial=0))  # index of each draft's first token
    longest = max(num_drafts)
    table = [
        [first + index if index < num else len(token_ids) for index in range(longest)]
        for first, num in zip(firsts, num_drafts, strict=True)
    ]
    places = np.asarray(table, dtype=np.int64)  # [num_seqs, longest]: draft token indices, padded with len(token_ids)
    stands = xp.concat([xp.astype(is_accepted, xp.int64), xp.zeros_like(ids[:1])])[to_array_like(places.ravel(), ids)]
    num_accepted = xp.sum(xp.cumulative_prod(xp.reshape(stands, places.shape), axis=1), axis=1)
    first_rejected = xp.clip(ids_like(firsts, ids) + num_accepted, max=len(token_ids) - 1)
    recovery_words = to_array_like(np.asarray([each[2:] for each in words], dtype=np.int64), ids)[first_rejected]
    drafted = [to_array_like(each, ids)[first_rejected] for each in _weights(distributions, masses.shape[1])]
    return num_accepted, _recover(masses[first_rejected], drafted, recovery_words)


def _after_draft(rows: SampleRows) -> SampleRows:
    """Returns only the row after the last draft token."""
    assumed_token_ids = rows.assumed_token_ids + rows.draft_token_ids
    return SampleRows(rows.state, rows.position + len(rows.draft_token_ids), assumed_token_ids=assumed_token_ids)


def _uniform(high: int, low: int) -> float:
    """Returns a uniform number in [0, 1) from two random words."""
    return ((high << 32 | low) >> (64 - _UNIFORM_BITS)) * 2.0**-_UNIFORM_BITS


def _weights(distributions: Sequence[TokenDistribution], num_ids: int) -> tuple[Ints, Floats, Floats]:
    """Returns ids and weights of each q, [n, longest] int64 and float64, and the sums of weights [n] float64.

    Ids beyond the vocabulary are left out. Shorter rows are padded with their first pair.
    """
    known = [
        [pair for pair in zip(each.token_ids, each.probabilities, strict=True) if pair[0] < num_ids] or [(0, 0.0)]
        for each in distributions
    ]
    longest = max(map(len, known))
    filled = [pairs + pairs[:1] * (longest - len(pairs)) for pairs in known]
    ids = np.asarray([[token_id for token_id, _ in pairs] for pairs in filled], dtype=np.int64)
    weights = np.asarray([[weight for _, weight in pairs] for pairs in filled], dtype=np.float64)
    return ids, weights, np.asarray([each.total for each in distributions], dtype=np.float64)


def _recover(target: Array, drafted: Sequence[Array], words: Array) -> Array:
    """Draws a token from max(p - q, 0) for each row, by inversion. Returns [num_rows] int64.

    Args:
        target: [num_rows, num_ids] int64, masses of p.
        drafted: q, as returned by `_weights`.
        words: [num_rows, 2] int64, two random words.
    """
    xp = namespace(target)
    ids, weights, totals = drafted
    scales = xp.astype(xp.sum(target, axis=1), xp.float64) / totals
    masses = xp.astype(xp.round(weights * scales[:, None]), xp.int64)
    left = xp.astype(target, xp.int64)
    rows = xp.arange(target.shape[0], device=target.device)[:, None]
    left[rows, ids] = xp.clip(xp.take_along_axis(target, ids, axis=1) - masses, min=0)
    # If p and q are equal except for rounding, nothing is left to draw from, and p itself is used.
    left = xp.where(xp.sum(left, axis=1, keepdims=True) > 0, left, target)
    cumulative = xp.cumulative_sum(left, axis=1)
    places = _uniform_below(words, cumulative[:, -1])
    return xp.sum(cumulative <= places[:, None], axis=1)


def _uniform_below(words: Array, totals: Array) -> Array:
    """Returns, for each total, a uniform integer in [0, total).

    It is the high half of the product of the total and 64 random bits. words: [n, 2] int64, two random words; totals:
    [n] int64, positive.
    """
    high, low = words[:, 0], words[:, 1]
    total_high, total_low = totals >> 32, totals & _WORD
    # A product of two words may wrap around to a negative int64, but its bits are still those of the product.
    middle, other = high * total_low, low * total_high
    carry = (((low * total_low) >> 32) & _WORD) + (middle & _WORD) + (other & _WORD)
    return high * total_high + ((middle >> 32) & _WORD) + ((other >> 32) & _WORD) + (carry >> 32)
