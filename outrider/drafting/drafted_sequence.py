"""A sequence in the draft streams: what its draft node knows, what it was asked for, and what it has proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from outrider.drafting.draft_nodes import DraftNodeState
from outrider.speculation.draft_stream import (
    MAX_AHEAD_BRANCHES,
    MAX_BRANCH_TOKENS,
    MAX_BRANCHES_PER_SEQUENCE,
    MAX_SIBLINGS,
    DraftStatus,
    FeatureOffer,
    SequenceProposals,
    SequenceStart,
    SequenceUpdate,
    max_offered_tokens,
)
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import HashedTokens
from outrider.speculation.proposal_table import ProposalTable
from outrider.speculation.token_distribution import TokenDistribution

MAX_TOKENS_AHEAD = 64
"""Maximum number of tokens between the committed ones and the start of a branch. There are such tokens if a node drafts
beyond its own draft."""

KEEP_UP_TOKENS = 32
"""Number of new tokens after which a node gets an update even if the sequence wants no drafts."""

RESEND_SECONDS = 1.0
"""Minimum seconds between two transmissions of a whole sequence to the same node."""

MAX_FEATURE_BYTES_PER_UPDATE = 1 << 18
"""Maximum bytes of features in an update. A node that lacks more, for example a prompt's, is offered them."""

RENEW_SECONDS = 10.0
"""Seconds after which features that the node has not read are offered once more."""


class FeatureSource(Protocol):
    """The features of the target's tokens, in its paged cache. Any thread may use it. A range is (kv, start, end):
    tokens [start, end) of the sequence with block table `kv`, which may lose its blocks at any time.
    """

    bytes_per_token: int
    reads_wait: bool  # whether a read may wait for a forward pass

    def read(self, ranges: Sequence[tuple[Any, int, int]]) -> list[bytes | None]:
        """Returns a copy of each range, in the hello's format; None for a sequence that has lost the blocks."""

    def offer(self, kv: Any, end: int) -> FeatureOffer | None:
        """Lets a draft node read the features of the first `end` tokens; None if this source cannot do that."""

    def withdraw(self, offer: FeatureOffer) -> None:
        """Ends an offer, and the draft node's connection if there is one."""


class PendingUpdate(NamedTuple):
    """An update of a sequence that the node has not answered yet."""

    length: int
    num_wanted: int
    at: float
    num_features: int = 0


@dataclass(slots=True, eq=False)
class DraftedSequence:
    """The newest state of a sequence, and the drafts received for it. Times are seconds of the owner's clock."""

    start: SequenceStart
    committed: HashedTokens
    num_wanted: int
    assignment: Assignment | None = None
    is_dirty: bool = True  # whether there is something to send to its node
    refused: set[int] = field(default_factory=set)  # ids of nodes that have sent invalid answers for it
    num_refusals: int = 0  # number of refusals by nodes without room
    kv: Any = None  # the newest block table, whose first `num_tokens` tokens have features; None: not known
    trees: ProposalTable = field(default_factory=ProposalTable)

    def commit(self, token_ids: Sequence[int], *, num_wanted: int) -> None:
        """Adds newly committed tokens, and sets the number of draft tokens wanted next."""
        self.committed.extend(token_ids)
        only_keeps_up = num_wanted <= 0 and self.num_wanted <= 0
        self.num_wanted = num_wanted
        if only_keeps_up:
            num_sent = 0 if self.assignment is None else self.assignment.sent_length
            if len(self.committed.token_ids) - num_sent < KEEP_UP_TOKENS:
                return
        self.is_dirty = True

    def keep(self, trees: Sequence[DraftTree], now: float) -> None:
        """Keeps drafts that were received, if they may still be used."""
        num_committed = len(self.committed.token_ids)
        for tree in trees:
            if num_committed - tree.length < len(tree.token_ids):  # otherwise all its positions are committed
                self.trees.add(tree, self.committed, now=now)


