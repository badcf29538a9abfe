"""One draft target's stream, on the event loop: connect, say hello, write newest state, read proposals."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable

import grpc
import grpc.aio
import xxhash

from decode_node.draft_book import DraftBook
from outrider.errors import MismatchError, PeerLostError
from outrider.node import NodeInfo
from outrider.rpc.status import from_rpc_error
from outrider.service.telemetry.logging import get_logger
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
REFUSED_BACKOFF_SECONDS = 10.0
HELLO_TIMEOUT_SECONDS = 5.0

LOOK_SECONDS = 0.25
"""How often a stream looks for probes and postponed updates that have become due."""

DraftCall = grpc.aio.StreamStreamCall[draft_pb2.DraftUpdate, draft_pb2.DraftProposals]

_log = get_logger("drafts")


class DraftLink:
    """Keeps one stream up until `run` is cancelled. Owned by the event loop; the book is shared under `changed`."""

    def __init__(
        self,
        target: str,
        hello: DraftHello,
        *,
        book: DraftBook,
        changed: threading.Condition,
        links_by_node: dict[bytes, DraftLink],
        open_channel: Callable[[str], grpc.aio.Channel],
    ) -> None:
        """`links_by_node`: the connected link to each draft process, shared by all links."""
        self.target = target
        self.node_name = ""
        self.refusal = ""
        self._hello = hello
        self._book = book
        self._changed = changed
        self._links_by_node = links_by_node
        self._open_channel = open_channel
        self._wake = asyncio.Event()
        with changed:
            self.index = book.add_target(rank=draft_rank(hello, target))

    @property
    def is_connected(self) -> bool:
        return self._book.is_connected(self.index)

    def wake(self) -> None:
        """There may be something to send. On the event loop."""
        self._wake.set()

    async def run(self) -> None:
        """Connects, serves, and connects again, until cancelled; then its place in the book is gone."""
        try:
            await self._stay_connected()
        finally:
            with self._changed:
                self._book.remove_target(self.index)
                self._changed.notify_all()

    async def _stay_connected(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                await self._serve_one_stream()
                backoff = FIRST_BACKOFF_SECONDS
            except MismatchError as error:
                if error.message != self.refusal:
                    _log.warning("draft node refused", target=self.target, error=error.message)
                self.refusal = error.message
                backoff = REFUSED_BACKOFF_SECONDS
            except PeerLostError as error:
                was_up = self.node_name != ""
                self.node_name = ""
                if was_up:
                    backoff = FIRST_BACKOFF_SECONDS
                    _log.warning("draft node lost", target=self.target, error=error.message)
                else:
                    _log.debug("draft node not there", target=self.target, error=error.message)
            await asyncio.sleep(backoff * random.uniform(0.8, 1.2))  # noqa: S311 spreads reconnects, no secret
            backoff = min(backoff * 2.0, MAX_BACKOFF_SECONDS)

    async def _serve_one_stream(self) -> None:
        """Raises: MismatchError for a node that does not fit, PeerLostError when the stream ends."""
        channel = self._open_channel(self.target)
        call: DraftCall = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        try:
            info = await self._exchange_hellos(call)
            self._claim(info)
            self.node_name, self.refusal = info.name, ""
            _log.info("draft node connected", target=self.target, node=info.name, proposer=_proposer(info))
            with self._changed:
                self._book.connected(self.index)
            await self._exchange_state(call)
        except grpc.RpcError as error:
            found = from_rpc_error(error, target=self.target)
            if isinstance(found, MismatchError):
                raise found from error
            raise PeerLostError(found.message, node=self.target) from error
        except (asyncio.InvalidStateError, ValueError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            raise PeerLostError(f"{self.target}: {reason}", node=self.target) from error
        finally:
            call.cancel()
            self._release()
            with self._changed:
                self._book.disconnected(self.index)
                self._changed.notify_all()
            await channel.close()

    async def _exchange_hellos(self, call: DraftCall) -> NodeInfo:
        async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
            await call.write(draft_pb2.DraftUpdate(hello=hello_to_proto(self._hello)))
            first = await call.read()
        if not isinstance(first, draft_pb2.DraftProposals) or not first.HasField("hello"):
            # Ended without a hello: the status says why.
            if not isinstance(first, draft_pb2.DraftProposals) and await call.code() is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(
                    await call.code(),
                    await call.initial_metadata(),
                    await call.trailing_metadata(),
                    await call.details(),
                )
            raise PeerLostError(f"{self.target} sends no hello", node=self.target)
        info = info_from_proto(first.hello)
        check_fits(self._hello, info)
        return info

    def _claim(self, info: NodeInfo) -> None:
        """One link to each process. Raises: MismatchError when another target leads to this one."""
        other = self._links_by_node.setdefault(info.incarnation, self)
        if other is not self:
            raise MismatchError(f"{info.name} is reached as {other.target} already", reason="SAME_NODE")

    def _release(self) -> None:
        for incarnation in [key for key, link in self._links_by_node.items() if link is self]:
            del self._links_by_node[incarnation]

    async def _exchange_state(self, call: DraftCall) -> None:
        tasks = [asyncio.create_task(self._write(call)), asyncio.create_task(self._read(call))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in reversed(outcomes):  # the reader knows better why a stream has ended
            if isinstance(outcome, Exception):
                raise outcome

    async def _write(self, call: DraftCall) -> None:
        """Sends newest state whenever the stream is writable and there is any. Raises: PeerLostError."""
        self._wake.set()
        next_look_at = 0.0
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                pass  # a probe or a postponed update may be due
            self._wake.clear()
            now = asyncio.get_running_loop().time()
            with self._changed:
                updates = self._book.take_updates(self.index)
                # Goes through all sequences: not at each of the many times a step that this wakes.
                is_stuck = now >= next_look_at and self._book.is_stuck(self.index)
                step_seconds = self._book.step_seconds
            if now >= next_look_at:
                next_look_at = now + LOOK_SECONDS
            if is_stuck:
                raise PeerLostError(f"{self.target} does not answer", node=self.target)
            if updates:
                await call.write(updates_to_proto(updates, step_seconds=step_seconds))

    async def _read(self, call: DraftCall) -> None:
        """Takes proposals in until the stream ends. Raises: PeerLostError, grpc.RpcError."""
        while True:
            message = await call.read()
            if not isinstance(message, draft_pb2.DraftProposals):
                raise PeerLostError(f"{self.target} ended the stream", node=self.target)
            num_answers = len(message.sequences)
            if num_answers > MAX_ANSWERS_PER_MESSAGE or _num_branches(message) > MAX_BRANCHES_PER_MESSAGE:
                raise PeerLostError(f"{self.target} sends {num_answers} answers at once", node=self.target)
            answers = [proposals_from_proto(proto) for proto in message.sequences]
            with self._changed:
                num_quarantined = self._book.counters().num_quarantined
                self._book.take_proposals(self.index, answers)
                num_quarantined = self._book.counters().num_quarantined - num_quarantined
                has_unsent = self._book.has_unsent
                is_flooding = self._book.is_flooding(self.index)
                self._changed.notify_all()
            if is_flooding:
                raise PeerLostError(f"{self.target} sends what nobody has asked for", node=self.target)
            if num_quarantined:
                _log.warning("draft node answers nonsense", node=self.node_name, num_sequences=num_quarantined)
            if has_unsent:
                self._wake.set()


def _num_branches(message: draft_pb2.DraftProposals) -> int:
    return sum(len(answer.branches) for answer in message.sequences)


def draft_rank(hello: DraftHello, target: str) -> int:
    """Rendezvous hashing: each decode node has an order of its own among draft nodes, whoever comes and goes."""
    return xxhash.xxh3_64_intdigest(hello.incarnation + target.encode())


def _proposer(info: NodeInfo) -> str:
    return info.model.proposer if info.model is not None else ""
