"""What one verification decided for one sample: what was accepted, cut where the request says so."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from outrider.request import FinishReason, TokenLogprobs
from outrider.session import SpeculationCounts
from outrider.speculation.verify.base import Verified


class Verdict(NamedTuple):
    """The tokens that are committed by this step, in order, and why the sample ends with them, if it does."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # empty, or one for each token
    finish_reason: FinishReason | None
    stop_token_id: int | None
    num_draft_tokens: int
    num_accepted: int  # accepted draft tokens, those behind a stop included

    def counts(self, *, wanting: bool, hit: bool) -> SpeculationCounts:
        """What it adds to the request's counts."""
        return _counts(self.num_draft_tokens, self.num_accepted, wanting, hit)


def judge(
    *,
    verified: Verified,
    num_draft_tokens: int,
    stop_token_ids: frozenset[int],
    num_tokens_left: int,  # of max_tokens, at least 1
) -> Verdict:
    """The accepted draft tokens and one token more, cut after the first token that ends the sample.

    On one token STOP wins over LENGTH.
    """
    token_ids = verified.token_ids
    if len(token_ids) < num_tokens_left and stop_token_ids.isdisjoint(token_ids):
        return Verdict(token_ids, _asked_for(verified.logprobs), None, None, num_draft_tokens, len(token_ids) - 1)
    token_ids = token_ids[:num_tokens_left]
    reason = FinishReason.LENGTH if len(token_ids) == num_tokens_left else None
    stop_token_id = None
    if not stop_token_ids.isdisjoint(token_ids):
        end = next(index for index, token_id in enumerate(token_ids) if token_id in stop_token_ids)
        token_ids, reason, stop_token_id = token_ids[: end + 1], FinishReason.STOP, token_ids[end]
    logprobs = _asked_for(verified.logprobs[: len(token_ids)])
    return Verdict(token_ids, logprobs, reason, stop_token_id, num_draft_tokens, verified.num_accepted)


def _asked_for(logprobs: tuple[TokenLogprobs | None, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple([value for value in logprobs if value is not None]) if logprobs else ()


@lru_cache(maxsize=4096)
def _counts(num_draft_tokens: int, num_accepted: int, wanting: bool, hit: bool) -> SpeculationCounts:  # noqa: FBT001 of one caller
    """One value for all verifications that went alike."""
    drafted = num_draft_tokens > 0
    return SpeculationCounts(
        num_spec_steps=int(drafted),
        num_draft_tokens=num_draft_tokens,
        num_accepted_draft_tokens=num_accepted,
        acceptance_histogram=(0,) * num_accepted + (1,) if drafted else (),
        num_wanting_steps=int(wanting),
        num_hit_steps=int(hit),
    )