@dataclass(slots=True, eq=False)
class Assignment:
    """A sequence on one node's stream, while the node serves it.

    Each assignment has its own stream id, so an answer to an earlier one is never mistaken for an answer to this one.
    """

    sequence: DraftedSequence
    stream_id: int
    node: DraftNodeState
    source: FeatureSource | None = None  # of the features that the node needs; None: it needs none
    acked_features: int = 0
    sent_features: int = 0  # maximum number of tokens whose features the node may have
    offer: FeatureOffer | None = None
    offered_kv: Any = None
    offered_at: float = 0.0
    acked_length: int = 0
    sent_length: int = 0  # number of the sequence's tokens that the node was sent
    max_wanted: int = 0  # maximum number of draft tokens wanted by any update
    pending: PendingUpdate | None = None
    is_catching_up: bool = False  # whether an answer will follow even without a further update
    had_no_draft: bool = False  # whether the last answer had no draft (yet)
    resent_at: float = float("-inf")
    ready_at: float = 0.0  # time before which nothing is sent
    num_ahead_allowed: int = 0  # look-ahead branches that the node may still send

    def make_update(
        self, now: float, *, max_tokens: int, max_feature_bytes: int = 0, min_reach: float = 0.0
    ) -> tuple[SequenceUpdate, range]:
        """Returns an update with at most `max_tokens` tokens that the node does not have, and the tokens whose
        features are to be added.

        Drafts are asked for only if the node will then have all tokens. Features may lag behind. At most
        `max_feature_bytes` of them are added; many are offered.
        """
        assert self.pending is None, "at most one update is unanswered"
        drafted = self.sequence
        committed, known = drafted.committed, drafted.committed.token_ids
        start, length, num_wanted = self.acked_length, len(known), drafted.num_wanted
        drafted.is_dirty = length > start + max_tokens
        if drafted.is_dirty:
            length, num_wanted = start + max_tokens, 0
        features = self._features(length, now, max_feature_bytes)
        self.pending = PendingUpdate(length, num_wanted, now, features.stop)
        self.sent_length = max(self.sent_length, length)
        # Branches that were allowed by the previous update may still be in transit.
        self.num_ahead_allowed = MAX_AHEAD_BRANCHES + min(self.num_ahead_allowed, MAX_AHEAD_BRANCHES)
        self.max_wanted = max(self.max_wanted, num_wanted)
        update = SequenceUpdate(
            self.stream_id,
            drafted.start if start == 0 else None,
            start,
            tuple(known[start:length]),
            length,
            committed.hash_at(length),
            num_wanted,
            feature_start=self.acked_features,
            feature_offer=self.offer,
            # `min_reach` ends unlikely drafts early, so that they arrive sooner. But whether a drawn draft is judged
            # must not depend on its tokens.
            min_reach=0.0 if drafted.start.wants_distributions else min_reach,
        )
        return update, features

    @property
    def missing_features(self) -> range:
        """The tokens whose features the node needs, lacks and could have."""
        kv = self.sequence.kv
        is_known = self.source is not None and kv is not None
        return range(self.acked_features, min(kv.num_tokens, len(self.sequence.committed) - 1) if is_known else 0)

    @property
    def max_sent_features(self) -> int:
        return 0 if self.source is None else MAX_FEATURE_BYTES_PER_UPDATE // self.source.bytes_per_token

    def _features(self, length: int, now: float, max_bytes: int) -> range:
        """Returns the tokens whose features go in an update of `length` tokens, or offers them if they are many."""
        missing = self.missing_features
        if self.offer is not None and self.offer.end_token <= missing.start:
            self.withdraw()
        missing = missing[: max(0, length - 1 - missing.start)]
        if self.source is None or not missing:
            return missing
        if len(self.missing_features) > self.max_sent_features:
            if length < len(self.sequence.committed):
                return range(0)
            kv = self.sequence.kv
            if self.offer is None or self.offered_kv is not kv or now >= self.offered_at + RENEW_SECONDS:
                self.withdraw()
                self.offer, self.offered_kv, self.offered_at = self.source.offer(kv, missing.stop), kv, now
            if self.offer is not None:
                self.sent_features = max(self.sent_features, self.offer.end_token)
                return range(0)
        missing = missing[: min(self.max_sent_features, max_bytes // self.source.bytes_per_token)]
        self.sent_features = max(self.sent_features, missing.stop)
        return missing

    def withdraw(self) -> None:
        """Ends the offer, if there is one."""
        if self.offer is not None and self.source is not None:
            self.source.withdraw(self.offer)
        self.offer = None

    def is_plausible(self, answer: SequenceProposals) -> bool:
        """Returns whether an honest node could send this answer now. `is_well_formed` checks the rest."""
        if answer.acked_length > self.sent_length or answer.acked_features > self.sent_features:
            return False
        takes_trees, committed = self.sequence.start.takes_trees, self.sequence.committed
        num_committed = len(committed.token_ids)
        max_tokens = max_offered_tokens(self.max_wanted, takes_trees=takes_trees)
        for tree in answer.branches:
            num_tokens = len(tree.token_ids)
            if num_tokens > max_tokens or (tree.parents and not takes_trees):
                return False
            num_since = num_committed - tree.length
            if -num_since > MAX_TOKENS_AHEAD:
                return False
            # A stale branch is not checked by hash, since hashing a much shorter prefix takes time in proportion to the
            # prefix's length.
            # A branch after assumed tokens stays valid even if the assumption has turned out wrong in the meantime.
            is_assumption = answer.status is DraftStatus.AHEAD and tree.length > answer.acked_length
            serves = 0 <= num_since < num_tokens
            if serves and not is_assumption and tree.prefix_hash != committed.hash_at(tree.length):
                return False
        return True

    def take_answer(self, answer: SequenceProposals, now: float) -> float | None:
        """Applies a plausible answer that is due. Returns its delay in seconds if a draft was asked for."""
        if answer.status is DraftStatus.UNKNOWN_PREFIX:
            self._begin_again(now)
            return None
        self.acked_length = max(self.acked_length, answer.acked_length)
        self.acked_features = max(self.acked_features, answer.acked_features)
        self.sequence.is_dirty |= (
            self.sequence.num_wanted > 0 and 0 < len(self.missing_features) <= self.max_sent_features
        )
        pending = self.pending
        is_of_newest = (
            pending is not None
            and answer.acked_length >= pending.length
            and answer.acked_features >= pending.num_features
        )
        if answer.status is DraftStatus.CATCHING_UP:
            self.is_catching_up = self.had_no_draft = True
            if is_of_newest:
                self.pending = None
            return None
        self.sequence.keep(answer.branches, now)
        if pending is None:  # catching up has now ended
            self.is_catching_up = False
            self.had_no_draft = not answer.branches
        elif is_of_newest:
            self.pending = None
            self.is_catching_up = False
            if pending.num_wanted > 0:
                self.had_no_draft = not answer.branches
                return now - pending.at
        return None

    def _begin_again(self, now: float) -> None:
        """Records that the node has lost the sequence. It is sent again, but at most once in RESEND_SECONDS."""
        if now - self.resent_at < RESEND_SECONDS:
            self.ready_at = self.resent_at + RESEND_SECONDS
        self.resent_at = now
        self.acked_length = 0
        self.acked_features = 0
        self.withdraw()
        self.pending = None
        self.is_catching_up = False
        self.sequence.is_dirty = True


def is_well_formed(answer: SequenceProposals, *, vocab_size: int) -> bool:
    """Returns whether the sizes, ids, trees and distributions of an answer are valid. Needs no lock.

    `Assignment.is_plausible` checks what depends on the sequence's state.
    """
    return len(answer.branches) <= MAX_BRANCHES_PER_SEQUENCE and all(
        _is_well_formed(tree, vocab_size) for tree in answer.branches
    )


def _is_well_formed(tree: DraftTree, vocab_size: int) -> bool:
    token_ids, distributions = tree.token_ids, tree.distributions
    if len(token_ids) > MAX_BRANCH_TOKENS + MAX_SIBLINGS:
        return False
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return False
    if not tree.is_well_formed:
        return False
    return not distributions or (
        len(distributions) == len(token_ids) and all(map(TokenDistribution.can_have_drawn, distributions, token_ids))
    )
