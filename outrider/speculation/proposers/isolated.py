"""Limits a proposer's failures to the sequences that cause them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outrider.speculation.proposers.base import Proposal, ProposalRequest, Proposer, nothing

COOLDOWN_SECONDS = 1.0
"""Seconds for which a sequence that made the proposer fail is not asked for again."""

ALL_COOLDOWN_SECONDS = COOLDOWN_SECONDS / 4
"""Seconds without any call after a search that served no sequence; the next search leaves out what was found."""

MAX_FAILED_CALLS = 16
"""Failed calls in one `propose`: enough to find two bad sequences among some hundred. The next call searches on."""

OnFailure = Callable[[Exception, int], None]
"""on_failure(error, sequence_id) is called for a sequence that gets no drafts for a while."""


class IsolatedProposer:
    """Wraps a `Proposer`; never raises. One owner thread.

    If a call raises, its batch is divided in halves and asked for again, until sequences that fail stand alone:
    proposers keep only a cache of each sequence, so asking twice costs nothing but time. Such a sequence is forgotten,
    and not asked for until `COOLDOWN_SECONDS` have passed: a sequence that always fails must not cost every step its
    batch.

    After `MAX_FAILED_CALLS` the remaining requests get no draft in this call, and nothing of them is forgotten. If no
    sequence was served until then, the proposer is not called for `ALL_COOLDOWN_SECONDS`.
    """

    def __init__(
        self, proposer: Proposer, *, on_failure: OnFailure, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.info = proposer.info
        self._proposer = proposer
        self._on_failure = on_failure
        self._clock = clock
        self._cooldown_until: dict[int, float] = {}  # by sequence
        self._all_cooldown_until = clock()

    @property
    def num_wasted_tokens(self) -> int:
        return self._proposer.num_wasted_tokens

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Returns one proposal for each request, an empty one for those that fail."""
        now = self._clock()
        tried = [each for each in requests if self._cooldown_until.get(each.sequence_id, now) <= now]
        found = self._search(tried, now) if tried and self._all_cooldown_until <= now else {}
        return [
            found.get(request.sequence_id) or nothing(request, num_behind=len(request.token_ids))
            for request in requests
        ]

    def forget(self, sequence_id: int) -> None:
        self._cooldown_until.pop(sequence_id, None)
        self._proposer.forget(sequence_id)

    def _search(self, requests: Sequence[ProposalRequest], now: float) -> dict[int, Proposal]:
        """Returns proposals by sequence, without those that fail."""
        found: dict[int, Proposal] = {}
        groups = [requests]
        num_failed_calls = 0
        while groups and num_failed_calls < MAX_FAILED_CALLS:
            group = groups.pop()
            try:
                found.update((proposal.sequence_id, proposal) for proposal in self._proposer.propose(group))
            except Exception as error:  # noqa: BLE001 a proposal is advice: no failure of one may end its owner
                num_failed_calls += 1
                middle = len(group) // 2
                if middle:
                    groups += [group[middle:], group[:middle]]
                else:
                    self._cool_down(group[0].sequence_id, error, now)
        if groups and not found:
            self._all_cooldown_until = now + ALL_COOLDOWN_SECONDS
        return found

    def _cool_down(self, sequence_id: int, error: Exception, now: float) -> None:
        self._proposer.forget(sequence_id)
        self._cooldown_until[sequence_id] = now + COOLDOWN_SECONDS
        self._on_failure(error, sequence_id)
