"""The stream to one draft node, on the event loop: connection, hellos, updates and proposals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
import xxhash

from outrider.drafting.book import UNANSWERED_SECONDS, DraftBook
from outrider.drafting.drafted_sequence import is_well_formed
from outrider.errors import MismatchError, PeerLostError
from outrider.node import NodeInfo
from outrider.rpc.status import from_rpc_error
from outrider.speculation.draft_stream import (
    MAX_ANSWERS_PER_MESSAGE,
    MAX_BRANCHES_PER_MESSAGE,
    DraftHello,
    check_fits,
)
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.draft import hello_to_proto, proposals_from_proto, updates_to_proto
from outrider.wire.node import info_from_proto

FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0
STABLE_SECONDS = 10.0
"""Seconds after which a stream counts as stable. When a stable stream ends, the backoff begins anew."""

REFUSED_BACKOFF_SECONDS = 10.0
HELLO_TIMEOUT_SECONDS = 5.0

LOOK_SECONDS = 0.25
"""Seconds between two checks for deferred updates that have become due."""

ANSWERS_AT_ONCE = 64
"""Number of answers handled before the event loop may do other work, such as sending tokens. They take about 2 ms."""

DraftCall = grpc.aio.StreamStreamCall[draft_pb2.DraftUpdate, draft_pb2.DraftProposals]


class DraftLog(Protocol):
    """A logger of events with fields, as structlog's are, and of a level of `logging`. `exc_info`: an exception."""

    def log(self, level: int, event: str, **fields: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOutlets:
    """How links reach their nodes, and whom they tell what happens."""

    open_channel: Callable[[str], grpc.aio.Channel]
    log: DraftLog
    on_refused: Callable[[str, str], None] = lambda _address, _reason: None  # for a node that does not fit


class DraftLink:
    """A stream that is kept open while `run` runs. Owned by the event loop; the book is shared under `changed`."""

    def __init__(
        self,
        address: str,
        hello: DraftHello,
        *,
        book: DraftBook,
        changed: threading.Condition,
        others: Callable[[], Sequence[DraftLink]],
        outlets: LinkOutlets,
    ) -> None:
        """`others` returns all links of the client, including this one."""
        self.address = address
        self.node_name = ""
        self.refusal = ""
        self.incarnation = b""  # the incarnation of the peer of the last stream
        self._hello = hello
        self._book = book
        self._changed = changed
        self._others = others
        self._outlets, self._log = outlets, outlets.log
        self._wake = asyncio.Event()
        self.wake = self._wake.set  # makes the stream send new updates; event loop only
        with changed:
            self.node = book.nodes.add(rank=draft_rank(hello, address))

    @property
    def is_connected(self) -> bool:
        return self.node.is_connected

    async def run(self) -> None:
        """Keeps the stream connected until cancelled. Then removes the node from the book."""
        try:
            await self._stay_connected()
        finally:
            with self._changed:
                self._book.remove_node(self.node)
                self._changed.notify_all()

    async def _stay_connected(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        clock = asyncio.get_running_loop().time
        while True:
            began_at = clock()
            try:
                is_refused = await self._serve_and_log()
            except Exception as error:  # noqa: BLE001 a fault here, also of a logger, must not end drafts for good
                is_refused, self.node_name = False, ""
                with contextlib.suppress(Exception):
                    self._log.log(logging.ERROR, "stream to a draft node failed", target=self.address, exc_info=error)
            if is_refused:
                backoff = REFUSED_BACKOFF_SECONDS
            if clock() - began_at > STABLE_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff * random.uniform(0.8, 1.2))  # noqa: S311 spreads reconnects, no secret
            backoff = min(backoff * 2.0, MAX_BACKOFF_SECONDS)

    async def _serve_and_log(self) -> bool:
        """Serves one stream, and logs why it has ended. Returns whether the node does not fit."""
        try:
            await self._serve_one_stream()
        except MismatchError as error:
            if error.message != self.refusal:
                self._log.log(logging.WARNING, "draft node refused", target=self.address, error=error.message)
                self._outlets.on_refused(self.address, error.message)
            self.refusal = error.message
            return True
        except PeerLostError as error:
            level, event = logging.DEBUG, "draft node cannot be reached"
            if self.node_name:
                level, event = logging.WARNING, "draft node lost"
            self._log.log(level, event, target=self.address, error=error.message)
            self.node_name = ""
        return False

    async def _serve_one_stream(self) -> None:
        """Serves one stream. Raises: PeerLostError when it ends, MismatchError for an incompatible node."""
        channel = self._outlets.open_channel(self.address)
        call: DraftCall = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        try:
            info = await self._exchange_hellos(call)
            self._claim(info)
            self.node_name, self.refusal = info.name, ""
            proposer = info.model.proposer if info.model else ""
            self._log.log(logging.INFO, "draft node connected", target=self.address, node=info.name, proposer=proposer)
            with self._changed:
                needs_features = info.model is not None and info.model.features is not None
                self._book.connected(self.node, needs_features=needs_features)
            await self._exchange_state(call)
        except grpc.RpcError as error:
            found = from_rpc_error(error, target=self.address)
            if isinstance(found, MismatchError):
                raise found from error
            raise PeerLostError(found.message, node=self.address) from error
        except (asyncio.InvalidStateError, ValueError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            raise PeerLostError(f"{self.address}: {reason}", node=self.address) from error
        finally:
            call.cancel()
            with self._changed:
                self._book.disconnected(self.node)
                self._changed.notify_all()
            await channel.close()

    async def _exchange_hellos(self, call: DraftCall) -> NodeInfo:
        async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
            await call.write(draft_pb2.DraftUpdate(hello=hello_to_proto(self._hello)))
            first = await call.read()
        if not isinstance(first, draft_pb2.DraftProposals) or not first.HasField("hello"):
            raise PeerLostError(f"{self.address} sent no hello", node=self.address)
        info = info_from_proto(first.hello)
        check_fits(self._hello, info)
        return info

    def _claim(self, info: NodeInfo) -> None:
        """Records which process this link reaches. Raises: MismatchError if another link is connected to it."""
        for other in self._others():
            if other.is_connected and other.incarnation == info.incarnation:
                raise MismatchError(f"{info.name} is already connected as {other.address}", reason="SAME_NODE")
        self.incarnation = info.incarnation

    async def _exchange_state(self, call: DraftCall) -> None:
        tasks = [asyncio.create_task(self._write(call)), asyncio.create_task(self._read(call))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in reversed(outcomes):  # reader's error first, since it says best why the stream has ended
            if isinstance(outcome, Exception):
                raise outcome

    async def _write(self, call: DraftCall) -> None:
        """Sends the newest states whenever the stream is writable. Raises: PeerLostError, grpc.RpcError."""
        self._wake.set()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            with self._changed:
                updates, parts = self._book.begin_updates(self.node)
                notices = self._book.take_notices(self.node)
                step_seconds = self._book.nodes.step_seconds
                has_lost_an_update = self._book.has_lost_an_update(self.node)
            if has_lost_an_update:
                raise PeerLostError(
                    f"{self.address} did not answer an update for {UNANSWERED_SECONDS:g} s", node=self.address
                )
            if parts:  # read without the lock, and by a thread if the read may wait for a forward
                read = self._book.read_features
                payloads = await asyncio.to_thread(read, parts) if self._book.reads_wait else read(parts)
                with self._changed:
                    updates = self._book.finish_updates(updates, parts, payloads)
            if updates or notices:
                async with asyncio.timeout(UNANSWERED_SECONDS):  # a write blocks if the node does not read
                    await call.write(updates_to_proto(updates, step_seconds=step_seconds, notices=notices))

    async def _read(self, call: DraftCall) -> None:
        """Reads proposals until the stream ends. Raises: PeerLostError, grpc.RpcError."""
        while True:
            message = await call.read()
            if not isinstance(message, draft_pb2.DraftProposals):
                raise PeerLostError(f"{self.address} ended the stream", node=self.address)
            num_answers = len(message.sequences)
            num_branches = sum(len(answer.branches) for answer in message.sequences)
            if num_answers > MAX_ANSWERS_PER_MESSAGE or num_branches > MAX_BRANCHES_PER_MESSAGE:
                raise PeerLostError(f"{self.address} sent too many answers at once: {num_answers}", node=self.address)
            num_refused = 0
            for start in range(0, num_answers, ANSWERS_AT_ONCE):
                if start:
                    await asyncio.sleep(0)
                answers = message.sequences[start : start + ANSWERS_AT_ONCE]
                num_refused += sum([not self._take(proto) for proto in answers])
            with self._changed:
                self._changed.notify_all()
            if self.node.is_flooding:
                raise PeerLostError(f"{self.address} keeps sending unsolicited answers", node=self.address)
            if num_refused:
                self._log.log(
                    logging.WARNING, "draft node sent invalid answers", node=self.node_name, num_sequences=num_refused
                )
            if self._book.has_unsent:
                self._wake.set()

    def _take(self, proto: draft_pb2.SequenceProposals) -> bool:
        """Applies one answer, and returns False if it was invalid. Holds the lock briefly, since steps need it."""
        answer = proposals_from_proto(proto)
        is_sound = is_well_formed(answer, vocab_size=self._hello.vocab_size)
        with self._changed:
            return self._book.take_answer(self.node, answer, is_well_formed=is_sound)


def draft_rank(hello: DraftHello, address: str) -> int:
    """Returns a rank by rendezvous hashing. A decode node's order of draft nodes is kept when nodes join or leave."""
    return xxhash.xxh3_64_intdigest(hello.incarnation + address.encode())
