"""Limits a proposer's failures to the sequences that cause them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outrider.speculation.proposers.base import Proposal, ProposalRequest, Proposer, nothing

COOLDOWN_SECONDS = 1.0
"""Seconds for which the proposer is not called again for a sequence that made it fail."""

ALL_COOLDOWN_SECONDS = COOLDOWN_SECONDS / 4
"""Seconds without any call after a search that served no sequence. The next search skips sequences in cooldown."""

MAX_FAILED_CALLS = 16
"""Maximum number of failed calls in one `propose`: enough to find two bad sequences among some hundred. The search
continues in the next call."""

OnFailure = Callable[[Exception, int], None]
"""on_failure(error, sequence_id) is called when a sequence begins its cooldown."""


class IsolatedProposer:
    """Wraps a `Proposer` and never raises. One thread owns it.

    If a call raises, its batch is divided into halves, which are tried again, until each failing sequence is found. A
    proposer has only a cache of each sequence, so repeated calls cost only time. A failing sequence is forgotten, and
    the proposer is not called for it during `COOLDOWN_SECONDS`, so that it cannot cause the division of the batch in
    every step.

    After `MAX_FAILED_CALLS` failures the remaining requests get no draft in this call, but they are not forgotten. If
    no sequence was served by then, the proposer is not called at all for `ALL_COOLDOWN_SECONDS`.
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
        """Returns one proposal for each request, empty if the proposer failed or was not called for the sequence."""
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
        """Returns proposals by sequence id. Sequences that fail are absent."""
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
