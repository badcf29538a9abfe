"""A proposer that knows the answers: for tests and for trying things out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import Proposal, ProposalRequest


class ScriptedProposer:
    """Continues the first of its texts that begins with a request's tokens.

    With the target's own answers as texts it is an oracle; with wrong ones, an adversary.
    `requests` records what it was asked, newest last.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], *, vocabulary_fingerprint: str = "", num_extra_tokens: int = 0
    ) -> None:
        self._texts = [tuple(text) for text in texts]
        self._vocabulary_fingerprint = vocabulary_fingerprint
        self._num_extra_tokens = num_extra_tokens
        self.requests: list[ProposalRequest] = []
        self.forgotten: list[int] = []

    @property
    def name(self) -> str:
        return "scripted"

    @property
    def vocabulary_fingerprint(self) -> str:
        return self._vocabulary_fingerprint

    @property
    def description(self) -> Mapping[str, Any]:
        return {}

    @property
    def num_extra_tokens(self) -> int:
        return self._num_extra_tokens

    @property
    def can_look_ahead(self) -> bool:
        return False

    @property
    def num_wasted_tokens(self) -> int:
        return 0

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, empty where no text begins so."""
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
