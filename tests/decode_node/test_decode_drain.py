"""A decode node that drains: the last tokens leave before it does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from decode_node.commands import DrainExpired, DrainStarted
from decode_node.node import DecodeNode

PATIENCE_SECONDS = 30.0


def make_node():
    """A node whose engine thread is played by the test."""
    commands = []
    node = DecodeNode(build=lambda *_: None, configured_name="decode", session_timeout_seconds=4.0)
    loop = SimpleNamespace(is_drained=False, submit=commands.append)
    node._parts = SimpleNamespace(loop=loop, groups=SimpleNamespace(num_groups=0))
    return node, loop, commands


async def test_a_node_without_groups_waits_for_the_engine_thread_to_say_so():
    """A group may be in the inbox, or its last events on their way from the engine thread."""
    node, loop, commands = make_node()
    drain = asyncio.create_task(node.drain(PATIENCE_SECONDS))
    await asyncio.wait([drain], timeout=0.1)
    assert not drain.done()
    assert commands == [DrainStarted()]
    loop.is_drained = True
    async with asyncio.timeout(PATIENCE_SECONDS):
        await drain
    assert commands == [DrainStarted()]


async def test_what_still_runs_at_the_deadline_is_given_up():
    node, loop, commands = make_node()

    def submit(command):
        commands.append(command)
        loop.is_drained = loop.is_drained or isinstance(command, DrainExpired)

    loop.submit = submit
    async with asyncio.timeout(PATIENCE_SECONDS):
        await node.drain(0.05)
    assert commands == [DrainStarted(), DrainExpired()]
