"""The interface of everything that guesses tokens."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from outrider.node import FeatureFormat
from outrider.speculation.draft_stream import NUM_EXTRA_TOKENS, SequenceStart
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.features import Features

if TYPE_CHECKING:
    from outrider.constraints.compiler import GrammarState


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
    looks_ahead: bool = False  # the update is answered; branches ahead of the next one are wanted
    owner: int = 0  # the decode node; owners share the look-ahead equally
    features: Features | None = None  # for a head; None where no target computes any
    constraint: GrammarState | None = None  # that has followed token_ids; None: there is none, or not here
    min_reach: float = 0.0  # the draft ends with a token that the text goes through with less probability than this


class Progress(enum.Enum):
    """State of a request's draft."""

    DONE = "done"
    DRAFTING = "drafting"  # incomplete; call again
    CATCHING_UP = "catching_up"  # the prefix is still being computed; call again, with the newest state


class AheadBranch(NamedTuple):
    """A draft that follows if the text goes on with `assumed_token_ids`."""

    assumed_token_ids: tuple[int, ...]  # after the request's committed tokens
    tree: DraftTree  # after both


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A draft after the request's committed tokens; empty when there is no guess, or none yet."""

    sequence_id: int
    tree: DraftTree
    progress: Progress = Progress.DONE
    num_behind: int = 0  # committed tokens that are still to be read, of a request that is CATCHING_UP
    ahead: tuple[AheadBranch, ...] = ()  # where the request looks ahead: branches to send
    has_more: bool = False  # look-ahead can continue in another call


MAX_SEQUENCES = 512
"""That a draft node holds, of all decode nodes together: a forward has a row for each."""

MAX_INDEXED_TOKENS = 1024
"""Of one call of a proposer that indexes texts: 3 to 10 ms. A long prompt is indexed in several calls."""

MAX_INDEX_BYTES = 256 << 20
"""Of all texts that a proposer indexes: ten million tokens for `ngram`, half a million for `suffix`."""


def nothing(request: ProposalRequest, progress: Progress = Progress.DONE, **fields: Any) -> Proposal:
    """No guess, or none yet. `fields`: others of a Proposal."""
    tree = DraftTree(len(request.token_ids))
    return Proposal(sequence_id=request.sequence_id, tree=tree, progress=progress, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerInfo:
    """What a proposer says of itself; it does not change."""

    name: str  # as in ModelInfo.proposer: "ngram", "draft_model:NAME"
    vocabulary_fingerprint: str = ""  # of the ids it proposes; empty: works on any vocabulary
    num_extra_tokens: int = NUM_EXTRA_TOKENS  # offered beyond what is wanted: the rest serves the next step
    can_look_ahead: bool = False  # drafting while the target verifies gains something
    features: FeatureFormat | None = None  # of the target, that a head needs; None: no features are needed
    memory_bytes: int = 0  # the most that it holds of its sequences, besides a model's weights
    needs_constraint: bool = False  # it proposes for sequences that have one, and for no others
    description: Mapping[str, Any] = field(default_factory=dict)  # how its model is computed; empty without a model


class Proposer(Protocol):
    """Guesses tokens for a batch of sequences. One owner thread.

    What a proposer remembers of a sequence is a cache keyed by tokens: losing it costs
    time, and a sequence whose tokens turn out to be others than before is simply learnt
    anew. A sequence_id names one sequence until `forget`.
    """

    @property
    def info(self) -> ProposerInfo: ...

    @property
    def num_wasted_tokens(self) -> int:
        """Tokens drafted by a model that were never committed, since start."""

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """One proposal for each request, in their order.

        At most `num_wanted` tokens each, besides siblings where the sequence takes trees. Work in one call is bounded:
        a model makes at most one forward pass and a rollout, and a request that needs more comes back as DRAFTING or
        CATCHING_UP. A call that raises leaves what is remembered of each sequence as good as it was: it may be made
        again.
        """

    def forget(self, sequence_id: int) -> None:
        """Frees what is held of a sequence; an unknown one is fine."""
