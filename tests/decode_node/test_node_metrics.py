from __future__ import annotations

import asyncio
from types import SimpleNamespace

from decode_node.node import DecodeNode


async def test_a_figure_that_cannot_be_had_does_not_stop_the_metrics(monkeypatch):
    monkeypatch.setattr("decode_node.node.METRICS_SECONDS", 0.0)
    synced, statuses = asyncio.Event(), iter([KeyError(3), None])

    def status():
        if (failure := next(statuses)) is not None:
            raise failure

    node = DecodeNode(build=lambda *_: None, configured_name="d", session_timeout_seconds=4.0)
    node._parts = SimpleNamespace(
        drafts=SimpleNamespace(status=status),
        groups=SimpleNamespace(prefix_lookups=None),
        ingest=SimpleNamespace(receiver=SimpleNamespace(counters=None)),
    )
    monkeypatch.setattr(node, "_load", lambda: None)
    node._metrics = SimpleNamespace(sync=lambda **_: synced.set())
    task = asyncio.create_task(node._sync_metrics())
    async with asyncio.timeout(30.0):
        await synced.wait()
    task.cancel()
