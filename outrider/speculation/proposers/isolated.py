"""Limits a proposer's failure to the sequences that cause it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outrider.speculation.proposers.base import Progress, Proposal, ProposalRequest, Proposer, nothing

COOLDOWN_SECONDS = 1.0
"""A sequence that made the proposer fail is not asked for again for so long."""

MAX_FAILED_CALLS = 16
"""In one `propose`: enough to find two bad sequences among some hundred. The search goes on in the next call."""

MAX_FRUITLESS_SEARCHES = 4

OnFailure = Callable[[Exception, int], None]
"""on_failure(error, sequence_id): it gets no drafts for a while."""


class IsolatedProposer:
    """Wraps a `Proposer`; never raises. One owner thread.

    A batch that raises is asked for again in halves, until the sequences that cannot be served stand alone: proposers
    keep no more than a cache of each, so asking twice costs time only. Such a sequence is forgotten, and not asked for
    until `COOLDOWN_SECONDS` have passed: a sequence that always fails must not cost every step its batch.

    After `MAX_FAILED_CALLS` the requests that are left come back as DRAFTING, for the next call, and nothing of them is
    forgotten. A proposer that served nobody in `MAX_FRUITLESS_SEARCHES` in a row gets a cooldown as a whole.
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
        self._num_fruitless_searches = 0  # in a row, until now

    @property
    def num_wasted_tokens(self) -> int:
        return self._proposer.num_wasted_tokens

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, empty for those that fail."""
        now = self._clock()
        found: dict[int, Proposal] = {}
        if self._all_cooldown_until <= now:
            tried = [each for each in requests if self._cooldown_until.get(each.sequence_id, now) <= now]
            self._search(tried, found, now)
        return [
            found.get(request.sequence_id) or nothing(request, num_behind=len(request.token_ids))
            for request in requests
        ]

    def forget(self, sequence_id: int) -> None:
        self._cooldown_until.pop(sequence_id, None)
        self._proposer.forget(sequence_id)

    def _search(self, requests: Sequence[ProposalRequest], found: dict[int, Proposal], now: float) -> None:
        """Adds to `found`: what is proposed, and the requests that are left for the next call."""
        groups = [requests] if requests else []
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
        self._num_fruitless_searches = self._num_fruitless_searches + 1 if groups and not found else 0
        if self._num_fruitless_searches >= MAX_FRUITLESS_SEARCHES:
            self._num_fruitless_searches = 0
            self._all_cooldown_until = now + COOLDOWN_SECONDS
        else:
            untried = (request for group in groups for request in group)
            found.update((each.sequence_id, nothing(each, Progress.DRAFTING, has_more=True)) for each in untried)

    def _cool_down(self, sequence_id: int, error: Exception, now: float) -> None:
        self._proposer.forget(sequence_id)
        self._cooldown_until[sequence_id] = now + COOLDOWN_SECONDS
        self._on_failure(error, sequence_id)
