"""Helpers for tests of requests that one router takes over from another."""

from __future__ import annotations

import asyncio

from tests.router.conftest import PATIENCE_SECONDS
from tests.support.memory_store import MemoryAnswerStore, MemoryRecords


class Watched:
    """Wraps a method of `owner`. Reports when a call begins and ends. Calls wait until the wrapper is open."""

    def __init__(self, owner, name, *, is_open):
        self._entered, self._left, self._opened = asyncio.Event(), asyncio.Event(), asyncio.Event()
        if is_open:
            self.open()
        method = getattr(owner, name)

        async def call(*args, **fields):
            self._entered.set()
            try:
                await self._opened.wait()
                return await method(*args, **fields)
            finally:
                self._left.set()

        setattr(owner, name, call)

    async def until_entered(self):
        await asyncio.wait_for(self._entered.wait(), PATIENCE_SECONDS)

    async def until_left(self):
        await asyncio.wait_for(self._left.wait(), PATIENCE_SECONDS)

    def open(self):
        self._opened.set()


def watched(owner, name):
    return Watched(owner, name, is_open=True)


def gated(owner, name):
    return Watched(owner, name, is_open=False)


def request(cluster, max_tokens, **fields):
    return cluster.resumable(max_tokens=max_tokens, **fields)


async def serve(cluster, store_class=MemoryAnswerStore, *, lease_seconds=1.0, **config):
    """Starts a router with a store. Returns (the store, the store's records)."""
    records = MemoryRecords()
    store = store_class(owner=b"router", lease_seconds=lease_seconds, records=records)
    await cluster.serve(store=store, **{"store_append_seconds": 0.02} | config)
    cluster.decode.step_seconds = 0.02
    return store, records


async def run_ahead_of_the_store(pair, num_deltas=30, **fields):
    """Kills the first router when the client has more tokens than the store. Returns the client's next position."""
    call, _, deltas = await pair.begin(num_deltas=3, **fields)
    await pair.first.eventually(lambda: bool(pair.records.get("r").tokens.token_ids()))
    pair.first.service.requests.keeper._work.cancel()
    deltas += [(await call.read()).delta for _ in range(num_deltas)]
    await pair.kill_first()
    position = deltas[-1].start_position + len(deltas[-1].token_ids)
    num_stored = len(pair.records.get("r").tokens.token_ids()[0])
    assert 0 < num_stored < position - deltas[0].start_position
    return position
