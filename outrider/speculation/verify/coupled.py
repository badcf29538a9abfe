"""Coupled sampling: a draft token is accepted if and only if the exponential race at its position chooses it.

Source: Daliri, Musco, Suresh 2024 (arXiv 2408.07978); see docs/adr/0002. The committed tokens do not depend on the
draft or its source. In a draft tree, each row decides the token after the row's own path, and the text follows the path
whose tokens equal the decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.arrays import Array
from outrider.engine.pending import Pending
from outrider.engine.sampler import SampledRows, Sampler
from outrider.request import TokenLogprobs
from outrider.speculation.draft_tree import ROOT, num_common
from outrider.speculation.verify.base import DraftRows, Verified
from outrider.speculation.verify.rows import runs_of


class CoupledVerifier:
    """Coupled sampling, the default method."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def queue(self, logits: Array, drafts: Sequence[DraftRows]) -> Pending[list[Verified]]:
        sampled = self._sampler.queue(logits, [run for draft in drafts for run in runs_of(draft)])
        return Pending(sampled.arrays, lambda arrays: accept_drafts(drafts, sampled.finish(arrays)))


def accept_drafts(drafts: Sequence[DraftRows], sampled: SampledRows) -> list[Verified]:
    """Accepts, in each draft, the tokens before the first one that differs from the decision at its position."""
    decided = tuple(sampled.token_ids)
    verified: list[Verified] = []
    start = 0
    for draft in drafts:
        draft_token_ids = draft.rows.draft_token_ids
        end = start + len(draft_token_ids) + 1
        if draft.parents:
            verified.append(_of_tree(draft, decided[start:end], sampled.logprobs[start:end]))
        else:
            token_ids = accept(draft_token_ids, decided[start:end]) if draft_token_ids else decided[start:end]
            has_logprobs = draft.rows.state.logprobs is not None
            logprobs = tuple(sampled.logprobs[start : start + len(token_ids)]) if has_logprobs else ()
            verified.append(Verified(token_ids, logprobs))
        start = end
    return verified


def _of_tree(draft: DraftRows, decided: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Verified:
    path = accept_path(draft.draft_token_ids, draft.parents, decided)
    rows = [0, *(index + 1 for index in path)]
    return Verified(tuple(decided[row] for row in rows), tuple(logprobs[row] for row in rows), path)


def accept(draft_token_ids: tuple[int, ...], target_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tokens that the verification of a chain commits: its accepted tokens, plus one.

    `target_token_ids` holds len(draft) + 1 decisions of the target; entry j was decided after the first j draft tokens.
    The last returned token is the recovered token in place of the first rejected one, or the bonus token after a draft
    that was accepted whole.
    """
    assert len(target_token_ids) == len(draft_token_ids) + 1, "one decision per draft token and one more"
    return target_token_ids[: num_common(draft_token_ids, target_token_ids) + 1]


def accept_path(
    draft_token_ids: Sequence[int], parents: Sequence[int], target_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """Returns the indices of the accepted draft tokens of a tree, from the root on.

    Entry 0 of `target_token_ids` is the decision after the prefix, entry j + 1 the one after the path that ends with
    draft token j. Siblings differ, so at most one of them equals the decision.
    """
    assert len(target_token_ids) == len(draft_token_ids) + 1, "one decision per draft token and one more"
    assert len(parents) == len(draft_token_ids)
    path: list[int] = []
    last = ROOT
    for index, parent in enumerate(parents):  # parents come before their children
        if parent == last and draft_token_ids[index] == target_token_ids[last + 1]:
            path.append(index)
            last = index
    return tuple(path)
