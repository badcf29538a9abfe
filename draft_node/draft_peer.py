"""One decode node on its stream: newest states in, newest answers out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from outrider.speculation.draft_stream import DraftHello, SequenceProposals, SequenceUpdate


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
        """Newer states of a sequence replace older ones that nobody has looked at."""
        with self._lock:
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
        with self._lock:
            answers, self._answers = self._answers, {}
        return list(answers.values())
