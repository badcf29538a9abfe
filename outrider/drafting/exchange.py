"""The threads' side of a client of draft nodes, which has proposals ready when a step needs them.

Two kinds of threads use it. An engine's threads call `open`, `commit`, `close` and `take`, which do no I/O. An event
loop owns one bidirectional stream for each draft node (`link`). They share the `DraftBook`, which has the newest state
of every sequence and is guarded by one lock. A message is made from this state when a stream can be written.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from outrider.drafting.book import DraftBook, StepDrafts
from outrider.drafting.drafted_sequence import FeatureSource
from outrider.drafting.link import DraftLink, LinkOutlets
from outrider.speculation.draft_stream import DraftHello, SequenceStart

NO_TABLES: Mapping[int, Any] = MappingProxyType({})

WAIT_SHARE_OF_STEP = 0.2
"""Maximum share of the last step's duration for which an engine waits for drafts."""


class DraftExchange(ABC):
    """Proposals of all draft nodes for an engine. Every node can serve every sequence.

    `links` belongs to the event loop; any thread may call the other methods. None raises because of a draft node.
    """

    def __init__(self, hello: DraftHello, outlets: LinkOutlets, features: FeatureSource | None = None) -> None:
        """`features`: where the features are that the hello names; None if it names none."""
        assert (hello.features is None) is (features is None)
        self._hello = hello
        self._outlets = outlets
        self._changed = threading.Condition()
        self._book = DraftBook(clock=time.monotonic, features=features)
        self._loop: asyncio.AbstractEventLoop | None = None  # None while no links run

    @property
    @abstractmethod
    def links(self) -> Sequence[DraftLink]:
        """The links to all present draft nodes. Event loop only."""

    def open(self, sequence_id: int, start: SequenceStart, token_ids: Sequence[int], *, num_wanted: int) -> None:
        """Announces a sequence when its prompt is known, and asks for its first draft."""
        with self._changed:
            self._book.open(sequence_id, start, token_ids, num_wanted=num_wanted)
        self.wake()

    def commit(
        self,
        updates: Sequence[tuple[int, Sequence[int], int]],
        tables: Mapping[int, Any] = NO_TABLES,
        *,
        min_reach: float = 0.0,
        wakes: bool = True,
    ) -> None:
        """Records what a step has committed. An update is (sequence id, new token ids, number of draft tokens wanted).

        `tables`: block tables of the tokens' features, by sequence id. `min_reach`: see ProposalRequest. `wakes`:
        whether streams send this at once; if not, `begin_step`, `wake` or a `take` that waits must follow.
        """
        with self._changed:
            self._book.min_reach = min_reach
            for sequence_id, new_token_ids, num_wanted in updates:
                self._book.update(sequence_id, new_token_ids, num_wanted=num_wanted, kv=tables.get(sequence_id))
        if wakes:
            self.wake()

    def begin_step(self, verified: Mapping[int, tuple[int, ...]]) -> None:
        """Tells draft nodes what the step that now begins verifies; see `DraftBook.begin_step`.

        One message has both the last step's tokens and the notices, as each message takes the target's processor time.
        """
        with self._changed:
            self._book.begin_step(verified)
        self.wake()

    def close(self, sequence_id: int) -> None:
        """Forgets a sequence that has ended, if it is known."""
        with self._changed:
            self._book.close(sequence_id)
        self.wake()

    def take(self, sequence_ids: Sequence[int], *, wait_seconds: float) -> StepDrafts:
        """Returns the proposals for this step, after waiting at most `wait_seconds` for missing ones.

        It waits neither for a node that is late or not connected, nor for a sequence whose node had no draft this time
        or last time.
        """
        started = time.monotonic()
        with self._changed:
            found = self._book.find(sequence_ids, wait_seconds=wait_seconds)
            deadline = started + wait_seconds
            if found.missing:
                self.wake()
            while found.missing and (remaining := deadline - time.monotonic()) > 0.0:
                if not self._changed.wait(remaining):
                    break
                more = self._book.find(found.missing, wait_seconds=wait_seconds)
                found.trees |= more.trees
                found.missing = more.missing
        found.waited_seconds = time.monotonic() - started
        return found

    def observe_step(self, seconds: float) -> None:
        """Records the duration of a step."""
        with self._changed:
            self._book.observe_step(seconds)

    def open_link(self, address: str) -> DraftLink:
        """Returns a link to one node, which connects when it runs."""
        return DraftLink(
            address,
            self._hello,
            book=self._book,
            changed=self._changed,
            others=lambda: self.links,
            outlets=self._outlets,
        )

    def wake(self) -> None:
        """Makes the streams send new updates. Any thread may call it."""
        loop = self._loop  # read only once, since the event loop's thread may clear it between two reads
        if loop is None or not self._book.has_unsent:
            return
        try:
            loop.call_soon_threadsafe(self._wake_links)
        except RuntimeError:  # the loop has ended meanwhile
            self._loop = None

    def _wake_links(self) -> None:
        for link in self.links:
            link.wake()
