"""Runs either client from a synchronous test. Each call creates a client."""

from __future__ import annotations

import asyncio

from outrider.client import AsyncClient, Client

WAIT_SECONDS = 60.0
SEED = 5


class SyncReader:
    """Reads a whole stream and keeps its Deltas."""

    client_class = Client

    def __init__(self, targets, **client_options):
        self.deltas = []
        self._make_client = lambda: self.client_class(targets, **client_options)

    def read(self, open_stream, on_delta=lambda _index: None):
        with self._make_client() as client, open_stream(client) as stream:
            for index, new in enumerate(stream):
                self.deltas.append(new)
                if on_delta(index):
                    break
        return stream

    def generate(self, *, on_delta=lambda _index: None, **options):
        return self.read(lambda client: client.generate("hello", **{"seed": SEED, **options}), on_delta)

    def complete(self, **options):
        with self._make_client() as client:
            return client.complete("hello", **options)


class AsyncReader(SyncReader):
    client_class = AsyncClient

    def read(self, open_stream, on_delta=lambda _index: None):
        async def run():
            async with self._make_client() as client, open_stream(client) as stream:
                index = 0
                async for new in stream:
                    self.deltas.append(new)
                    if on_delta(index):
                        break
                    index += 1
            return stream

        return asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))

    def complete(self, **options):
        async def run():
            async with self._make_client() as client:
                return await client.complete("hello", **options)

        return asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))
