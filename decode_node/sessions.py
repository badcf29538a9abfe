"""The routers' sessions. Each router has one stream, which is also its lease."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from decode_node.commands import Command, EventsBySession, RouterCommand, SessionEnded
from decode_node.group_traces import GroupTraces
from outrider.errors import CapacityError, InvalidRequestError, MismatchError, PeerLostError
from outrider.faults import fault_point
from outrider.node import NodeInfo, NodeReport
from outrider.protocol_versions import ProtocolVersions, negotiate
from outrider.service.rpc_errors import Context, rpc_errors
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.session import (
    CancelSequenceGroup,
    Granted,
    KvFailed,
    OpenSequenceGroup,
    SampleTokens,
    SequenceGroupEvent,
    SpeculationCounts,
)
from outrider.v1 import session_pb2, session_pb2_grpc
from outrider.wire.node import ReportWriter
from outrider.wire.session import command_from_proto, report_message_to_proto

MAX_UNSENT_EVENTS = 65_536
"""Maximum number of unsent events for one router. A large batch takes many seconds to produce that many."""

REPORT_SECONDS = 0.2  # the longest interval between two reports to a router
HELLO_SECONDS = 10.0
LOOK_AGAIN_SECONDS = 0.01
"""Seconds between two checks of whether the engine thread's queue has room for a session's next command."""

_log = get_logger("session")


@dataclass(slots=True)
class RouterSession:
    """One router's stream, as the event loop sees it."""

    session_id: int
    router: str
    writer: asyncio.Task[object]
    reports: ReportWriter = field(default_factory=ReportWriter)
    events: list[SequenceGroupEvent] = field(default_factory=list)  # not yet written to the stream
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None  # why this node ended the session

    def end(self, failure: BaseException) -> None:
        """Ends the session from this side, even if its writer is blocked by a peer that does not read."""
        if self.failure is None:
            self.failure = failure
            self.writer.cancel()


