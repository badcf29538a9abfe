"""The one stream between this router and one decode node: commands out, events in. The stream is the lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from outrider.errors import InternalError, InvalidRequestError, MismatchError, OutriderError, PeerLostError
from outrider.node import NodeInfo, NodeReport
from outrider.protocol_versions import SUPPORTED_VERSIONS
from outrider.rpc.status import from_rpc_error
from outrider.service.liveness import ProgressDeadline
from outrider.service.telemetry.logging import get_logger
from outrider.session import (
    CancelSequenceGroup,
    OpenSequenceGroup,
    SequenceGroupEvent,
)
from outrider.v1 import session_pb2, session_pb2_grpc
from outrider.wire.session import command_to_proto, report_message_from_proto

HEARTBEAT_SECONDS = 0.5

_log = get_logger("sessions")

SessionCall = grpc.aio.StreamStreamCall[session_pb2.SessionCommand, session_pb2.SessionReport]


class GroupListener(Protocol):
    """Who is told about one sequence group. Called on the event loop; must not block, must not raise."""

    def on_event(self, event: SequenceGroupEvent) -> None: ...

    def on_lost(self, error: OutriderError) -> None:
        """The session ended; the node has freed the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterIdentity:
    """How this router introduces itself to decode nodes."""

    name: str
    incarnation: bytes  # 16 random bytes, from the start of the process


class DecodeSession:
    """One session stream, from dial to break. Not reused: a new connection is a new session.

    Owned by the event loop. Commands are queued and written in order; every event goes to
    the listener of its sequence group, at once and in order; events of groups that nobody
    listens to any more are dropped.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        address: str,
        node: NodeInfo,
        identity: RouterIdentity,
        fingerprint: str,
        liveness_timeout_seconds: float,
        on_report: Callable[[NodeReport], None],
    ) -> None:
        self._stub = session_pb2_grpc.DecodeServiceStub(channel)
        self._address = address
        self._node = node
        self._identity = identity
        self._fingerprint = fingerprint
        self._deadline = ProgressDeadline(grace_seconds=liveness_timeout_seconds)
        self._on_report = on_report
        self._commands: asyncio.Queue[session_pb2.SessionCommand] = asyncio.Queue()
        self._listeners: dict[bytes, GroupListener] = {}
        self._is_open = False

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def num_groups(self) -> int:
        """Sequence groups that someone listens to."""
        return len(self._listeners)

    def open_group(self, command: OpenSequenceGroup, listener: GroupListener) -> None:
        """Queues the command. Raises: PeerLostError when the session has ended."""
        if not self._is_open:
            raise PeerLostError(f"decode node {self._node.name} is lost", node=self._node.name)
        self._listeners[command.sequence_group_id] = listener
        self._commands.put_nowait(command_to_proto(command))

    def cancel(self, sequence_group_id: bytes, samples: tuple[int, ...] = ()) -> None:
        """Queues the command: these samples, or the whole group when none are named. No event follows."""
        if self._is_open:
            command = CancelSequenceGroup(sequence_group_id=sequence_group_id, samples=samples)
            self._commands.put_nowait(command_to_proto(command))

    def forget(self, sequence_group_id: bytes) -> None:
        """Nobody listens to this group any more."""
        self._listeners.pop(sequence_group_id, None)

    async def run(self) -> None:
        """Until the session ends. Raises: PeerLostError, MismatchError. Every listener is told first."""
        call = self._stub.Session()
        tasks = [asyncio.ensure_future(work) for work in (self._write(call), self._read(call), self._watch())]
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
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            listeners, self._listeners = list(self._listeners.values()), {}
            for listener in listeners:
                listener.on_lost(error)
        raise error

    async def _write(self, call: SessionCall) -> None:
        hello = session_pb2.SessionHello(
            protocol_version=SUPPORTED_VERSIONS.newest,
            oldest_protocol_version=SUPPORTED_VERSIONS.oldest,
            incarnation=self._identity.incarnation,
            name=self._identity.name,
            fingerprint=self._fingerprint,
            reached_at=self._address,
        )
        await call.write(session_pb2.SessionCommand(hello=hello))
        while True:
            await call.write(await self._next_command())

    async def _next_command(self) -> session_pb2.SessionCommand:
        """What is queued, or a heartbeat: a node frees the work of a router that falls silent."""
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                return await self._commands.get()
        except TimeoutError:
            return session_pb2.SessionCommand(heartbeat=session_pb2.SessionHeartbeat())

    async def _read(self, call: SessionCall) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, session_pb2.SessionReport):  # grpc.aio.EOF
                if await call.code() is grpc.StatusCode.OK:
                    raise PeerLostError(f"decode node {self._node.name} ended the session", node=self._node.name)
                raise PeerLostError(f"decode node {self._node.name}: {await call.details()}", node=self._node.name)
            hello, report, events = report_message_from_proto(message)
            if not self._is_open:
                self._check_hello(hello)
                self._is_open = True
            self._deadline.feed(report)
            for event in events:
                listener = self._listeners.get(event.sequence_group_id)
                if listener is not None:
                    listener.on_event(event)
            self._on_report(report)

    async def _watch(self) -> None:
        while not self._deadline.is_lost():  # noqa: ASYNC110 the deadline moves with every report
            await asyncio.sleep(max(self._deadline.remaining_seconds(), 0.01))
        raise PeerLostError(f"decode node {self._node.name} makes no progress", node=self._node.name)

    def _check_hello(self, hello: NodeInfo | None) -> None:
        if hello is None:
            raise PeerLostError(f"{self._address} sent no hello", node=self._node.name)
        if hello.incarnation != self._node.incarnation:
            raise PeerLostError(f"decode node {self._node.name} was restarted", node=self._node.name)

    def _error_of(self, tasks: Sequence[asyncio.Future[None]]) -> OutriderError:
        """Why the session ended; the reader knows best."""
        failures = [task.exception() for task in (tasks[1], tasks[2], tasks[0]) if task.done() and not task.cancelled()]
        failure = next((failure for failure in failures if failure is not None), None)
        match failure:
            case MismatchError() | PeerLostError():
                return failure
            case grpc.RpcError():
                error = from_rpc_error(failure, target=self._node.name)
                if isinstance(error, MismatchError):
                    return error
                return PeerLostError(f"decode node {self._node.name} is lost: {error.message}", node=self._node.name)
            case InvalidRequestError() | InternalError() | LookupError() | ValueError():
                _log.error("a decode node breaks the protocol", node=self._node.name, error=str(failure))
                return PeerLostError(f"decode node {self._node.name} breaks the protocol", node=self._node.name)
            case _:
                _log.error("session failed", node=self._node.name, error=str(failure), exc_info=failure)
                return PeerLostError(f"the session with {self._node.name} failed", node=self._node.name)
