"""One sequence as the draft stream sees it: what its node knows, what was asked of it, what it has proposed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.speculation.draft_stream import (
    MAX_AHEAD_BRANCHES,
    MAX_BRANCHES_PER_SEQUENCE,
    DraftStatus,
    SequenceProposals,
    SequenceStart,
    SequenceUpdate,
    most_tokens_offered,
)
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.prefix_hash import HashedTokens
from outrider.speculation.proposal_table import ProposalTable
from outrider.speculation.token_distribution import TokenDistribution

MAX_TOKENS_AHEAD = 64
"""A branch may begin so far after what is committed: the node drafted past its own draft."""

KEEP_UP_TOKENS = 32
"""A sequence that wants no drafts is told of in pieces of so many tokens, not at each step."""

RETRY_SECONDS = 1.0
"""Between two tries of a sequence that its node lost twice or has no room for."""


class Stage(enum.Enum):
    """Where a sequence stands with the draft node that serves it."""

    UNSERVED = "unserved"  # no node serves it
    CATCHING_UP = "catching_up"  # its node computes what it was told; it may be told more meanwhile
    READY = "ready"  # its node may be told what is new
    ASKED = "asked"  # an update waits for its answer
    POSTPONED = "postponed"  # its node had no room for it, or lost it twice: told again later


class _Asked(NamedTuple):
    """The update that waits for its answer."""

    length: int
    num_wanted: int
    at: float


@dataclass(slots=True)
class _Service:
    """What its target knows of the sequence since it serves it."""

    acked_length: int = 0
    sent_length: int = 0  # the most that it was sent
    most_wanted: int = 0  # the most that any update asked for
    asked: _Asked | None = None
    is_catching_up: bool = False  # an answer follows, whether more is asked or not
    answered_length: int = -1  # newest state of which a wish was answered
    last_was_empty: bool = False
    synced_at: float = float("-inf")
    retry_at: float = 0.0
    num_ahead_allowed: int = 0  # branches that may come besides answers


@dataclass(slots=True)
class DraftedSequence:
    """Newest state of one sequence, the drafts at hand for it, and its place on the stream of its target.

    UNSERVED → `serve` → READY → `make_update` → ASKED → `take_answer` → READY, CATCHING_UP or POSTPONED;
    from CATCHING_UP like from READY; `leave` from anywhere to UNSERVED. Times are the owner's clock, in seconds.
    """

    sequence_id: int
    start: SequenceStart
    committed: HashedTokens
    num_wanted: int
    target: int | None = None  # which serves it
    has_news: bool = True  # that its target was not told
    refused: set[int] = field(default_factory=set)  # targets that answered nonsense about it
    trees: ProposalTable = field(default_factory=lambda: ProposalTable(max_trees=MAX_BRANCHES_PER_SEQUENCE))
    _service: _Service | None = None
    _past: dict[int, _Service] = field(default_factory=dict)  # by target, on the stream that it has

    @property
    def is_known_to_target(self) -> bool:
        return self._service is not None and self._service.sent_length > 0

    def stage(self, now: float) -> Stage:
        service = self._service
        if service is None:
            return Stage.UNSERVED
        if service.asked is not None:
            return Stage.ASKED
        if service.is_catching_up:
            return Stage.CATCHING_UP
        return Stage.POSTPONED if now < service.retry_at else Stage.READY

    def asked_since(self) -> float | None:
        """When the update was sent that waits for its answer; None: none does."""
        return None if self._service is None or self._service.asked is None else self._service.asked.at

    @property
    def is_answered(self) -> bool:
        """Whether its target has answered the newest state."""
        return self._service is not None and self._service.answered_length >= len(self.committed.token_ids)

    @property
    def had_nothing(self) -> bool:
        """Whether the last answer to a wish was that there is nothing, or nothing yet."""
        return self._service is not None and (self._service.last_was_empty or self._service.is_catching_up)

    @property
    def is_awaited(self) -> bool:
        """Whether an answer of its target is due."""
        return self._service is not None and (self._service.asked is not None or self._service.is_catching_up)

    # The engine's side.

    def commit(self, token_ids: Sequence[int], *, num_wanted: int) -> None:
        committed = self.committed
        committed.extend(token_ids)
        only_keeps_up = num_wanted <= 0 and self.num_wanted <= 0
        self.num_wanted = num_wanted
        if only_keeps_up:
            num_sent = 0 if self._service is None else self._service.sent_length
            if len(committed.token_ids) - num_sent < KEEP_UP_TOKENS:
                return
        self.has_news = True

    def is_followed(self, token_ids: Sequence[int]) -> bool:
        """Whether `follow` has nothing to do for a step that wants drafts."""
        return len(token_ids) == len(self.committed.token_ids) and self.num_wanted > 0

    def follow(self, token_ids: Sequence[int], *, num_wanted: int) -> None:
        """Takes over what a step knows and no `commit` has told."""
        num_committed = len(self.committed)
        if len(token_ids) > num_committed:
            self.committed.extend(token_ids[num_committed:])
            self.has_news = True
        if self.num_wanted <= 0:
            self.num_wanted = num_wanted
            self.has_news = True

    # The stream's side.

    def serve(self, target: int) -> None:
        """A target that knows nothing of it serves it from here on.

        If it did so before, on the same stream, answers to what it was asked then may still come.
        """
        past = self._past.pop(target, _Service())
        self.target = target
        self._service = _Service(sent_length=past.sent_length, most_wanted=past.most_wanted)
        self.has_news = True

    def leave(self) -> int:
        """Returns how many answers and branches of its target may be under way."""
        target, service = self.target, self._service
        assert target is not None
        assert service is not None
        self._past[target] = service
        self.target = self._service = None
        return (service.asked is not None) + service.is_catching_up + service.num_ahead_allowed

    def stream_begins(self, target: int) -> None:
        """Nothing of the target's last stream counts any more, what it was refused for included."""
        self.refused.discard(target)
        self._past.pop(target, None)

    def make_update(self, now: float, *, most_tokens: int) -> SequenceUpdate:
        """What the target does not have, at most `most_tokens` of it; drafts are asked for once it has all."""
        service = self._service
        assert service is not None
        assert service.asked is None, "at most one update is unanswered"
        committed, known = self.committed, self.committed.token_ids
        start, length, num_wanted = service.acked_length, len(known), self.num_wanted
        self.has_news = length > start + most_tokens
        if self.has_news:
            length, num_wanted = start + most_tokens, 0
        service.asked = _Asked(length, num_wanted, now)
        service.sent_length = max(service.sent_length, length)
        # What the update before allowed may still be under way.
        service.num_ahead_allowed = MAX_AHEAD_BRANCHES + min(service.num_ahead_allowed, MAX_AHEAD_BRANCHES)
        service.most_wanted = max(service.most_wanted, num_wanted)
        return SequenceUpdate(
            self.sequence_id,
            self.start if start == 0 else None,
            start,
            tuple(known[start:length]),
            length,
            committed.hash_at(length) if self.has_news else committed.hash,
            num_wanted,
        )

    def is_plausible(self, answer: SequenceProposals, *, vocab_size: int) -> bool:
        """Whether an honest node could say this: sizes, ids, and hashes of what is committed."""
        service = self._service
        assert service is not None
        if answer.acked_length > service.sent_length or len(answer.branches) > MAX_BRANCHES_PER_SEQUENCE:
            return False
        most_tokens = most_tokens_offered(service.most_wanted, takes_trees=self.start.takes_trees)
        for tree in answer.branches:
            # An assumption may have turned out wrong by the time it comes: that is no lie.
            is_assumption = answer.status is DraftStatus.AHEAD and tree.length > answer.acked_length
            if not self._is_plausible_tree(tree, most_tokens, vocab_size, is_assumption=is_assumption):
                return False
        return True

    def num_ahead_allowed(self, num_branches: int) -> int:
        """How many of so many branches may come besides answers."""
        return 0 if self._service is None else min(num_branches, self._service.num_ahead_allowed)

    def take_ahead(self, trees: Sequence[DraftTree], now: float) -> None:
        """Plausible and allowed ones."""
        assert self._service is not None
        self._service.num_ahead_allowed -= len(trees)
        for tree in trees:
            self._keep(tree, now)

    def take_answer(self, answer: SequenceProposals, now: float) -> float | None:
        """A plausible one. Returns how long it took, in seconds, where it answers a wish."""
        service = self._service
        assert service is not None
        asked = service.asked
        if answer.status is DraftStatus.UNKNOWN_PREFIX or answer.status is DraftStatus.NO_ROOM:
            self._begin_again(service, answer.status, now)
            return None
        service.acked_length = max(service.acked_length, answer.acked_length)
        is_of_newest = asked is not None and answer.acked_length >= asked.length
        if answer.status is DraftStatus.CATCHING_UP:
            service.is_catching_up = True
            if is_of_newest:
                service.asked = None
            return None
        for tree in answer.branches:
            self._keep(tree, now)
        if asked is None:  # the end of catching up
            service.is_catching_up = False
            service.answered_length = max(service.answered_length, answer.acked_length)
            service.last_was_empty = not answer.branches
        elif is_of_newest:
            service.asked = None
            service.is_catching_up = False
            if asked.num_wanted > 0:
                service.answered_length = max(service.answered_length, asked.length)
                service.last_was_empty = not answer.branches
                return now - asked.at
        return None

    def _begin_again(self, service: _Service, status: DraftStatus, now: float) -> None:
        """Its node has nothing of it: it is sent from the start, later where it was just now or there is no room."""
        if status is DraftStatus.NO_ROOM:
            service.retry_at = now + RETRY_SECONDS
        elif now - service.synced_at < RETRY_SECONDS:
            service.retry_at = service.synced_at + RETRY_SECONDS
            service.synced_at = now
        else:
            service.synced_at = now
        service.acked_length = 0
        service.asked = None
        service.is_catching_up = False
        self.has_news = True

    def _keep(self, tree: DraftTree, now: float) -> None:
        if not self._is_spent(tree):
            self.trees.add(tree, self.committed, now=now)

    def _is_plausible_tree(self, tree: DraftTree, most_tokens: int, vocab_size: int, *, is_assumption: bool) -> bool:
        """What serves no more is not hashed: the hash of a prefix far back costs its whole length."""
        token_ids = tree.token_ids
        if len(token_ids) > most_tokens:
            return False
        if tree.parents and not (self.start.takes_trees and tree.is_well_formed):
            return False
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            return False
        if tree.distributions and not (
            len(tree.distributions) == len(token_ids)
            and all(map(TokenDistribution.can_have_drawn, tree.distributions, token_ids))
        ):
            return False
        committed = self.committed
        num_since = len(committed.token_ids) - tree.length
        if num_since < 0:
            return -num_since <= MAX_TOKENS_AHEAD
        return is_assumption or num_since >= len(token_ids) or tree.prefix_hash == committed.hash_at(tree.length)

    def _is_spent(self, tree: DraftTree) -> bool:
        """Whether as much has been committed since as it proposes."""
        return len(self.committed.token_ids) - tree.length >= len(tree.token_ids)
