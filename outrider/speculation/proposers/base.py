"""The interface of everything that guesses tokens."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.speculation.draft_stream import NUM_EXTRA_TOKENS, SequenceStart
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.token_distribution import TokenDistribution


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """One sequence that wants draft tokens. Never changed by a proposer.

    `token_ids` may be the caller's own list, if nothing but appending ever happens to it.
    """

    sequence_id: int
    token_ids: Sequence[int]  # committed: prompt and generated
    num_wanted: int  # 0: only keep up
    start: SequenceStart | None = None  # how it samples; None where the proposer needs no sampling
    max_alternatives: int = 0  # paths beside the main one that a look-ahead may follow; 0: no look-ahead
    looks_ahead: bool = False  # the draft has been given; branches ahead of the next one are wanted
    owner: int = 0  # whose sequence it is: owners share the look-ahead equally


class Progress(enum.Enum):
    """How far the draft of a request is."""

    DONE = "done"
    DRAFTING = "drafting"  # ask again: further tokens come in the next calls
    CATCHING_UP = "catching_up"  # still computing the prefix, ask again with the newest state


@dataclass(frozen=True, slots=True)
class AheadBranch:
    """What follows if the text goes on with `assumed_token_ids`."""

    assumed_token_ids: tuple[int, ...]  # after the request's committed tokens
    token_ids: tuple[int, ...]
    probability: float  # the proposer's estimate that the text does
    distributions: tuple[TokenDistribution, ...] = ()  # as in DraftTree
    parents: tuple[int, ...] = ()  # as in DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A draft after the request's committed tokens; empty when there is no guess, or none yet."""

    sequence_id: int
    tree: DraftTree
    progress: Progress = Progress.DONE
    num_computed: int = 0  # while catching up: tokens of the prefix
    ahead: tuple[AheadBranch, ...] = ()  # where the request looks ahead: what has become worth telling
    may_go_on: bool = False  # where it looks ahead: another call may find more


MAX_INDEXED_TOKENS = 1024
"""Of one call of a proposer that indexes texts: 3 to 10 ms. A long prompt is indexed in several calls."""


def catching_up(request: ProposalRequest, num_computed: int) -> Proposal:
    """No draft yet: so many of the tokens are known."""
    return Proposal(
        sequence_id=request.sequence_id,
        tree=DraftTree(len(request.token_ids)),
        progress=Progress.CATCHING_UP,
        num_computed=num_computed,
    )


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

    @property
    def can_look_ahead(self) -> bool:
        """Whether drafting on while the target verifies gains anything. False: it is never asked to."""

    @property
    def num_wasted_tokens(self) -> int:
        """Tokens drafted by a model that were never committed, since start."""

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, in their order.

        At most `num_wanted` tokens each, besides siblings where the sequence takes trees. Work in one call is bounded:
        a model makes at most one forward pass, and a request that needs more comes back as DRAFTING or CATCHING_UP.
        A call that raises leaves what is remembered of each sequence as good as it was: it
        may be made again.
        """

    def forget(self, sequence_id: int) -> None:
        """Frees what is held of a sequence; an unknown one is fine."""


class LookupProposer:
    """What proposers that look up texts have in common: no model, any vocabulary, nothing to compute ahead."""

    vocabulary_fingerprint = ""
    num_extra_tokens = NUM_EXTRA_TOKENS
    can_look_ahead = False
    num_wasted_tokens = 0

    @property
    def description(self) -> Mapping[str, Any]:
        return {}
