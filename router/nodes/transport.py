"""The router's gRPC calls to a node, and its session with a decode node: commands out, events in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from outrider.errors import InvalidRequestError, MismatchError, NotFoundError, OutriderError, PeerLostError
from outrider.faults import fault_point
from outrider.node import NodeInfo, NodeReport
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.protocol_versions import SUPPORTED_VERSIONS
from outrider.request import Adapter
from outrider.rpc.status import from_rpc_error
from outrider.rpc.tls import PeerSecurity
from outrider.service.liveness import REPORT_SECONDS
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import TRACEPARENT
from outrider.session import (
    CancelSequenceGroup,
    OpenSequenceGroup,
    RetargetSequenceGroup,
    SequenceGroupCommand,
    SequenceGroupEvent,
)
from outrider.v1 import node_pb2, node_pb2_grpc, prefill_pb2_grpc, router_pb2, session_pb2, session_pb2_grpc
from outrider.wire.adapter import ADAPTER
from outrider.wire.node import REPORT, info_from_proto
from outrider.wire.prefill import CALL, figures_from_proto
from outrider.wire.session import command_to_proto, report_message_from_proto

MAX_TOKENIZER_BYTES = 256 << 20
TOKENIZER_SECONDS = 60.0
ADAPTER_SECONDS = 60.0
HEARTBEAT_SECONDS = 0.5
_HEARTBEAT = session_pb2.SessionCommand(heartbeat=session_pb2.SessionHeartbeat())

_log = get_logger("sessions")

SessionCall = grpc.aio.StreamStreamCall[session_pb2.SessionCommand, session_pb2.SessionReport]


@asynccontextmanager
async def racing(*works: Coroutine[Any, Any, Any]) -> AsyncIterator[tuple[asyncio.Task[Any], ...]]:
    """Runs coroutines as tasks. Enters the block when the first one ends; cancels and awaits the others on exit."""
    tasks = tuple(map(asyncio.ensure_future, works))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterIdentity:
    """This router's identity, which it sends to decode nodes."""

    name: str
    incarnation: bytes  # 16 random bytes, chosen when the process starts

    def hello(self, *, fingerprint: str, reached_at: str) -> session_pb2.SessionHello:
        """Returns a session's first message. `fingerprint`: the model's; `reached_at`: the node's address."""
        return session_pb2.SessionHello(
            protocol_version=SUPPORTED_VERSIONS.newest,
            oldest_protocol_version=SUPPORTED_VERSIONS.oldest,
            incarnation=self.incarnation,
            name=self.name,
            fingerprint=fingerprint,
            reached_at=reached_at,
        )


