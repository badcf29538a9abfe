"""A proposer that knows the answers."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import Proposal, ProposalRequest, ProposerInfo


class ScriptedProposer:
    """Continues the first of its texts that begins with a request's tokens.

    With the target's own answers as texts it is an oracle; with wrong ones, an adversary.
    `requests` records what it was asked, newest last.
    """

    def __init__(self, texts: Sequence[Sequence[int]], *, num_extra_tokens: int = 0) -> None:
        self.info = ProposerInfo(name="scripted", num_extra_tokens=num_extra_tokens)
        self.num_wasted_tokens = 0
        self.requests: list[ProposalRequest] = []
        self.forgotten: list[int] = []
        self._texts = [tuple(text) for text in texts]

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        self.requests.extend(requests)
        return [
            Proposal(
                sequence_id=request.sequence_id,
                tree=DraftTree(
                    len(request.token_ids),
                    token_ids=self._continuation(tuple(request.token_ids), request.num_wanted),
                ),
            )
            for request in requests
        ]

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)

    def _continuation(self, token_ids: tuple[int, ...], num_wanted: int) -> tuple[int, ...]:
        size = len(token_ids)
        for text in self._texts:
            if text[:size] == token_ids:
                return text[size : size + num_wanted]
        return ()
