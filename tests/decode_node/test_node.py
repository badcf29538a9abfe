"""A decode node's event loop: its drain, which ends only when the last tokens have been sent, and its metrics."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from decode_node.commands import DrainExpired, DrainStarted
from decode_node.node import DecodeNode
from tests.support.waiting import PATIENCE_SECONDS, within


@pytest.fixture
def node():
    return DecodeNode(build=lambda *_: None, configured_name="decode", session_timeout_seconds=4.0)


@pytest.fixture
def loop(node):
    """A stand-in for the node's engine thread, controlled by the test."""
    commands = []
    loop = SimpleNamespace(is_drained=False, commands=commands, submit=commands.append)
    node._parts = SimpleNamespace(loop=loop, groups=SimpleNamespace(num_groups=0))
    return loop


async def test_a_node_without_groups_waits_for_the_engine_thread_to_say_so(node, loop):
    """A group may still be in the inbox, or its last events may be in transit from the engine thread."""
    drain = asyncio.create_task(node.drain(PATIENCE_SECONDS))
    await asyncio.wait([drain], timeout=0.1)
    assert not drain.done()
    assert loop.commands == [DrainStarted()]
    loop.is_drained = True
    await within(drain)
    assert loop.commands == [DrainStarted()]


async def test_what_still_runs_at_the_deadline_is_given_up(node, loop):
    def submit(command):
        loop.commands.append(command)
        loop.is_drained = loop.is_drained or isinstance(command, DrainExpired)

    loop.submit = submit
    await within(node.drain(0.05))
    assert loop.commands == [DrainStarted(), DrainExpired()]


async def test_a_figure_that_cannot_be_had_does_not_stop_the_metrics(node, monkeypatch):
    monkeypatch.setattr("decode_node.node.METRICS_SECONDS", 0.0)
    synced, statuses = asyncio.Event(), iter([KeyError(3), None])

    def status():
        if (failure := next(statuses)) is not None:
            raise failure

    node._parts = SimpleNamespace(
        drafts=SimpleNamespace(status=status),
        groups=SimpleNamespace(prefix_lookups=None),
        engine=SimpleNamespace(runner=SimpleNamespace(rank_load=None)),
        ingest=SimpleNamespace(inbox=SimpleNamespace(counters=dict)),
    )
    monkeypatch.setattr(node, "_load", lambda: None)
    node._metrics = SimpleNamespace(sync=lambda **_: synced.set())
    task = asyncio.create_task(node._sync_metrics())
    await within(synced.wait())
    task.cancel()
