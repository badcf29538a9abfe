"""Router sessions over gRPC: the lease, commands and reports."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest

from decode_node.commands import RouterCommand, SessionEnded
from decode_node.inbox import Inbox
from decode_node.sessions import Sessions, merge_tokens
from outrider.errors import CapacityError, MismatchError, PeerLostError
from outrider.node import NodeInfo, NodeReport, NodeRole, NodeState
from outrider.protocol_versions import SUPPORTED_VERSIONS
from outrider.request import FinishReason
from outrider.rpc.status import from_rpc_error
from outrider.session import SampleDone, SampleTokens, SpeculationCounts
from outrider.v1 import session_pb2, session_pb2_grpc
from tests.support.waiting import PATIENCE_SECONDS, within

GROUP = bytes(16)
INFO = NodeInfo(
    incarnation=bytes(16),
    name="decode",
    role=NodeRole.DECODE,
    state=NodeState.SERVING,
    version="0",
)
HELLO = session_pb2.SessionCommand(
    hello=session_pb2.SessionHello(protocol_version=SUPPORTED_VERSIONS.newest, name="router", reached_at="127.0.0.1:1")
)


class Engine:
    """An engine thread that records commands."""

    def __init__(self):
        self.commands = []
        self.changed = asyncio.Event()
        self.inbox = Inbox()

    def submit(self, command):
        self.commands.append(command)
        self.changed.set()

    take = submit  # called by sessions; a test may replace it

    async def until(self, kind, number=1):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(found := [command for command in self.commands if isinstance(command, kind)]) < number:
                await self.changed.wait()
                self.changed.clear()
        return found


def sessions_of(engine, *, timeout_seconds=10 * PATIENCE_SECONDS):
    return Sessions(
        submit=lambda command: engine.take(command),  # noqa: PLW0108 `take` may be replaced later
        has_room=lambda session_id: engine.inbox.has_room(session_id),  # noqa: PLW0108 `inbox` may be replaced later
        info=lambda: INFO,
        report=lambda: NodeReport(state=NodeState.SERVING, incarnation=bytes(16)),
        timeout_seconds=timeout_seconds,
    )


@contextlib.asynccontextmanager
async def serving(**options):
    engine = Engine()
    sessions = sessions_of(engine, **options)
    sessions.is_open = True
    server = grpc.aio.server()
    session_pb2_grpc.add_DecodeServiceServicer_to_server(sessions, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield engine, sessions, channel
    await server.stop(0)


async def connect(channel):
    call = session_pb2_grpc.DecodeServiceStub(channel).Session()
    await call.write(HELLO)
    first = await within(call.read())
    assert first.hello.name == "decode"
    return call


def tokens(*token_ids, start=0):
    return SampleTokens(sequence_group_id=GROUP, sample=0, start_position=start, token_ids=token_ids)


async def fill_window(sessions):
    """Delivers more events than fit into the stream of a router that does not read."""
    for number in range(40):
        sessions.deliver({1: [tokens(*range(50_000), start=number)]})
        await asyncio.sleep(0)


@pytest.mark.parametrize("reads", [True, False])
async def test_a_router_that_hangs_up_ends_its_session(reads):
    async with serving() as (engine, sessions, channel):
        call = await connect(channel)
        await call.write(opening(1))
        (command,) = await engine.until(RouterCommand)
        if not reads:
            await fill_window(sessions)
        call.cancel()
        (ended,) = await engine.until(SessionEnded)
        assert ended.session_id == command.session_id
        assert not sessions.has_unsent_events


@pytest.mark.parametrize("reads", [True, False])
async def test_a_silent_router_loses_its_lease(reads):
    """A router that SIGSTOP has halted does not read, either. The node does not wait until it can write to it."""
    async with serving(timeout_seconds=1.0) as (engine, sessions, channel):
        call = await connect(channel)
        if not reads:
            await fill_window(sessions)
        await engine.until(SessionEnded)
        if reads:
            assert isinstance(await refusal(call), PeerLostError)
        call.cancel()


async def refusal(call):
    """Reads the remaining reports, and returns the error with which the session ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(read_all(call))
    return from_rpc_error(caught.value)


async def read_all(call):
    while await call.read() is not grpc.aio.EOF:
        pass


def opening(number, *, num_tokens=1):
    opened = session_pb2.OpenSequenceGroup(
        sequence_group_id=number.to_bytes(16, "big"),
        transfer_id=GROUP,
        prompt_token_ids=[1] * num_tokens,
        request_id="r",
    )
    return session_pb2.SessionCommand(open=opened)


@pytest.mark.parametrize("bounds", [{"max_commands": 3}, {"max_tokens": 150}], ids=["commands", "tokens"])
async def test_a_router_that_floods_waits_for_the_engine_and_keeps_its_lease(bounds):
    async with serving() as (engine, _, channel):
        engine.inbox = inbox = Inbox(**bounds)
        engine.take = lambda command: (inbox.put(command), Engine.submit(engine, command))
        flooding, other = await connect(channel), await connect(channel)
        for number in range(10):
            await flooding.write(opening(number, num_tokens=50))
        await other.write(opening(99))
        await engine.until(RouterCommand, 4)  # three from the flooding router, one from the other
        for call in (flooding, other):  # waits for more than one check of the waiting session
            await within(call.read())
        assert len(engine.commands) == 4
        taken = [command.message.sequence_group_id[-1] for command in inbox.take_batch()]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(taken) < 11:
                taken += [command.message.sequence_group_id[-1] for command in inbox.take_batch()]
                await flooding.read()
        assert sorted(taken) == [*range(10), 99]
        assert [number for number in taken if number != 99] == list(range(10))  # none is lost, and the order is kept
        flooding.cancel()
        other.cancel()


