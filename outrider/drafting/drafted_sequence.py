"""A sequence in the draft streams: what its draft node knows, what it was asked for, and what it has proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.drafting.draft_nodes import DraftNodeState
from outrider.speculation.draft_stream import (
    MAX_AHEAD_BRANCHES,
    MAX_BRANCH_TOKENS,
    MAX_BRANCHES_PER_SEQUENCE,
    MAX_SIBLINGS,
    DraftStatus,
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

MAX_UNACKED_BYTES = 1 << 20
"""Bytes of a sequence's unacknowledged features at which no more are copied from the plane."""


class UnackedFeatures:
    """Copies of contiguous features that the draft node has not acknowledged. Guarded by the book's lock."""

    __slots__ = ("_data", "_size", "num_acked", "num_sent")

    def __init__(self, bytes_per_token: int) -> None:
        self._size = bytes_per_token
        self._data = bytearray()
        self.num_acked = 0  # number of acknowledged tokens; `_data` begins with the next token's features
        self.num_sent = 0  # number of tokens sent, which is the maximum that can be acknowledged

    @property
    def end(self) -> int:
        """The first token whose features must still be copied. Earlier features are acknowledged, or held here."""
        return self.num_acked + len(self._data) // self._size

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    @property
    def room(self) -> int:
        """The number of further tokens whose features may be added."""
        return (MAX_UNACKED_BYTES - len(self._data)) // self._size

    def add(self, start: int, payload: bytes) -> bool:
        """Adds copies from the plane. Returns False, and adds nothing, if `start` is not `end`, e.g. after `reset`."""
        if start != self.end:
            return False
        self._data += payload
        return True

    def take(self, end: int, max_bytes: int) -> tuple[bytes, int]:
        """Returns, but keeps, features of tokens from `num_acked` to at most `end`, and the token where they end."""
        end = max(self.num_acked, min(end, self.end, self.num_acked + max_bytes // self._size))
        self.num_sent = max(self.num_sent, end)
        return bytes(memoryview(self._data)[: (end - self.num_acked) * self._size]), end

    def acknowledge(self, num_tokens: int) -> None:
        """Drops the features of the first `num_tokens` tokens, which the node holds."""
        if num_tokens > self.num_acked:
            del self._data[: (num_tokens - self.num_acked) * self._size]
            self.num_acked = num_tokens

    def reset(self) -> None:
        """Records that the node has lost all features, so that they are copied from the plane again."""
        self._data.clear()
        self.num_acked = 0


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

    @property
    def num_left(self) -> int:
        """The number of tokens that the sequence may still generate."""
        return self.start.prompt_length + self.start.options.sampling.max_tokens - len(self.committed)

    def add_features(self, start: int, payload: bytes) -> None:
        """Adds the features of tokens from `start` on."""
        features = self.assignment.features if self.assignment is not None else None
        if features is not None and features.add(start, payload):
            self.is_dirty |= self.num_wanted > 0 or features.end - features.num_acked >= KEEP_UP_TOKENS

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
    features: UnackedFeatures | None = None  # None: the node needs none
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
    ) -> SequenceUpdate:
        """Returns an update with at most `max_tokens` tokens that the node does not have, and with features.

        Drafts are asked for only if the node will then have all tokens. Features may lag behind: those copied so far
        are sent, at most `max_feature_bytes` of them.
        """
        assert self.pending is None, "at most one update is unanswered"
        drafted = self.sequence
        committed, known = drafted.committed, drafted.committed.token_ids
        start, length, num_wanted = self.acked_length, len(known), drafted.num_wanted
        drafted.is_dirty = length > start + max_tokens
        if drafted.is_dirty:
            length, num_wanted = start + max_tokens, 0
        feature_start, payload, num_features = 0, b"", 0
        if (features := self.features) is not None:
            feature_start = features.num_acked
            payload, num_features = features.take(length - 1, max_feature_bytes)
            drafted.is_dirty |= num_features < features.end
        self.pending = PendingUpdate(length, num_wanted, now, num_features)
        self.sent_length = max(self.sent_length, length)
        # Branches that were allowed by the previous update may still be in transit.
        self.num_ahead_allowed = MAX_AHEAD_BRANCHES + min(self.num_ahead_allowed, MAX_AHEAD_BRANCHES)
        self.max_wanted = max(self.max_wanted, num_wanted)
        return SequenceUpdate(
            self.stream_id,
            drafted.start if start == 0 else None,
            start,
            tuple(known[start:length]),
            length,
            committed.hash_at(length),
            num_wanted,
            feature_start=feature_start,
            features=payload,
            # `min_reach` ends unlikely drafts early, so that they arrive sooner. But whether a drawn draft is judged
            # must not depend on its tokens.
            min_reach=0.0 if drafted.start.wants_distributions else min_reach,
        )

    def is_plausible(self, answer: SequenceProposals) -> bool:
        """Returns whether an honest node could send this answer now. `is_well_formed` checks the rest."""
        num_features_sent = 0 if self.features is None else self.features.num_sent
        if answer.acked_length > self.sent_length or answer.acked_features > num_features_sent:
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
        if self.features is not None:
            self.features.acknowledge(answer.acked_features)
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
        if self.features is not None:
            self.features.reset()
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
