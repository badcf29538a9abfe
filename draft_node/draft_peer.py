"""The mailboxes of a decode node: its newest states, and the newest answers and branches for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.errors import CapacityError
from outrider.speculation.draft_stream import (
    MAX_ANSWERS_PER_MESSAGE,
    MAX_BRANCHES_PER_MESSAGE,
    MAX_BRANCHES_PER_SEQUENCE,
    MAX_FEATURE_BYTES_PER_MESSAGE,
    DraftHello,
    DraftStatus,
    SequenceProposals,
    SequenceUpdate,
    StepNotice,
)
from outrider.speculation.draft_tree import DraftTree

MAX_WAITING = 65_536
"""Maximum number of waiting updates and answers. A peer that never reads its answers reaches that number."""

MAX_WAITING_TOKENS = 1 << 18
MAX_WAITING_FEATURE_BYTES = 4 * MAX_FEATURE_BYTES_PER_MESSAGE
"""Number of tokens, and bytes of features, in a peer's waiting updates at which its stream is no longer read."""

MAX_UPDATES_PER_STEP = 256
MAX_TOKENS_PER_STEP = 1 << 16
"""Maximum number of updates and tokens of one peer in a step. They take some milliseconds, while other peers wait."""


AHEAD_SECONDS = 0.006
"""Minimum seconds between two messages with branches of a look-ahead only. Each message takes about 0.3 ms of the
target's processors, so branches are collected. The last ones are sent when the look-ahead ends.
"""


class ReceivedUpdate(NamedTuple):
    """The newest state of a sequence, or a notice about it, and when (clock seconds) its target's step should end."""

    update: SequenceUpdate | StepNotice
    look_ahead_deadline: float


@dataclass(slots=True)
class _Unsent:
    """The unsent answers and branches of one sequence."""

    answer: SequenceProposals | None = None
    acked_length: int = 0  # length of the state that `ahead` was made from
    ahead: dict[tuple[int, int | None], DraftTree] = field(default_factory=dict)  # by length and hash of the prefix

    def put(self, answer: SequenceProposals) -> None:
        """Adds an answer or look-ahead branches. An answer replaces everything older; a branch replaces an older one
        with the same prefix.
        """
        if answer.status is not DraftStatus.AHEAD:
            self.answer = answer
            self.ahead.clear()
            return
        self.acked_length = answer.acked_length
        for tree in answer.branches:
            self.ahead[tree.length, tree.prefix_hash] = tree
        while len(self.ahead) > MAX_BRANCHES_PER_SEQUENCE:
            del self.ahead[min(self.ahead, key=lambda key: self.ahead[key].probability)]

    def answers(self, sequence_id: int) -> list[SequenceProposals]:
        found = [] if self.answer is None else [self.answer]
        if self.ahead:
            branches = tuple(self.ahead.values())
            found.append(SequenceProposals(sequence_id, DraftStatus.AHEAD, self.acked_length, branches))
        return found


class DraftPeer:
    """Two mailboxes that keep only the newest values of each sequence.

    Thread-safe: the event loop submits updates and takes answers, the draft loop does the reverse. `notify` is called
    from the draft loop's thread when there are answers or there is room again.
    """

    def __init__(self, peer_id: int, hello: DraftHello, notify: Callable[[], None]) -> None:
        self.peer_id = peer_id
        self.hello = hello
        self._notify = notify
        self._lock = threading.Lock()
        self._updates: dict[tuple[int, type], ReceivedUpdate] = {}  # by sequence and kind, the oldest first
        self._num_tokens = 0  # in these updates
        self._num_feature_bytes = 0
        self._unsent: dict[int, _Unsent] = {}
        self._flushed_at = -math.inf
        self._is_keeping = False  # whether there are answers that the stream was not told of

    @property
    def has_room(self) -> bool:
        """Whether another message of this peer may be read."""
        return self._num_tokens < MAX_WAITING_TOKENS and self._num_feature_bytes < MAX_WAITING_FEATURE_BYTES

    def submit(self, updates: Sequence[SequenceUpdate | StepNotice], *, look_ahead_deadline: float) -> None:
        """Adds updates and notices, which replace older ones of the same sequences.

        Raises: CapacityError for a peer that sends and does not read.
        """
        with self._lock:
            if len(self._updates) + len(self._unsent) + len(updates) > MAX_WAITING:
                raise CapacityError(f"{self.hello.name} does not read the answers to its updates")
            for update in updates:
                key = (update.sequence_id, type(update))
                # A notice comes after the update that it belongs to.
                replaced = self._updates.pop(key, None) if key[1] is StepNotice else self._updates.get(key)
                self._updates[key] = ReceivedUpdate(update, look_ahead_deadline)
                self._count(update, 1)
                if replaced is not None:
                    self._count(replaced.update, -1)

    @property
    def has_updates(self) -> bool:
        return bool(self._updates)

    def take_updates(self) -> list[ReceivedUpdate]:
        """Takes the oldest updates, up to the limits for one step."""
        taken: list[ReceivedUpdate] = []
        num_tokens = 0
        with self._lock:
            had_room = self.has_room
            while self._updates and len(taken) < MAX_UPDATES_PER_STEP and num_tokens < MAX_TOKENS_PER_STEP:
                taken.append(self._updates.pop(next(iter(self._updates))))
                num_tokens += len(taken[-1].update.token_ids)
                self._count(taken[-1].update, -1)
        if not had_room:
            self._notify()
        return taken

    def _count(self, update: SequenceUpdate | StepNotice, sign: int) -> None:
        self._num_tokens += sign * len(update.token_ids)
        if isinstance(update, SequenceUpdate):
            self._num_feature_bytes += sign * len(update.features)

    def answer(self, answers: Sequence[SequenceProposals], now: float = 0.0) -> None:
        """Adds answers to the unsent ones. A newer answer replaces an older one of the same sequence.

        Branches of a look-ahead may be kept back until `flush` or another answer. `now`: clock seconds.
        """
        with self._lock:
            for answer in answers:
                self._unsent.setdefault(answer.sequence_id, _Unsent()).put(answer)
        self._is_keeping = True
        self.flush(now, at_once=any(answer.status is not DraftStatus.AHEAD for answer in answers))

    def flush(self, now: float, *, at_once: bool = False) -> None:
        """Sends what is kept back, but not within `AHEAD_SECONDS` of the last message unless `at_once`.

        `now`: clock seconds.
        """
        if self._is_keeping and (at_once or now - self._flushed_at >= AHEAD_SECONDS):
            self._is_keeping, self._flushed_at = False, now
            self._notify()

    def drop_answers(self, sequence_id: int) -> None:
        """Drops the unsent answers of a closed sequence."""
        with self._lock:
            self._unsent.pop(sequence_id, None)

    def take_answers(self) -> list[SequenceProposals]:
        """Takes as many answers as one message may hold, the oldest first; empty if there are none."""
        taken: list[SequenceProposals] = []
        num_branches = 0
        with self._lock:
            while self._unsent:
                sequence_id = next(iter(self._unsent))
                answers = self._unsent[sequence_id].answers(sequence_id)
                num_branches += sum(len(answer.branches) for answer in answers)
                if len(taken) + len(answers) > MAX_ANSWERS_PER_MESSAGE or num_branches > MAX_BRANCHES_PER_MESSAGE:
                    break
                del self._unsent[sequence_id]
                taken += answers
        return taken
