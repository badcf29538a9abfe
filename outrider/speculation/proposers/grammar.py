"""Proposes the tokens that a sequence's grammar forces: names of properties, brackets, the rest of a choice.

Proposals are ordinary drafts that the target verifies, because several token sequences may spell the forced text, and
the target chooses one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import Proposal, ProposalRequest, ProposerInfo, nothing


class GrammarProposer:
    """A `Proposer` for constrained sequences. It runs in the sampler's process, whose grammar states it needs."""

    def __init__(self) -> None:
        self.info = ProposerInfo(name="grammar", needs_constraint=True)
        self.num_wasted_tokens = 0

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Returns one proposal for each request, empty if the grammar leaves a choice."""
        return [_propose(request) for request in requests]

    def forget(self, sequence_id: int) -> None:
        """Does nothing, as nothing is remembered."""


def _propose(request: ProposalRequest) -> Proposal:
    if request.constraint is None or request.num_wanted <= 0:
        return nothing(request)
    token_ids = tuple(request.constraint.forced_tokens()[: request.num_wanted])
    return Proposal(sequence_id=request.sequence_id, tree=DraftTree(len(request.token_ids), token_ids=token_ids))
