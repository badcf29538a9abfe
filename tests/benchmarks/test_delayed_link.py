from __future__ import annotations

import asyncio
import time

from benchmarks.three_lines.delayed_link import delayed_link

PATIENCE_SECONDS = 60.0


async def test_everything_arrives_in_order_and_no_sooner_than_the_round_trip():
    async def echo(reader, writer):
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        server,
        delayed_link(server.sockets[0].getsockname()[1], round_trip_seconds=0.02) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        started = time.monotonic()
        for number in range(20):
            writer.write(bytes([number]))
        assert await reader.readexactly(20) == bytes(range(20))
        assert time.monotonic() - started >= 0.02
        writer.close()
        assert await reader.read() == b""
