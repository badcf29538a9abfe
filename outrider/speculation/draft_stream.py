"""Messages between decode node and draft node, as plain Python values.

The proto mirror is `draft.proto`; `outrider.wire.draft` converts. Both sides send their newest state, never a backlog.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from outrider.errors import MismatchError
from outrider.node import FeatureFormat, NodeInfo
from outrider.protocol_versions import SUPPORTED_VERSIONS, ProtocolVersions, negotiate
from outrider.request import RequestOptions, VerificationMethod
from outrider.speculation.draft_tree import DraftTree

MAX_ANSWERS_PER_MESSAGE = 1024
MAX_BRANCHES_PER_MESSAGE = 4096
MAX_BRANCHES_PER_SEQUENCE = 32
"""Limits of one message. A peer that exceeds one of them is broken."""

MAX_AHEAD_BRANCHES = 4 * MAX_BRANCHES_PER_SEQUENCE
"""Maximum number of branches that may be sent ahead for one update. A branch that is sent again because it has grown
counts again. Further branches are stale."""

MAX_BRANCH_TOKENS = 32
"""Maximum number of tokens in a branch. A step does not verify more."""

MAX_PROPOSAL_TOKENS = 16
"""Maximum number of tokens that are offered in a branch, unless num_wanted is larger."""

NUM_EXTRA_TOKENS = 8
"""Tokens offered beyond num_wanted, so that a branch is still useful after the next commits."""

MAX_SIBLINGS = 8
"""Maximum number of tokens in a branch outside its likeliest path, if the decode node takes trees."""

MAX_FEATURE_BYTES_PER_MESSAGE = 1 << 20
"""Maximum size of the features in a message. Even on a fast network they delay other updates by a millisecond."""


def max_offered_tokens(num_wanted: int, *, takes_trees: bool = False) -> int:
    """Returns the maximum number of tokens in a branch: more than `num_wanted`, for the steps after the next one."""
    on_path = max(num_wanted, min(num_wanted + NUM_EXTRA_TOKENS, MAX_PROPOSAL_TOKENS))
    return on_path + MAX_SIBLINGS if takes_trees else on_path


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHello:
    """The decode node's first message."""

    incarnation: bytes  # 16 random bytes
    name: str
    vocab_size: int
    vocabulary_fingerprint: str
    max_model_len: int
    protocol_versions: ProtocolVersions = SUPPORTED_VERSIONS
    features: FeatureFormat | None = None  # format of the features that the decode node computes; None: none


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStart:
    """The sampling options of a sequence, which its first update contains."""

    options: RequestOptions
    sample: int
    prompt_length: int
    takes_trees: bool = False  # whether drafts may have branches
    traceparent: str = ""  # the decode node's span; empty: not traced

    @property
    def wants_distributions(self) -> bool:
        """Whether draft tokens must come with the distributions that they were drawn from."""
        options = self.options
        return options.verification_method is VerificationMethod.REJECTION and not options.sampling.is_greedy

    @property
    def takes_siblings(self) -> bool:
        """Whether a drafter's runners-up may be sent. They were not drawn, so the ratio test cannot use them."""
        return self.takes_trees and not self.wants_distributions


class FeatureOffer(NamedTuple):
    """Features that the draft node may read from the decode node's cache, by a transfer that has nothing else."""

    transfer_id: bytes
    end_token: int  # the transfer's start and end; tokens before it have features
    address: str  # host:port of the decode node's KV ingest


class SequenceUpdate(NamedTuple):
    """The newest state of one sequence (decode node → draft node)."""

    sequence_id: int
    start: SequenceStart | None = None  # set whenever start_length is 0
    start_length: int = 0  # position of the first token of token_ids; all tokens before it were acknowledged
    token_ids: tuple[int, ...] = ()
    length: int = 0  # start_length + len(token_ids)
    prefix_hash: int = 0
    num_wanted: int = 0
    closed: bool = False
    feature_start: int = 0  # position of the first token in `features`; earlier features were acknowledged
    features: bytes = b""  # features of tokens [feature_start, length - 1), or fewer, in the hello's format
    min_reach: float = 0.0  # see ProposalRequest
    feature_offer: FeatureOffer | None = None


class StepNotice(NamedTuple):
    """A step has begun that verifies a draft of a sequence (decode node → draft node)."""

    sequence_id: int
    length: int  # committed tokens
    token_ids: tuple[int, ...]  # the draft's likeliest path; empty: the step verifies no draft


class DraftStatus(enum.Enum):
    """The meaning of an answer; see DraftStatus in draft.proto."""

    PROPOSED = "proposed"
    CATCHING_UP = "catching_up"  # the draft node is still reading the tokens; one more answer follows
    NO_ROOM = "no_room"  # the draft node holds nothing of the sequence
    NOTHING = "nothing"
    UNKNOWN_PREFIX = "unknown_prefix"
    AHEAD = "ahead"  # more branches, sent after the answer


class SequenceProposals(NamedTuple):
    """Answer to one sequence's newest update, or more branches after it (draft node → decode node)."""

    sequence_id: int
    status: DraftStatus
    acked_length: int = 0
    branches: tuple[DraftTree, ...] = ()  # drafts, each with its prefix hash
    acked_features: int = 0  # number of leading tokens whose features the draft node holds


def check_fits(hello: DraftHello, info: NodeInfo) -> None:
    """Checks that the draft node can serve the decode node.

    Raises: MismatchError, which names both sides, if protocol versions do not overlap or if vocabularies or features
    differ.
    """
    negotiate(
        hello.protocol_versions,
        info.protocol_versions,
        us=f"decode node {hello.name}",
        them=f"draft node {info.name}",
    )
    draft_vocabulary = info.model.vocabulary_fingerprint if info.model is not None else ""
    if draft_vocabulary and draft_vocabulary != hello.vocabulary_fingerprint:
        raise MismatchError(
            f"decode node {hello.name} has vocabulary {hello.vocabulary_fingerprint[:16]}, "
            f"draft node {info.name} has vocabulary {draft_vocabulary[:16]}: a draft model needs the tokenizer of the "
            "target model (the same string for every id)",
            reason="VOCABULARY_MISMATCH",
        )
    needed = None if info.model is None else info.model.features
    if needed is not None and needed != hello.features:
        raise MismatchError(
            f"draft node {info.name} has a head for features {needed}, decode node {hello.name} computes "
            f"{hello.features or 'none'}: prefill and decode nodes need a model.head with the same reduction, "
            "and all nodes the same model.dtype; other engines need a draft node with ngram, suffix or draft_model",
            reason="FEATURE_MISMATCH",
        )
