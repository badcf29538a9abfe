"""The decode node's client of its draft nodes: proposals that are here when a step wants them.

Two threads meet here. The engine thread calls `open`, `update`, `close` and `take`, none
of which does IO; the event loop owns one bidirectional stream for each target
(`draft_link`). Between them lies the `DraftBook`, which knows the newest state of every
sequence, guarded by one lock; a message is made from it when a stream can be written.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from decode_node.draft_book import DraftBook, DraftCounters, DraftWant
from decode_node.draft_link import DraftLink
from decode_node.step_drafts import StepDrafts
from outrider.rpc.peer_security import PLAINTEXT
from outrider.service.peers import PeerSet
from outrider.service.resolver import Resolver, resolve_with_dns
from outrider.speculation.draft_stream import DraftHello, SequenceStart

__all__ = ["DraftClient", "DraftClientStatus", "DraftTargetStatus", "DraftWant", "NoDrafts"]

DEFAULT_NUM_WANTED = 5
DEFAULT_RESOLVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTargetStatus:
    """One draft node, for metrics and logs."""

    target: str  # its address
    node: str  # its name; empty until the first hello
    is_connected: bool
    is_breaker_open: bool  # also while it is not connected: decode goes on without it
    refusal: str  # why it is incompatible; empty: it is not
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftClientStatus:
    targets: tuple[DraftTargetStatus, ...] = ()
    counters: DraftCounters = field(default_factory=DraftCounters)


class DraftClient:
    """One stream to each draft node behind the targets, which are names or addresses. Any can serve any sequence.

    `start`, `stop` and `status` belong to the event loop; `open`, `update`, `close` and
    `take` to the engine thread. Nothing here raises because of a draft node.
    """

    def __init__(
        self,
        targets: Sequence[str],
        hello: DraftHello,
        *,
        resolver: Resolver = resolve_with_dns,
        resolve_interval_seconds: float = DEFAULT_RESOLVE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        open_channel: Callable[[str], grpc.aio.Channel] = PLAINTEXT.open_channel,
    ) -> None:
        self._hello = hello
        self._changed = threading.Condition()
        self._book = DraftBook(vocab_size=hello.vocab_size, clock=clock)
        self._links_by_node: dict[bytes, DraftLink] = {}
        self._nodes = PeerSet(
            targets, open_peer=self._open_link, resolver=resolver, interval_seconds=resolve_interval_seconds
        )
        self._open_channel = open_channel
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Begins to connect, and returns at once: drafts come when they come."""
        self._loop = asyncio.get_running_loop()
        self._nodes.start()

    async def stop(self) -> None:
        """Ends all streams. Later calls of the engine thread find no proposals."""
        self._loop = None
        await self._nodes.stop()

    def open(
        self,
        sequence_id: int,
        start: SequenceStart,
        token_ids: Sequence[int],
        *,
        num_wanted: int = DEFAULT_NUM_WANTED,
    ) -> None:
        """Announces a sequence as early as its prompt is known, and asks for its first draft."""
        with self._changed:
            self._book.open(sequence_id, start, token_ids, num_wanted=num_wanted)
        self._wake()

    def update(self, updates: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """What a step committed: (sequence id, new token ids, draft tokens wanted next)."""
        with self._changed:
            for sequence_id, new_token_ids, num_wanted in updates:
                self._book.update(sequence_id, new_token_ids, num_wanted=num_wanted)
        self._wake()

    def close(self, sequence_id: int) -> None:
        """The sequence has ended; an unknown one is fine."""
        with self._changed:
            self._book.close(sequence_id)
        self._wake()

    def take(self, wants: Sequence[DraftWant], *, wait_seconds: float) -> StepDrafts:
        """Proposals for this step: what is here, after waiting at most `wait_seconds` for what is not.

        Never waits where the breaker is open, where no node is connected, for a sequence
        whose node has answered that it has nothing, or whose last answer was nothing.
        """
        started = self._clock()
        with self._changed:
            found, missing = self._book.find(wants, wait_seconds=wait_seconds)
            hits = frozenset(found)
            waits = bool(missing) and wait_seconds > 0.0
            if waits:
                self._wake()
                deadline = started + wait_seconds
                while missing and (remaining := deadline - self._clock()) > 0.0:
                    if not self._changed.wait(remaining):
                        break
                    more, missing = self._book.find(missing, wait_seconds=wait_seconds)
                    found.update(more)
            self._book.judge(wants, found, unanswered=missing if waits else ())
        if not waits:
            self._wake()
        return StepDrafts(found, hits=hits, waited_seconds=self._clock() - started)

    def observe_step(self, seconds: float) -> None:
        """How long a step of the engine took."""
        with self._changed:
            self._book.observe_step(seconds)

    def _open_link(self, _target: str, address: str) -> DraftLink:
        return DraftLink(
            address,
            self._hello,
            book=self._book,
            changed=self._changed,
            links_by_node=self._links_by_node,
            open_channel=self._open_channel,
        )

    def status(self) -> DraftClientStatus:
        with self._changed:
            return DraftClientStatus(
                targets=tuple(
                    DraftTargetStatus(
                        target=link.target,
                        node=link.node_name,
                        is_connected=self._book.is_connected(link.index),
                        is_breaker_open=not self._book.is_connected(link.index)
                        or self._book.is_breaker_open(link.index),
                        refusal=link.refusal,
                        num_sequences=self._book.num_sequences(link.index),
                    )
                    for link in self._nodes.peers
                ),
                counters=self._book.counters(),
            )

    def _wake(self) -> None:
        """Lets the streams look for something to send. From any thread."""
        if self._loop is None or not self._book.has_unsent:
            return
        try:
            self._loop.call_soon_threadsafe(self._wake_links)
        except RuntimeError:  # the loop has ended between the two lines: nobody is left to tell
            self._loop = None

    def _wake_links(self) -> None:
        for link in self._nodes.peers:
            link.wake()


class NoDrafts:
    """No draft nodes: the same interface, nothing behind it."""

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    def open(
        self,
        sequence_id: int,
        start: SequenceStart,
        token_ids: Sequence[int],
        *,
        num_wanted: int = DEFAULT_NUM_WANTED,
    ) -> None:
        return

    def update(self, updates: Sequence[tuple[int, Sequence[int], int]]) -> None:
        return

    def close(self, sequence_id: int) -> None:
        return

    def take(self, wants: Sequence[DraftWant], *, wait_seconds: float) -> StepDrafts:
        return StepDrafts()

    def observe_step(self, seconds: float) -> None:
        return

    def status(self) -> DraftClientStatus:
        return DraftClientStatus()
