"""Several proposers in order: a sequence for which one has nothing is served by the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.speculation.proposers.base import Progress, Proposal, ProposalRequest, Proposer


class LadderProposer:
    """A `Proposer` over two or more. One owner thread.

    The next proposer is asked for a draft when the one before it is done and has none: it had no room, the text was too
    long, or nothing matched. A draft in progress is waited for. The order is the same for each draft; only the first
    proposer may look ahead.
    """

    def __init__(self, rungs: Sequence[Proposer]) -> None:
        """The best first. Those below it must work on any vocabulary."""
        assert len(rungs) >= 2
        assert not any(rung.info.vocabulary_fingerprint for rung in rungs[1:])
        self._rungs = tuple(rungs)
        self.info = replace(
            rungs[0].info,
            name=" > ".join(rung.info.name for rung in rungs),
            memory_bytes=sum(rung.info.memory_bytes for rung in rungs),
        )

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
                if proposal.progress is Progress.DONE
                and not (proposal.tree or request.looks_ahead)
                and request.num_wanted > 0
            ]
            if not places:
                break
            for place, proposal in zip(places, rung.propose([requests[place] for place in places]), strict=True):
                found[place] = proposal
        return found

    def forget(self, sequence_id: int) -> None:
        for rung in self._rungs:
            rung.forget(sequence_id)
