"""The interface of proposers, which draft tokens."""

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


class ProposalRequest(NamedTuple):
    """A request for draft tokens of one sequence. A proposer never changes it.

    `token_ids` may be the caller's own list, if it only ever grows.
    """

    sequence_id: int
    token_ids: Sequence[int]  # the committed tokens: prompt and generated ones
    num_wanted: int  # 0: only read the tokens
    start: SequenceStart | None = None  # how the sequence samples; None: not known to the proposer
    max_alternatives: int = 0  # number of paths besides the main one that a look-ahead may follow; 0: no look-ahead
    looks_ahead: bool = False  # whether the last update was answered and branches ahead of the next update are wanted
    owner: int = 0  # the decode node; all owners have equal shares of the look-ahead
    features: Features | None = None  # the target's features, for a head; None: the target computes none
    constraint: GrammarState | None = None  # state after token_ids; None: no constraint, or state in another process
    verified: tuple[int, ...] | None = None  # for a look-ahead: the draft that the target verifies; None: not known
    min_reach: float = 0.0  # the draft ends with the first token whose path is less likely than this


class Progress(enum.Enum):
    """State of a request's draft."""

    DONE = "done"
    DRAFTING = "drafting"  # incomplete; call again
    CATCHING_UP = "catching_up"  # the prefix is still being read; call again, with the newest state


class AheadBranch(NamedTuple):
    """A draft that applies if the text continues with `assumed_token_ids`."""

    assumed_token_ids: tuple[int, ...]  # tokens after the request's committed tokens
    tree: DraftTree  # the draft after all these tokens


class Proposal(NamedTuple):
    """The answer to a request: a draft after the committed tokens. The draft is empty if there is no guess (yet)."""

    sequence_id: int
    tree: DraftTree
    progress: Progress = Progress.DONE
    num_behind: int = 0  # number of committed tokens that are not read yet, if CATCHING_UP
    ahead: tuple[AheadBranch, ...] = ()  # branches to send, if the request looks ahead
    has_more: bool = False  # whether look-ahead can continue in another call


MAX_SEQUENCES = 512
"""Maximum number of sequences in a draft node, of all decode nodes together. A forward has a row for each of them."""

MAX_INDEX_BYTES = 256 << 20
"""Limit of the memory for a lookup proposer's indexes: 32 million tokens for `ngram`, half a million for `suffix`."""


def nothing(request: ProposalRequest, progress: Progress = Progress.DONE, **fields: Any) -> Proposal:
    """Returns a proposal without a draft. `fields`: other fields of the Proposal."""
    tree = DraftTree(len(request.token_ids))
    return Proposal(sequence_id=request.sequence_id, tree=tree, progress=progress, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerInfo:
    """The properties of a proposer, which do not change."""

    name: str  # the value of ModelInfo.proposer, such as "ngram" or "draft_model:NAME"
    vocabulary_fingerprint: str = ""  # fingerprint of the only vocabulary that it works on; empty: any vocabulary
    num_extra_tokens: int = NUM_EXTRA_TOKENS  # tokens offered beyond num_wanted, for the next step
    can_look_ahead: bool = False  # whether drafting while the target verifies gains something
    features: FeatureFormat | None = None  # format of the target's features that a head needs; None: it needs none
    memory_bytes: int = 0  # limit of the memory that its sequences take, without a model's weights
    needs_constraint: bool = False  # whether it proposes only for sequences that have a constraint
    description: Mapping[str, Any] = field(default_factory=dict)  # how its model is computed; empty: it has no model


class Proposer(Protocol):
    """Guesses the next tokens of a batch of sequences. One thread owns it.

    A proposer's state of a sequence is a cache keyed by tokens: losing it costs only time, and a sequence whose tokens
    differ from the cached ones is read again. A sequence_id names one sequence until `forget`.
    """

    @property
    def info(self) -> ProposerInfo: ...

    @property
    def num_wasted_tokens(self) -> int:
        """Number of tokens that the proposer's model has drafted since its start and that were never committed."""

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        """Returns one proposal for each request, in their order.

        A draft has at most `num_wanted` tokens, plus siblings if the sequence takes trees. The work of a call is
        bounded: a model makes at most one forward pass and a rollout, and a request that needs more is answered with
        DRAFTING or CATCHING_UP. A call that raises leaves the state of every sequence intact, so it may be repeated.
        """

    def forget(self, sequence_id: int) -> None:
        """Frees the state of a sequence. Does nothing if the sequence is unknown."""
