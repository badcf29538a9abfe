"""A network between real processes that tests can break: one TCP proxy for each address that others dial."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

CHUNK_BYTES = 65_536
WAIT_SECONDS = 60.0


class Connection:
    """Two sockets and what is between them. Event loop only."""

    def __init__(self, ends: set[str], inner: asyncio.StreamWriter) -> None:
        self.ends = ends  # names of the processes at both
        self._writers = [inner]

    def add(self, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)

    def abort(self) -> None:
        """Both ends get a reset."""
        for writer in self._writers:
            with contextlib.suppress(OSError):
                linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # struct linger: on, 0 seconds
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()


class Network:
    """Runs its proxies in a thread. `heal` undoes `partition` and `slow`; what was held back then arrives."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._connections: set[Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._cut_off: set[str] = set()
        self._delays: dict[str, float] = {}
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def listen(
        self,
        to: str,
        upstream: Callable[[], tuple[str, int]],
        *,
        source: Callable[[int], str],
        address: str,
        port: int = 0,
    ) -> int:
        """The port that leads to process `to`; `source` names the process behind a client's port."""

        async def start() -> int:
            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                peer_port = writer.get_extra_info("peername")[1]
                from_ = await asyncio.to_thread(source, peer_port)
                await self._carry({to, from_}, upstream, reader, writer)

            server = await asyncio.start_server(accept, address, port)
            self._servers.append(server)
            return int(server.sockets[0].getsockname()[1])

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(WAIT_SECONDS)

    def close_connections(self, name: str) -> None:
        """Resets every connection that this process has now."""

        def close() -> None:
            for connection in tuple(self._connections):
                if name in connection.ends:
                    connection.abort()

        self._call(close)

    def partition(self, name: str) -> None:
        """Nothing reaches this process, and nothing that it sends arrives, until the network is healed."""

        def cut() -> None:
            self._cut_off.add(name)
            self._is_whole.clear()

        self._call(cut)

    def slow(self, name: str, seconds: float) -> None:
        """Whatever goes to or from this process takes so much longer."""
        self._call(lambda: self._delays.__setitem__(name, seconds))

    def heal(self) -> None:
        def heal() -> None:
            self._cut_off.clear()
            self._delays.clear()
            self._is_whole.set()

        self._call(heal)

    def stop(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            for connection in tuple(self._connections):
                connection.abort()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(WAIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    def _call(self, function: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(WAIT_SECONDS)

    async def _carry(
        self,
        ends: set[str],
        upstream: Callable[[], tuple[str, int]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        connection = Connection(ends, writer)
        self._connections.add(connection)
        try:
            await self._pass(ends)
            outer_reader, outer_writer = await asyncio.open_connection(*upstream())
            connection.add(outer_writer)
            pumps = [
                asyncio.ensure_future(self._pump(ends, reader, outer_writer)),
                asyncio.ensure_future(self._pump(ends, outer_reader, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # nobody listens there now: the client's connection breaks too
        finally:
            connection.abort()
            self._connections.discard(connection)

    async def _pump(self, ends: set[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._pass(ends)
                writer.write(data)
                await writer.drain()

    async def _pass(self, ends: set[str]) -> None:
        delay = max((self._delays.get(name, 0.0) for name in ends), default=0.0)
        if delay:
            await asyncio.sleep(delay)
        while ends & self._cut_off:
            await self._is_whole.wait()


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
