"""The interface of everything that guesses tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """One sequence that wants draft tokens. Never changed by a proposer.

    `token_ids` may be the caller's own growing list: read during `propose`, never kept.
    """

    sequence_id: int
    token_ids: Sequence[int]  # committed: prompt and generated
    num_wanted: int  # 0: only keep up
    start: SequenceStart | None = None  # how it samples; None where the proposer needs no sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A draft after the request's committed tokens; empty when there is no guess."""

    sequence_id: int
    tree: DraftTree
    caught_up: bool = True  # False: still computing the prefix, ask again with the newest state
    num_computed: int = 0  # while not caught up: tokens of the prefix


class Proposer(Protocol):
    """Guesses tokens for a batch of sequences. One owner thread.

    What a proposer remembers of a sequence is a cache keyed by tokens: losing it costs
    time, and a sequence whose tokens turn out to be others than before is simply learnt
    anew. A sequence_id names one sequence until `forget`.
    """

    @property
    def name(self) -> str:
        """As in ModelInfo.proposer: "ngram", "draft_model:NAME"."""

    @property
    def vocabulary_fingerprint(self) -> str:
        """Of the ids it proposes; empty: works on any vocabulary."""

    @property
    def description(self) -> Mapping[str, Any]:
        """What its node tells of it at start: how its model is computed; empty without a model."""

    @property
    def num_extra_tokens(self) -> int:
        """Worth proposing beyond what is wanted now, so that what is left over serves the next step."""

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, in their order.

        At most `num_wanted` tokens each. Work in one call is bounded: a sequence whose
        prefix is not computed yet comes back with caught_up False. A call that raises
        leaves what is remembered of each sequence as good as it was: it may be made again.
        """

    def forget(self, sequence_id: int) -> None:
        """Frees what is held of a sequence; an unknown one is fine."""
