"""Several proposers, one below the other: a sequence for which one has nothing is served by the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.speculation.proposers.base import Progress, Proposal, ProposalRequest, Proposer


class LadderProposer:
    """A `Proposer` over two or more. One owner thread.

    A step down is taken for one sequence and one draft: the upper proposer is asked again for the next. It is taken
    when the upper one is done and has no guess: no room, a text too long for it, or nothing to say. What still
    drafts or catches up is waited for. Only the first may look ahead.
    """

    def __init__(self, rungs: Sequence[Proposer]) -> None:
        """The best first. Those below it must work on any vocabulary."""
        assert len(rungs) >= 2
        assert not any(rung.vocabulary_fingerprint for rung in rungs[1:])
        self._rungs = tuple(rungs)

    @property
    def name(self) -> str:
        return " > ".join(rung.name for rung in self._rungs)

    @property
    def vocabulary_fingerprint(self) -> str:
        return self._rungs[0].vocabulary_fingerprint

    @property
    def description(self) -> Mapping[str, Any]:
        return self._rungs[0].description

    @property
    def num_extra_tokens(self) -> int:
        return self._rungs[0].num_extra_tokens

    @property
    def can_look_ahead(self) -> bool:
        return self._rungs[0].can_look_ahead

    @property
    def num_wasted_tokens(self) -> int:
        return self._rungs[0].num_wasted_tokens

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, of the first proposer that has one."""
        found = self._rungs[0].propose(requests)
        for rung in self._rungs[1:]:
            places = [
                place
                for place, (request, proposal) in enumerate(zip(requests, found, strict=True))
                if _has_nothing(proposal) and request.num_wanted > 0 and not request.looks_ahead
            ]
            if not places:
                break
            for place, proposal in zip(places, rung.propose([requests[place] for place in places]), strict=True):
                found[place] = proposal
        return found

    def forget(self, sequence_id: int) -> None:
        """Frees what any of them holds of a sequence; an unknown one is fine."""
        for rung in self._rungs:
            rung.forget(sequence_id)


def _has_nothing(proposal: Proposal) -> bool:
    return proposal.progress is Progress.DONE and not proposal.tree