class Sessions(session_pb2_grpc.DecodeServiceServicer):
    """DecodeService. Event loop only. Until `is_open`, e.g. while the model loads, routers are refused.

    Commands go to the engine thread through `submit` while there is room; otherwise the stream is not read, and its
    router waits. Events come back through `deliver`. A report is built when the stream is writable, from all events
    since the last one, so a slow router gets fewer, larger messages and never delays the engine.
    """

    def __init__(
        self,
        *,
        submit: Callable[[Command], None],
        has_room: Callable[[int], bool],
        info: Callable[[], NodeInfo],
        report: Callable[[], NodeReport],
        timeout_seconds: float,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`has_room`: whether a session may submit another command.

        `timeout_seconds`: time without a message or heartbeat after which a router loses its lease.
        """
        self._timeout_seconds = timeout_seconds
        self._submit = submit
        self._has_room = has_room
        self._info = info
        self._report = report
        self.traces = GroupTraces(tracer)
        self._sessions: dict[int, RouterSession] = {}
        self._session_ids = itertools.count(1)
        self.is_open = False

    def deliver(self, events_by_session: EventsBySession) -> None:
        for session_id, events in events_by_session.items():
            session = self._sessions.get(session_id)
            if session is None:
                continue
            for event in events:
                if isinstance(event, KvFailed):
                    _log.warning("kv transfer failed", router=session.router, reason=event.message)
            self.traces.observe(session_id, events)
            session.events += events
            session.wake.set()
            if len(session.events) > MAX_UNSENT_EVENTS:
                _end_unread(session)

    def report_now(self) -> None:
        """Reports to every router without waiting for an event or the next interval."""
        for session in self._sessions.values():
            session.wake.set()

    @property
    def has_unsent_events(self) -> bool:
        return any(session.events for session in self._sessions.values())

    async def Session(  # noqa: N802 named by the proto
        self,
        request_iterator: AsyncIterator[session_pb2.SessionCommand],
        context: Context,
    ) -> None:
        async with rpc_errors(context):
            if not self.is_open:
                raise PeerLostError("the decode node is still loading its model", reason="STARTING")
            await self.serve(request_iterator, context.write)

    async def serve(
        self,
        commands: AsyncIterator[session_pb2.SessionCommand],
        write: Callable[[session_pb2.SessionReport], Awaitable[None]],
    ) -> None:
        """Serves one session, from hello to the end of the stream.

        Raises: MismatchError for another protocol version or model, InvalidRequestError for a message that breaks the
        protocol, PeerLostError for a router that sends nothing, CapacityError for one that does not read.
        """
        hello = await self._read_hello(commands)
        writer = asyncio.current_task()
        assert writer is not None
        session = RouterSession(next(self._session_ids), hello.name or "router", writer)
        kv_host = hello.reached_at.rpartition(":")[0].removeprefix("ipv4:").removeprefix("dns:///") or "127.0.0.1"
        self._sessions[session.session_id] = session
        _log.info("session opened", router=session.router, session=session.session_id)
        reader: asyncio.Task[None] | None = None
        try:
            # Written before anything is read, since gRPC cannot end a call with a status during the first write.
            await self._write_hello(session, write)
            reader = asyncio.create_task(self._read_commands(session, kv_host, commands))
            reader.add_done_callback(lambda done: _end_writer(done, session))
            while not reader.done():
                await self._wait_for_events(session)
                events = tuple(session.events)
                merged = merge_tokens(events)
                await write(report_message_to_proto(session.reports.to_proto(self._report()), merged))
                if any(isinstance(event, Granted) for event in merged):
                    fault_point("decode.granted")
                del session.events[: len(events)]  # only once they are written, since a drain waits for an empty list
        except asyncio.CancelledError:
            if session.failure is None:
                raise
            writer.uncancel()  # cancelled by `RouterSession.end`
            raise session.failure from None
        finally:
            if reader is not None:
                reader.cancel()
            del self._sessions[session.session_id]
            self._submit(SessionEnded(session.session_id))
            self.traces.end_session(session.session_id)
            _log.info("session ended", router=session.router, session=session.session_id)

    async def _read_hello(self, commands: AsyncIterator[session_pb2.SessionCommand]) -> session_pb2.SessionHello:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await anext(commands)
        except (StopAsyncIteration, TimeoutError) as error:
            raise InvalidRequestError(f"no hello within {HELLO_SECONDS:g} s", field="hello") from error
        if first.WhichOneof("command") != "hello":
            raise InvalidRequestError("the first message of a session must be a hello", field="hello")
        hello, info = first.hello, self._info()
        theirs = ProtocolVersions.of_hello(oldest=hello.oldest_protocol_version, newest=hello.protocol_version)
        negotiate(info.protocol_versions, theirs, us=f"decode node {info.name}", them=f"router {hello.name}")
        mine = info.model.fingerprint if info.model else ""
        if hello.fingerprint and hello.fingerprint != mine:
            raise MismatchError(
                f"router {hello.name} serves the model with fingerprint {hello.fingerprint}, "
                f"decode node {info.name} has {mine}"
            )
        return hello

    async def _write_hello(
        self, session: RouterSession, write: Callable[[session_pb2.SessionReport], Awaitable[None]]
    ) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                report = session.reports.to_proto(self._report())
                await write(report_message_to_proto(report, (), hello=self._info()))
        except TimeoutError as error:
            raise PeerLostError(
                f"router {session.router} did not read the hello within {HELLO_SECONDS:g} s", node=session.router
            ) from error

    async def _read_commands(
        self, session: RouterSession, kv_host: str, commands: AsyncIterator[session_pb2.SessionCommand]
    ) -> None:
        async for proto in self._until_silent(session, commands):
            if proto.WhichOneof("command") == "heartbeat":
                continue
            # Polled, since the engine thread must not know about event loops.
            while not self._has_room(session.session_id):  # noqa: ASYNC110 see above
                await asyncio.sleep(LOOK_AGAIN_SECONDS)
            command = command_from_proto(proto)
            match command:
                case OpenSequenceGroup():
                    command = self.traces.open(session.session_id, command)
                case CancelSequenceGroup():
                    self.traces.cancel(session.session_id, command)
            self._submit(RouterCommand(session.session_id, command, kv_host))

    async def _until_silent(
        self, session: RouterSession, commands: AsyncIterator[session_pb2.SessionCommand]
    ) -> AsyncIterator[session_pb2.SessionCommand]:
        """Yields messages. Raises: PeerLostError if none comes in time, since TCP does not notice a stopped peer."""
        while True:
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    proto = await anext(commands)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                _log.warning("router is silent", router=session.router, session=session.session_id)
                message = f"router {session.router} sent nothing for {self._timeout_seconds:g} s"
                raise PeerLostError(message, node=session.router) from error
            yield proto

    async def _wait_for_events(self, session: RouterSession) -> None:
        """Waits for an event, for at most `REPORT_SECONDS`."""
        with contextlib.suppress(TimeoutError):  # a report without events shows that this node is alive
            async with asyncio.timeout(REPORT_SECONDS):
                await session.wake.wait()
        session.wake.clear()


def _end_writer(reader: asyncio.Task[None], session: RouterSession) -> None:
    """Ends the session when its reader has ended: at once, or after a last report if the router has closed its side."""
    session.wake.set()
    failure = None if reader.cancelled() else reader.exception()
    if failure is not None:
        session.end(failure)


def _end_unread(session: RouterSession) -> None:
    """Ends the session of a router that sends but does not read, before its events fill this node's memory."""
    if session.failure is None:
        _log.warning("router stopped reading; its session ends", router=session.router, session=session.session_id)
    message = f"router {session.router} stopped reading: more than {MAX_UNSENT_EVENTS} events are unsent"
    session.end(CapacityError(message, reason="NOT_READING"))
    session.events.clear()


def merge_tokens(events: Sequence[SequenceGroupEvent]) -> list[SequenceGroupEvent]:
    """Merges all SampleTokens of one sample into the first one. The other events keep their order."""
    of_tokens = [(event.sequence_group_id, event.sample) for event in events if isinstance(event, SampleTokens)]
    if len(set(of_tokens)) == len(of_tokens):  # at most one for each sample: nothing to merge
        return list(events)
    merged: list[SequenceGroupEvent] = []
    places: dict[tuple[bytes, int], int] = {}  # (group, sample) → index in `merged` of its first tokens
    parts: dict[int, list[SampleTokens]] = {}  # by that index: the events of samples that have several
    for event in events:
        if not isinstance(event, SampleTokens):
            merged.append(event)
            continue
        place = places.setdefault((event.sequence_group_id, event.sample), len(merged))
        if place == len(merged):
            merged.append(event)
            continue
        first = merged[place]
        assert isinstance(first, SampleTokens)
        parts.setdefault(place, [first]).append(event)
    for place, tokens in parts.items():
        merged[place] = tokens[0]._replace(
            token_ids=tuple(chain.from_iterable(each.token_ids for each in tokens)),
            logprobs=tuple(chain.from_iterable(each.logprobs for each in tokens)),
            speculation=SpeculationCounts.total([each.speculation for each in tokens]),
            rejected_draft_token_ids=tuple(chain.from_iterable(each.rejected_draft_token_ids for each in tokens)),
        )
    return merged
