"""A router that floods a decode node with commands is read slowly, and no other."""

from __future__ import annotations

import asyncio

import pytest

from decode_node import command_pace
from decode_node.command_pace import COMMANDS_PER_SECOND, MAX_BURST, TOKENS_OF_A_COMMAND, CommandPace
from decode_node.commands import GroupCancelled
from outrider.session import CancelSequenceGroup
from outrider.v1 import session_pb2
from outrider.wire.session import command_from_proto
from tests.decode_node.test_sessions import connect, serving
from tests.hostile_peers import opening

CANCEL = session_pb2.SessionCommand(cancel=session_pb2.CancelSequenceGroup(sequence_group_id=bytes(16)))
BURST = 4


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def pace(clock):
    return CommandPace(clock=lambda: clock[0])


def test_a_burst_is_free_and_what_follows_waits_for_its_turn(pace, clock):
    cancel = CancelSequenceGroup(sequence_group_id=bytes(16))
    assert [pace.charge(cancel) for _ in range(int(MAX_BURST))] == [0.0] * int(MAX_BURST)
    wait_seconds = pace.charge(cancel)
    assert wait_seconds == pytest.approx(1 / COMMANDS_PER_SECOND)
    clock[0] += wait_seconds + 10 / COMMANDS_PER_SECOND
    assert [pace.charge(cancel) for _ in range(10)] == [0.0] * 10
    assert pace.charge(cancel) > 0.0


def test_long_prompts_count_for_more(pace):
    opened = command_from_proto(opening([20] * (TOKENS_OF_A_COMMAND * (int(MAX_BURST) - 1))))
    assert pace.charge(opened) == 0.0
    assert pace.charge(opened) == pytest.approx(MAX_BURST / COMMANDS_PER_SECOND)


async def test_a_session_that_floods_is_read_slowly_and_another_is_not(monkeypatch):
    monkeypatch.setattr(command_pace, "MAX_BURST", float(BURST))
    monkeypatch.setattr(command_pace, "COMMANDS_PER_SECOND", 1e-6)
    async with serving(timeout_seconds=30.0) as (engine, _, channel), asyncio.timeout(30):
        flooding, other = await connect(channel), await connect(channel)
        for _ in range(10 * BURST):
            await flooding.write(CANCEL)
        while len(await engine.until(GroupCancelled)) <= BURST:
            await flooding.read()
        for _ in range(BURST):
            await other.write(CANCEL)
        while len({command.session_id for command in await engine.until(GroupCancelled)}) < 2:
            await other.read()
        for call in (flooding, other):
            await call.read()  # reports go on
        sessions = [command.session_id for command in await engine.until(GroupCancelled)]
        assert max(map(sessions.count, sessions)) == BURST + 1
        flooding.cancel()
        other.cancel()
