"""Proposes the tokens that a sequence's grammar forces: names of properties, brackets, the rest of a choice.

They are drafts like others: a text may be spelt in more than one sequence of tokens, and the target decides in which.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.constraints.base import ConstraintCompiler, SequenceConstraint
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import Proposal, ProposalRequest, ProposerInfo, nothing


class GrammarProposer:
    """A `Proposer` for constrained sequences. One owner thread."""

    def __init__(self, constraints: ConstraintCompiler) -> None:
        self.info = ProposerInfo(name="grammar", needs_constraint=True)
        self.num_wasted_tokens = 0
        self._constraints = constraints
        self._followed: dict[int, tuple[SequenceConstraint, int]] = {}  # and the tokens that it knows, by sequence

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, empty where the grammar leaves a choice."""
        return [self._propose(request) for request in requests]

    def forget(self, sequence_id: int) -> None:
        self._followed.pop(sequence_id, None)

    def _propose(self, request: ProposalRequest) -> Proposal:
        text, start = request.token_ids, request.start
        if start is None or start.options.sampling.constraint is None:
            return nothing(request)
        followed = self._followed.get(request.sequence_id)
        if followed is None:
            followed = self._constraints.start(start.options.sampling.constraint), start.prompt_length
        constraint, num_known = followed
        constraint.commit(text[num_known:])
        self._followed[request.sequence_id] = constraint, len(text)
        token_ids = tuple(constraint.forced_tokens()[: request.num_wanted]) if request.num_wanted > 0 else ()
        return Proposal(sequence_id=request.sequence_id, tree=DraftTree(len(text), token_ids=token_ids))