class NodeTransport:
    """Owns the channel to one address. Its methods raise only OutriderErrors."""

    def __init__(self, security: PeerSecurity, *, address: str) -> None:
        self._security = security
        self._address = address
        self._open_channel()

    def _open_channel(self) -> None:
        self._material = self._security.material
        self._channel = channel = self._security.open_channel(self._address)
        self._node = node_pb2_grpc.NodeServiceStub(channel)
        self._decode = session_pb2_grpc.DecodeServiceStub(channel)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(channel)

    async def identify(self, *, timeout_seconds: float) -> NodeInfo:
        """Returns the node's identity. This first call of a connection opens a new channel if certificates changed."""
        if self._security.material is not self._material:
            old = self._channel
            self._open_channel()
            await old.close()
        with self._errors():
            return info_from_proto(await self._node.GetNode(node_pb2.GetNodeRequest(), timeout=timeout_seconds))

    async def tokenizer_files(self) -> dict[str, bytes]:
        files: dict[str, bytearray] = {}
        num_bytes = 0
        call = self._node.GetTokenizer(node_pb2.GetTokenizerRequest(), timeout=TOKENIZER_SECONDS)
        try:
            with self._errors():
                async for chunk in call:
                    num_bytes += len(chunk.data)
                    if num_bytes > MAX_TOKENIZER_BYTES:
                        raise self._lost(f"sent a tokenizer of more than {MAX_TOKENIZER_BYTES} bytes")
                    files.setdefault(chunk.file_name, bytearray()).extend(chunk.data)
        finally:
            call.cancel()
        return {name: bytes(data) for name, data in files.items()}

    async def reports(self, *, incarnation: bytes) -> AsyncGenerator[NodeReport, None]:
        """Yields the reports of the process `incarnation` until that process is lost. Raises: PeerLostError."""
        call = self._node.Watch(node_pb2.WatchNodeRequest(interval_milliseconds=round(REPORT_SECONDS * 1e3)))
        try:
            with self._errors():
                async for proto in call:
                    report = REPORT.from_proto(proto)
                    if report.incarnation != incarnation:
                        raise self._lost("was restarted")
                    yield report
            raise self._lost("ended its reports")
        finally:
            call.cancel()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Converts errors to OutriderErrors."""
        try:
            yield
        except grpc.RpcError as error:
            found = from_rpc_error(error, target=self._address)
            if isinstance(found, (NotFoundError, PeerLostError)):
                raise found from error
            message = f"{self._address}: {found.message}"
            raise PeerLostError(message, node=self._address, reason=found.reason) from error
        except ValueError as error:
            raise PeerLostError(f"{self._address}: {error}", node=self._address) from error

    def _lost(self, what: str) -> PeerLostError:
        return PeerLostError(f"{self._address} {what}", node=self._address)

    def open_session(self) -> SessionCall:
        """Opens a session with a decode node. The caller (`DecodeSession`) must send the hello first."""
        call: SessionCall = self._decode.Session()
        return call

    async def prefill(self, call: PrefillCall) -> PrefillFigures:
        """Has a prefill node compute and push KV. Cancelling the call stops the node's work."""
        metadata = ((TRACEPARENT, call.traceparent),) if call.traceparent else None
        try:
            return figures_from_proto(await self._prefill.Prefill(CALL.to_proto(call), metadata=metadata))
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self._address) from error

    async def load_adapter(self, name: str, directory: str, fingerprint: str = "") -> Adapter:
        """Has the node load an adapter; one with this fingerprint, if it is not empty.

        Raises: OutriderError, also those with which the node refuses; AbortedError after `ADAPTER_SECONDS`.
        """
        request = router_pb2.LoadAdapterRequest(name=name, directory=directory, fingerprint=fingerprint)
        try:
            response = await self._node.LoadAdapter(request, timeout=ADAPTER_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self._address) from error
        return ADAPTER.from_proto(response.adapter)

    async def unload_adapter(self, name: str, fingerprint: str = "") -> None:
        """Has the node unload an adapter; only one with this fingerprint, if it is not empty.

        Raises: as `load_adapter`; NotFoundError if the node does not have it.
        """
        request = router_pb2.UnloadAdapterRequest(name=name, fingerprint=fingerprint)
        try:
            await self._node.UnloadAdapter(request, timeout=ADAPTER_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error, target=self._address) from error

    async def close(self) -> None:
        await self._channel.close()


class GroupListener(Protocol):
    """Receives the events of one sequence group on the event loop. Methods must not block or raise."""

    def on_event(self, event: SequenceGroupEvent) -> None: ...

    def on_lost(self, error: OutriderError) -> None:
        """Handles the end of the session; the node has freed the group."""


