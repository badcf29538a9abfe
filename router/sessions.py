"""The one stream between this router and one decode node: commands out, events in. The stream is the lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.errors import MismatchError, OutriderError, PeerLostError
from outrider.faults import fault_point
from outrider.node import NodeInfo, NodeReport
from outrider.service.liveness import ProgressDeadline, until_lost
from outrider.service.telemetry.logging import get_logger
from outrider.session import (
    CancelSequenceGroup,
    OpenSequenceGroup,
    RetargetSequenceGroup,
    SequenceGroupCommand,
    SequenceGroupEvent,
)
from router.transport import SessionMessage, SessionStream

HEARTBEAT_SECONDS = 0.5

_log = get_logger("sessions")


class GroupListener(Protocol):
    """Told about one sequence group. Called on the event loop; must not block, must not raise."""

    def on_event(self, event: SequenceGroupEvent) -> None: ...

    def on_lost(self, error: OutriderError) -> None:
        """The session ended; the node has freed the group."""


class DecodeSession:
    """One session stream, from its hello to its break. Not reused: a new connection is a new session.

    Owned by the event loop. Commands are queued and written in order; every event goes to
    the listener of its sequence group, at once and in order; events of groups that nobody
    listens to any more are dropped.
    """

    def __init__(
        self,
        stream: SessionStream,
        *,
        node: NodeInfo,
        liveness_timeout_seconds: float,
        on_report: Callable[[NodeReport], None],
    ) -> None:
        self._stream = stream
        self._node = node
        self._deadline = ProgressDeadline(grace_seconds=liveness_timeout_seconds)
        self._on_report = on_report
        self._commands: asyncio.Queue[SequenceGroupCommand] = asyncio.Queue()
        self._listeners: dict[bytes, GroupListener] = {}
        self._is_open = False

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def num_groups(self) -> int:
        """Sequence groups with a listener."""
        return len(self._listeners)

    def open_group(self, command: OpenSequenceGroup, listener: GroupListener) -> None:
        """Queues the command. Raises: PeerLostError when the session has ended."""
        if not self._is_open:
            raise PeerLostError(f"decode node {self._node.name} is lost", node=self._node.name)
        self._listeners[command.sequence_group_id] = listener
        self._commands.put_nowait(command)

    def retarget(self, command: RetargetSequenceGroup) -> None:
        """Queues the command. A Granted with the new transfer follows, unless the KV was ready."""
        if self._is_open:
            self._commands.put_nowait(command)

    def cancel(self, sequence_group_id: bytes, samples: tuple[int, ...] = ()) -> None:
        """Queues the command: these samples, or the whole group when none are named. No event follows."""
        if self._is_open:
            self._commands.put_nowait(CancelSequenceGroup(sequence_group_id=sequence_group_id, samples=samples))

    def forget(self, sequence_group_id: bytes) -> None:
        """Nobody listens to this group any more."""
        self._listeners.pop(sequence_group_id, None)

    async def run(self) -> None:
        """Until the session ends. Raises: PeerLostError, MismatchError. Every listener is told first."""
        tasks = [asyncio.ensure_future(work) for work in (self._read(), self._watch(), self._write())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = self._error_of(tasks)
        except asyncio.CancelledError:
            error = PeerLostError("the router is stopping", node=self._node.name, reason="ROUTER_STOPPING")
            raise
        finally:
            self._is_open = False
            for task in tasks:
                task.cancel()
            self._stream.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            listeners, self._listeners = list(self._listeners.values()), {}
            for listener in listeners:
                listener.on_lost(error)
        raise error

    async def _write(self) -> None:
        while True:
            command = await self._next_command()
            await self._stream.write(command)
            if isinstance(command, OpenSequenceGroup):
                fault_point("router.opened")

    async def _next_command(self) -> SequenceGroupCommand | None:
        """What is queued, or None for a heartbeat: a node frees the work of a router that falls silent."""
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                return await self._commands.get()
        except TimeoutError:
            return None

    async def _read(self) -> None:
        while True:
            message = await self._stream.read()
            if not self._is_open:
                self._check_hello(message.hello)
                self._is_open = True
            self._take(message)

    def _take(self, message: SessionMessage) -> None:
        self._deadline.feed(message.report)
        for event in message.events:
            listener = self._listeners.get(event.sequence_group_id)
            if listener is not None:
                listener.on_event(event)
        self._on_report(message.report)

    async def _watch(self) -> None:
        await until_lost(self._deadline)
        raise PeerLostError(f"decode node {self._node.name} makes no progress", node=self._node.name)

    def _check_hello(self, hello: NodeInfo | None) -> None:
        if hello is None:
            raise PeerLostError(f"{self._node.name} sent no hello", node=self._node.name)
        if hello.incarnation != self._node.incarnation:
            raise PeerLostError(f"decode node {self._node.name} was restarted", node=self._node.name)

    def _error_of(self, tasks: Sequence[asyncio.Future[None]]) -> OutriderError:
        """Why the session ended; the reader knows best."""
        failures = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        failure = next((failure for failure in failures if failure is not None), None)
        match failure:
            case MismatchError():
                return failure
            case OutriderError():
                return PeerLostError(f"decode node {self._node.name} is lost: {failure.message}", node=self._node.name)
            case _:
                _log.error("session failed", node=self._node.name, error=str(failure), exc_info=failure)
                return PeerLostError(f"the session with {self._node.name} failed", node=self._node.name)
