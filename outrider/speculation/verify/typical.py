"""Typical acceptance. LOSSY: committed tokens do not have the target model's distribution.

A draft token x is accepted if it is the token that the race at its position chooses, as in coupled sampling, or if the
target finds it likely enough by itself:

    p(x) > min(threshold, alpha * exp(-H(p)))

where H is the entropy of p in nats: the bound is lower if the target is undecided. Otherwise the race's token is
committed. So acceptance is never below that of coupled sampling, and the text leans towards the drafter's.

Entropies are sums of float64 logarithms, which libraries round differently. So if a probability is within such a
rounding difference of its bound, one node may accept a token that another rejects.

Source: Cai et al. 2024, "Medusa" (arXiv 2401.10774), with its threshold 0.09 and alpha 0.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.arrays import Array, ids_like, namespace
from outrider.engine.pending import Pending
from outrider.engine.sampler import Sampler
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.coupled import accept_drafts
from outrider.speculation.verify.rows import draft_token_masses, draft_token_rows

THRESHOLD = 0.09
ALPHA = 0.3


class TypicalVerifier:
    """Typical acceptance, which trades fidelity for more accepted tokens. It is used only if a request or the router's
    setting chooses it.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def queue(self, logits: Array, drafts: Sequence[DraftRows]) -> Pending[list[Verified]]:
        rows = [draft.rows for draft in drafts]
        token_ids = self._sampler.decide(logits, rows)
        if any(draft.draft_token_ids for draft in drafts):
            token_ids = self._with_typical(token_ids, logits, drafts)
        sampled = self._sampler.with_logprobs(logits, rows, token_ids)
        return Pending(sampled.arrays, lambda arrays: accept_drafts(drafts, sampled.finish(arrays)))

    def _with_typical(self, decided: Array, logits: Array, drafts: Sequence[DraftRows]) -> Array:
        """Returns the decisions [num_rows] int64; draft tokens that are likely enough replace those of the race."""
        xp = namespace(logits)
        masses = draft_token_masses(self._sampler, logits, drafts)
        token_ids = ids_like([token_id for draft in drafts for token_id in draft.draft_token_ids], logits)
        probs = xp.astype(masses, xp.float64) / xp.sum(masses, axis=1, keepdims=True)  # [num draft tokens, num_ids]
        entropy = -xp.sum(probs * xp.log(xp.where(probs > 0.0, probs, 1.0)), axis=1)
        bounds = xp.clip(ALPHA * xp.exp(-entropy), max=THRESHOLD)
        within = xp.clip(token_ids, max=probs.shape[1] - 1)
        own = xp.take_along_axis(probs, within[:, None], axis=1)[:, 0]
        rows = ids_like(draft_token_rows(drafts), logits)
        chosen = xp.astype(decided, xp.int64)
        chosen[rows] = xp.where((own > bounds) & (within == token_ids), token_ids, decided[rows])
        return chosen