async def test_a_router_that_lives_but_does_not_read_is_told_and_loses_its_lease(monkeypatch):
    monkeypatch.setattr("decode_node.sessions.MAX_UNSENT_EVENTS", 50)
    async with serving() as (engine, sessions, channel):
        call = await connect(channel)
        other = await connect(channel)
        heartbeat = session_pb2.SessionCommand(heartbeat=session_pb2.SessionHeartbeat())
        await fill_window(sessions)
        for number in range(51):
            sessions.deliver({1: [tokens(number, start=number)]})
            await call.write(heartbeat)
        (ended,) = await engine.until(SessionEnded)
        assert ended.session_id == 1
        assert not sessions.has_unsent_events
        told = await refusal(call)
        assert (type(told), told.reason) == (CapacityError, "NOT_READING")
        assert isinstance(await within(other.read()), session_pb2.SessionReport)
        other.cancel()


async def test_heartbeats_keep_a_session():
    async with serving(timeout_seconds=2.0) as (engine, _, channel):
        call = await connect(channel)
        heartbeat = session_pb2.SessionCommand(heartbeat=session_pb2.SessionHeartbeat())
        async with asyncio.timeout(PATIENCE_SECONDS):
            for _ in range(15):  # 3 s, longer than the timeout, as a report comes every 0.2 s
                await call.read()
                await call.write(heartbeat)
        assert engine.commands == []
        call.cancel()


async def test_nothing_is_read_before_the_hello_is_written():
    """A command may make the node end the session, but no call can be ended with a status during its first write."""
    engine = Engine()
    sessions = sessions_of(engine)
    num_read = 0

    async def commands():
        nonlocal num_read
        for message in (HELLO, opening(1)):
            num_read += 1
            yield message
        await asyncio.Event().wait()

    writing, may_return = asyncio.Event(), asyncio.Event()

    async def write(_report):
        writing.set()
        await may_return.wait()

    serving_task = asyncio.create_task(sessions.serve(commands(), write))
    await within(writing.wait())
    for _ in range(10):
        await asyncio.sleep(0)
    assert num_read == 1
    may_return.set()
    await engine.until(RouterCommand)
    serving_task.cancel()
    await asyncio.wait([serving_task], timeout=PATIENCE_SECONDS)


async def test_events_count_as_unsent_until_they_are_written():
    sessions = sessions_of(Engine())

    async def commands():
        yield HELLO
        await asyncio.Event().wait()

    written, gate = asyncio.Queue(), asyncio.Semaphore(1)

    async def write(report):
        await written.put(report)
        await gate.acquire()

    async def next_event_ids():
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (report := await written.get()).events:
                gate.release()
        return [list(event.tokens.token_ids) for event in report.events]

    serving_task = asyncio.create_task(sessions.serve(commands(), write))
    await within(written.get())  # the hello
    sessions.deliver({1: [tokens(1)]})
    assert await next_event_ids() == [[1]]
    assert sessions.has_unsent_events  # the write has not returned
    sessions.deliver({1: [tokens(2, start=1)]})
    gate.release()
    assert await next_event_ids() == [[2]]
    gate.release()
    await within(written.get())  # the next report, so the write before it has returned
    assert not sessions.has_unsent_events
    serving_task.cancel()
    await asyncio.wait([serving_task], timeout=PATIENCE_SECONDS)


async def test_another_protocol_version_is_refused():
    async with serving() as (_, _, channel):
        call = session_pb2_grpc.DecodeServiceStub(channel).Session()
        hello = session_pb2.SessionHello(protocol_version=99, oldest_protocol_version=98, name="router")
        await call.write(session_pb2.SessionCommand(hello=hello))
        refused = await refusal(call)
        assert isinstance(refused, MismatchError)
        assert refused.message == (
            f"router router speaks protocol 98 to 99, decode node decode speaks protocol {SUPPORTED_VERSIONS}"
        )


async def test_a_report_can_be_sent_at_once(monkeypatch):
    monkeypatch.setattr("decode_node.sessions.REPORT_SECONDS", PATIENCE_SECONDS * 10)
    async with serving() as (_, sessions, channel):
        call = await connect(channel)
        sessions.report_now()
        assert (await within(call.read())).node.incarnation == bytes(16)
        call.cancel()


def test_tokens_of_a_sample_are_merged_with_their_counts_before_its_end():
    counts = [
        SpeculationCounts(num_spec_steps=1, num_draft_tokens=2, acceptance_histogram=(0,) * n + (1,)) for n in range(3)
    ]
    events = [
        SampleTokens(GROUP, sample, 5 + turn, (10 * sample + turn,), (), counts[turn], (7,) * turn)
        for turn in range(3)
        for sample in (0, 1)
    ]
    done = SampleDone(sequence_group_id=GROUP, sample=0, reason=FinishReason.LENGTH)
    *merged, last = merge_tokens([*events, SampleTokens(GROUP, 2, 9, (99,)), done])
    assert [(each.sample, each.start_position, each.token_ids) for each in merged] == [
        (0, 5, (0, 1, 2)),
        (1, 5, (10, 11, 12)),
        (2, 9, (99,)),
    ]
    assert [each.rejected_draft_token_ids for each in merged] == [(7, 7, 7), (7, 7, 7), ()]
    assert last is done
    assert merged[0].speculation == merged[1].speculation == SpeculationCounts.total(counts)
