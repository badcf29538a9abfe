"""TCP links on loopback with a fixed delay, to emulate the network between two machines.

`python -m benchmarks.three_lines.delayed_link PORT CPUS MS...` runs one link to PORT for each round trip of MS
milliseconds. It is a separate process because a network takes no processor time of the target. It prints the links'
ports as its first line, and ends when its standard input does. CPUS: processors to run on, such as `0,1`; empty: any.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence

CHUNK_BYTES = 65_536


@contextlib.asynccontextmanager
async def delayed_link(port: int, *, round_trip_seconds: float) -> AsyncIterator[int]:
    """Yields a port of 127.0.0.1 on which it listens. Forwards all data to and from `port`, half a round trip later.

    Nothing is lost, reordered or limited in bandwidth.
    """
    delay = round_trip_seconds / 2.0
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        for task in (_pass_on(reader, far_writer, delay), _pass_on(far_reader, writer, delay)):
            running = asyncio.create_task(task)
            tasks.add(running)
            running.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Forwards data until the sender closes. Each chunk is delayed by `delay`, independently of the others."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            at, chunk = await under_way.get()
            await asyncio.sleep(at - loop.time())
            if not chunk:
                return
            writer.write(chunk)

    delivery = asyncio.create_task(deliver())
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            under_way.put_nowait((loop.time() + delay, chunk))
        under_way.put_nowait((loop.time() + delay, b""))
        await delivery
    except ConnectionError:
        pass  # one end is gone, so the other end is closed, too
    finally:
        delivery.cancel()
        writer.close()


async def serve(port: int, round_trips_ms: Sequence[float]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        links = [delayed_link(port, round_trip_seconds=each / 1000.0) for each in round_trips_ms]
        print(*[await stack.enter_async_context(link) for link in links], flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main(arguments: Sequence[str]) -> None:
    port, cpus, *round_trips_ms = arguments
    if cpus:
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    asyncio.run(serve(int(port), [float(each) for each in round_trips_ms]))


if __name__ == "__main__":
    main(sys.argv[1:])
