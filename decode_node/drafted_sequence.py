"""One sequence as the draft stream sees it: what its node knows, and what was asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.request import SamplingParams
from outrider.speculation.draft_stream import (
    MAX_BRANCHES_PER_SEQUENCE,
    Branch,
    SequenceProposals,
    SequenceStart,
    SequenceUpdate,
    most_tokens_offered,
)
from outrider.speculation.prefix_hash import HashedTokens

MAX_TOKENS_AHEAD = 64
"""A branch may begin so far after what is committed: the node drafted past its own draft."""


@dataclass(frozen=True, slots=True)
class SequenceStartInfo:
    """What the draft stream needs to know of a sequence from its start."""

    params: SamplingParams
    sample: int
    prompt_token_ids: Sequence[int]
    generated_token_ids: Sequence[int] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class DraftedSequence:
    """Newest state of one sequence, and its place on the stream of the target that serves it."""

    start: SequenceStart
    committed: HashedTokens
    num_wanted: int
    target: int | None = None
    acked_length: int = 0
    sent_length: int = 0  # most that this target was ever sent
    is_unsent: bool = True
    asked_length: int | None = None  # of the update that waits for its answer
    asked_wanted: int = 0
    asked_at: float = 0.0
    answered_length: int = -1  # newest state that got an answer to a wish
    last_was_empty: bool = False
    not_before: float = 0.0
    synced_at: float = float("-inf")
    most_wanted: int = 0  # the most that any update asked for
    refused: set[int] = field(default_factory=set)  # targets that answered nonsense about it

    @classmethod
    def of(cls, start: SequenceStartInfo, *, num_wanted: int) -> DraftedSequence:
        return cls(
            start=SequenceStart(
                params=start.params,
                sample=start.sample,
                prompt_length=len(start.prompt_token_ids),
                stop_token_ids=tuple(start.stop_token_ids),
            ),
            committed=HashedTokens([*start.prompt_token_ids, *start.generated_token_ids]),
            num_wanted=num_wanted,
        )

    def begin_stream(self) -> None:
        """A target that knows nothing of it serves it from here on."""
        self.acked_length = self.sent_length = self.most_wanted = 0
        self.asked_length = None
        self.answered_length = -1
        self.last_was_empty = False
        self.not_before = 0.0
        self.synced_at = float("-inf")

    def make_update(self, sequence_id: int, now: float, most_tokens: int) -> SequenceUpdate:
        """What the target does not have, at most `most_tokens` of it; drafts are asked for once it has all."""
        start = self.acked_length
        length = min(len(self.committed), start + most_tokens)
        is_whole = length == len(self.committed)
        self.is_unsent = not is_whole
        self.asked_length = length
        self.asked_wanted = self.num_wanted if is_whole else 0
        self.asked_at = now
        self.sent_length = max(self.sent_length, length)
        self.most_wanted = max(self.most_wanted, self.asked_wanted)
        return SequenceUpdate(
            sequence_id=sequence_id,
            start=self.start if start == 0 else None,
            start_length=start,
            token_ids=tuple(self.committed.token_ids[start:length]),
            length=length,
            prefix_hash=self.committed.hash_at(length),
            num_wanted=self.asked_wanted,
        )

    def is_plausible(self, answer: SequenceProposals, *, vocab_size: int) -> bool:
        """Whether an honest node could say this: sizes, ids, and hashes of what is committed."""
        if answer.acked_length > self.sent_length or len(answer.branches) > MAX_BRANCHES_PER_SEQUENCE:
            return False
        return all(self._is_plausible_branch(branch, vocab_size) for branch in answer.branches)

    def _is_plausible_branch(self, branch: Branch, vocab_size: int) -> bool:
        num_committed = len(self.committed)
        if len(branch.token_ids) > most_tokens_offered(self.most_wanted):
            return False
        if not all(0 <= token_id < vocab_size for token_id in branch.token_ids):
            return False
        if branch.length > num_committed:
            return branch.length <= num_committed + MAX_TOKENS_AHEAD
        return branch.prefix_hash == self.committed.hash_at(branch.length)
