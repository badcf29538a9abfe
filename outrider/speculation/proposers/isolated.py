"""A failure of a proposer costs the sequences that it fails for their drafts, and nobody else anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import Proposal, ProposalRequest, Proposer

BENCH_SECONDS = 1.0
"""A sequence that made the proposer fail is not asked for again for so long."""

MAX_FAILED_CALLS = 16
"""In one `propose`: enough to find two sequences among some hundred; a proposer that fails for all ends sooner."""

OnFailure = Callable[[Exception, Sequence[int]], None]
"""on_failure(error, sequence_ids): those get no drafts for a while."""


class IsolatedProposer:
    """A `Proposer` around another one; never raises. One owner thread.

    A batch that raises is asked for again in halves, until those that cannot be served
    stand alone: proposers keep no more than a cache of each sequence, so asking twice costs
    time only. What stands alone is forgotten, and gets nothing until `BENCH_SECONDS` have
    passed: a sequence that always fails must not cost every step its batch.
    """

    def __init__(
        self, proposer: Proposer, *, on_failure: OnFailure, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._proposer = proposer
        self._on_failure = on_failure
        self._clock = clock
        self._benched_until: dict[int, float] = {}

    @property
    def name(self) -> str:
        return self._proposer.name

    @property
    def vocabulary_fingerprint(self) -> str:
        return self._proposer.vocabulary_fingerprint

    @property
    def description(self) -> Mapping[str, Any]:
        return self._proposer.description

    @property
    def num_extra_tokens(self) -> int:
        return self._proposer.num_extra_tokens

    @property
    def can_look_ahead(self) -> bool:
        return self._proposer.can_look_ahead

    @property
    def num_wasted_tokens(self) -> int:
        return self._proposer.num_wasted_tokens

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, empty for those that fail."""
        now = self._clock()
        found: dict[int, Proposal] = {}
        groups = [[request for request in requests if self._benched_until.get(request.sequence_id, now) <= now]]
        calls_left = MAX_FAILED_CALLS
        while groups:
            group = groups.pop()
            if not group:
                continue
            try:
                found.update((proposal.sequence_id, proposal) for proposal in self._proposer.propose(group))
            except Exception as error:  # noqa: BLE001 a proposal is advice: no failure of one may end its owner
                calls_left -= 1
                if len(group) == 1 or calls_left <= 0:
                    self._bench(group, error, now)
                else:
                    middle = len(group) // 2
                    groups += [group[middle:], group[:middle]]
        return [
            found.get(request.sequence_id)
            or Proposal(sequence_id=request.sequence_id, tree=DraftTree(len(request.token_ids)))
            for request in requests
        ]

    def forget(self, sequence_id: int) -> None:
        """Frees what is held of a sequence; an unknown one is fine."""
        self._benched_until.pop(sequence_id, None)
        self._proposer.forget(sequence_id)

    def _bench(self, requests: Sequence[ProposalRequest], error: Exception, now: float) -> None:
        sequence_ids = [request.sequence_id for request in requests]
        for sequence_id in sequence_ids:
            self._proposer.forget(sequence_id)
            self._benched_until[sequence_id] = now + BENCH_SECONDS
        self._on_failure(error, sequence_ids)