class DecodeSession:
    """One session stream, from its hello to its end. It is not reused: a new connection has a new session.

    The end of the session frees all work of this router on the node.

    Owned by the event loop. Commands are queued and written in order. Each event is passed to the listener of its
    sequence group, at once and in order; events of groups without a listener are dropped.
    """

    def __init__(
        self,
        call: SessionCall,
        *,
        hello: session_pb2.SessionHello,
        node: NodeInfo,
        on_report: Callable[[NodeReport], None],
    ) -> None:
        """`hello`: this router's hello, sent as the first message."""
        self._call = call
        self._hello = hello
        self._node = node
        self._on_report = on_report
        self._commands: asyncio.Queue[SequenceGroupCommand] = asyncio.Queue()
        self._listeners: dict[bytes, GroupListener] = {}
        self.is_open = False

    def open_group(self, command: OpenSequenceGroup, listener: GroupListener) -> None:
        """Adds the group's listener and queues the command. The session must be open."""
        self._listeners[command.sequence_group_id] = listener
        self._commands.put_nowait(command)

    def retarget(self, command: RetargetSequenceGroup) -> None:
        """Queues the command. A Granted event for the new transfer follows, unless the KV is already complete."""
        if self.is_open:
            self._commands.put_nowait(command)

    def cancel(self, sequence_group_id: bytes, samples: tuple[int, ...] = ()) -> None:
        """Queues a cancellation of these samples, or of the whole group if none are named. No event follows."""
        if self.is_open:
            self._commands.put_nowait(CancelSequenceGroup(sequence_group_id=sequence_group_id, samples=samples))

    def forget(self, sequence_group_id: bytes) -> None:
        """Removes the group's listener."""
        self._listeners.pop(sequence_group_id, None)

    async def run(self) -> None:
        """Reads and writes until the stream breaks; `close` must follow. Raises: PeerLostError, MismatchError."""
        try:
            async with racing(self._read(), self._write()) as tasks:
                for task in tasks:
                    if task.done():
                        task.result()  # the reader comes first, because its error says best why the session ended
        except grpc.RpcError as failure:
            error = from_rpc_error(failure, target=self._node.name)
            if isinstance(error, MismatchError):
                raise error from failure
            raise self._lost(f"is lost: {error.message}") from failure
        except PeerLostError:
            raise
        except Exception as failure:
            _log.error("session failed", node=self._node.name, error=str(failure), exc_info=failure)
            raise PeerLostError(f"the session with {self._node.name} failed", node=self._node.name) from failure
        finally:
            self._call.cancel()

    def close(self, error: OutriderError) -> None:
        """Notifies every listener that the session has ended."""
        self.is_open = False
        listeners, self._listeners = list(self._listeners.values()), {}
        for listener in listeners:
            listener.on_lost(error)

    async def _write(self) -> None:
        await self._call.write(session_pb2.SessionCommand(hello=self._hello))
        while True:
            # If there is no command in time, a heartbeat is sent, because nodes free the work of a silent router.
            command: SequenceGroupCommand | None = None
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    command = await self._commands.get()
            await self._call.write(_HEARTBEAT if command is None else command_to_proto(command))
            if isinstance(command, OpenSequenceGroup):
                fault_point("router.opened")

    async def _read(self) -> None:
        while True:
            message = await self._call.read()
            if not isinstance(message, session_pb2.SessionReport):
                has_ended = await self._call.code() is grpc.StatusCode.OK
                why = "the node ended the session" if has_ended else await self._call.details() or "the session broke"
                raise self._lost(f"is lost: {why}")
            try:
                hello, report, events = report_message_from_proto(message)
            except (InvalidRequestError, LookupError, ValueError) as error:
                raise self._lost(f"is lost: it sent an invalid message: {error}") from error
            if not self.is_open:
                self._check_hello(hello)
                self.is_open = True
            for event in events:
                listener = self._listeners.get(event.sequence_group_id)
                if listener is not None:
                    listener.on_event(event)
            self._on_report(report)

    def _check_hello(self, hello: NodeInfo | None) -> None:
        if hello is None:
            raise self._lost("sent no hello")
        if hello.incarnation != self._node.incarnation:
            raise self._lost("was restarted")

    def _lost(self, what: str) -> PeerLostError:
        return PeerLostError(f"decode node {self._node.name} {what}", node=self._node.name)
