"""One decode node on its stream: newest states in, newest answers out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from outrider.errors import CapacityError
from outrider.speculation.draft_stream import MAX_ANSWERS_PER_MESSAGE, DraftHello, SequenceProposals, SequenceUpdate

MAX_WAITING = 65_536
"""Sequences of which an update or an answer waits in a box; a peer that never reads its answers comes to it."""


class DraftPeer:
    """Two boxes that hold the newest value of each sequence, never a backlog.

    Thread-safe: the event loop submits updates and takes answers, the draft loop the
    other way round. `notify` is called from the draft loop's thread.
    """

    def __init__(self, peer_id: int, hello: DraftHello, notify: Callable[[], None]) -> None:
        self.peer_id = peer_id
        self.hello = hello
        self._notify = notify
        self._lock = threading.Lock()
        self._updates: dict[int, SequenceUpdate] = {}
        self._answers: dict[int, SequenceProposals] = {}

    def submit(self, updates: Sequence[SequenceUpdate]) -> None:
        """Newer states of a sequence replace older ones that nobody has looked at.

        Raises: CapacityError for a peer that sends, and does not read.
        """
        with self._lock:
            if len(self._updates) + len(self._answers) + len(updates) > MAX_WAITING:
                raise CapacityError(f"{self.hello.name} does not read the answers to its updates")
            for update in updates:
                self._updates[update.sequence_id] = update

    def take_updates(self) -> list[SequenceUpdate]:
        with self._lock:
            updates, self._updates = self._updates, {}
        return list(updates.values())

    def answer(self, answers: Sequence[SequenceProposals]) -> None:
        """Newer answers replace older ones that could not be sent yet."""
        if not answers:
            return
        with self._lock:
            for answer in answers:
                self._answers[answer.sequence_id] = answer
        self._notify()

    def take_answers(self) -> list[SequenceProposals]:
        """As many as one message may carry, oldest first; empty when none wait."""
        with self._lock:
            taken = list(itertools.islice(self._answers, MAX_ANSWERS_PER_MESSAGE))
            return [self._answers.pop(sequence_id) for sequence_id in taken]
