"""DraftService: the streams of decode nodes, and the conversion of their messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio

from draft_node.draft_loop import DraftLoop
from draft_node.draft_peer import DraftPeer
from draft_node.sequence_traces import SequenceTraces
from outrider.errors import InvalidRequestError
from outrider.faults import fault_point
from outrider.node import NodeInfo
from outrider.service.rpc_errors import rpc_errors
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import NO_TRACER, Tracer
from outrider.speculation.draft_stream import MAX_FEATURE_BYTES_PER_MESSAGE, DraftHello, check_fits
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.draft import (
    hello_from_proto,
    notice_from_proto,
    proposals_to_proto,
    step_from_proto,
    update_from_proto,
)
from outrider.wire.node import info_to_proto

HELLO_TIMEOUT_SECONDS = 5.0

UPDATES_AT_ONCE = 256
"""Number of updates that are converted before the event loop may do other work. They take about a millisecond."""

DraftContext = grpc.aio.ServicerContext[draft_pb2.DraftUpdate, draft_pb2.DraftProposals]

_log = get_logger("draft_node")


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """The service. The call of each decode node reads that node's newest states and writes the newest answers."""

    def __init__(
        self, draft_loop: Callable[[], DraftLoop], info: Callable[[], NodeInfo], tracer: Tracer = NO_TRACER
    ) -> None:
        """`draft_loop` raises PeerLostError unless the node is serving."""
        self._draft_loop = draft_loop
        self._info = info
        self._tracer = tracer
        self._open: dict[DraftPeer, asyncio.Event] = {}  # each event wakes the peer's writer
        self._is_closing = False
        self._all_gone = asyncio.Event()

    async def Draft(  # noqa: N802 named by the proto
        self, request_iterator: AsyncIterator[draft_pb2.DraftUpdate], context: DraftContext
    ) -> None:
        async with rpc_errors(context):
            hello, first = await self._read_hello(request_iterator)
            loop = self._draft_loop()
            fault_point("draft.hello")
            await context.write(draft_pb2.DraftProposals(hello=info_to_proto(self._info())))
            event_loop = asyncio.get_running_loop()
            wake, room = asyncio.Event(), asyncio.Event()

            def wake_both() -> None:
                wake.set()
                room.set()

            def notify() -> None:  # called from the draft loop's thread
                event_loop.call_soon_threadsafe(wake_both)

            peer = loop.connect(hello, notify)
            self._open[peer] = wake
            _log.info("decode node connected", node=hello.name)
            traces = SequenceTraces(self._tracer)
            reader = asyncio.create_task(_read_updates(loop, peer, room, first, request_iterator, traces))
            writer = asyncio.create_task(self._write_answers(peer, wake, context, traces))
            try:
                await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
                for task in (reader, writer):
                    if task.done():
                        await task  # raises the error that ended it
            finally:
                # No await may come before these calls, since a second cancellation could interrupt it.
                reader.cancel()
                writer.cancel()  # the writer may be blocked by a peer that does not read
                loop.disconnect(peer)
                traces.end()
                del self._open[peer]
                if self._is_closing and not self._open:
                    self._all_gone.set()  # does not wait for gRPC to end the call, which an unread stream delays
                _log.info("decode node disconnected", node=hello.name)
                await asyncio.gather(reader, writer, return_exceptions=True)

    async def close(self, deadline_seconds: float) -> None:
        """Ends every stream and waits until all have ended. Raises: TimeoutError after the deadline."""
        self._is_closing = True
        for wake in self._open.values():
            wake.set()
        if self._open:
            await asyncio.wait_for(self._all_gone.wait(), deadline_seconds)

    async def _read_hello(
        self, request_iterator: AsyncIterator[draft_pb2.DraftUpdate]
    ) -> tuple[DraftHello, draft_pb2.DraftUpdate]:
        """Returns the hello and the message that carries it. Raises: InvalidRequestError if none comes in time,
        MismatchError if the hello does not fit this node.
        """
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                first = await anext(request_iterator, None)
        except TimeoutError as error:
            raise InvalidRequestError(f"no hello within {HELLO_TIMEOUT_SECONDS:g} s", field="hello") from error
        if first is None or not first.HasField("hello"):
            raise InvalidRequestError("the first message must carry the hello", field="hello")
        hello = hello_from_proto(first.hello)
        self._draft_loop()  # raises unless the node is serving
        check_fits(hello, self._info())
        return hello, first

    async def _write_answers(
        self, peer: DraftPeer, wake: asyncio.Event, context: DraftContext, traces: SequenceTraces
    ) -> None:
        """Writes messages until the node closes. Each is made from the newest answers when the previous one is sent."""
        while not self._is_closing:
            await wake.wait()
            wake.clear()
            while answers := peer.take_answers():
                traces.take_answers(answers)
                message = draft_pb2.DraftProposals(sequences=[proposals_to_proto(answer) for answer in answers])
                fault_point("draft.proposal")
                await context.write(message)


async def _read_updates(
    loop: DraftLoop,
    peer: DraftPeer,
    room: asyncio.Event,
    first: draft_pb2.DraftUpdate,
    request_iterator: AsyncIterator[draft_pb2.DraftUpdate],
    traces: SequenceTraces,
) -> None:
    """Reads updates until the decode node closes its side. `room` is set when the peer may have room again.

    Raises: InvalidRequestError for a message with too many features, CapacityError for a peer that does not read.
    """
    message: draft_pb2.DraftUpdate | None = first
    while message is not None:
        step_seconds = step_from_proto(message.step_microseconds)
        feature_bytes_left = MAX_FEATURE_BYTES_PER_MESSAGE
        for start in range(0, len(message.sequences), UPDATES_AT_ONCE):
            fault_point("draft.update")
            updates = [update_from_proto(update) for update in message.sequences[start : start + UPDATES_AT_ONCE]]
            feature_bytes_left -= sum(len(update.features) for update in updates)
            if feature_bytes_left < 0:
                raise InvalidRequestError(
                    f"a message has more than {MAX_FEATURE_BYTES_PER_MESSAGE} bytes of features",
                    field="sequences.features",
                )
            traces.take_updates(updates)
            loop.submit(peer, updates, step_seconds=step_seconds)
            await asyncio.sleep(0)  # lets other streams' messages have their turn
        for start in range(0, len(message.notices), UPDATES_AT_ONCE):
            notices = [notice_from_proto(each) for each in message.notices[start : start + UPDATES_AT_ONCE]]
            loop.submit(peer, notices, step_seconds=step_seconds)
            await asyncio.sleep(0)
        while not peer.has_room:
            room.clear()
            if not peer.has_room:
                await room.wait()
        message = await anext(request_iterator, None)
